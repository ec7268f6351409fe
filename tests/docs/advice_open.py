"""Messages that name a command, an option or a call, and that no known test follows yet.

The list may only get shorter. When a test follows the advice of a message, the message moves to FOLLOWED.
"""

from __future__ import annotations

OPEN: dict[str, tuple[str, ...]] = {
    "cli/doctor/native_core.py": ("--force-reinstall --no-deps --no-binary infin",),
    "cli/doctor/machine.py": ("numactl --cpunodebind=<> --membind=<> i",),
}
"""Sentences without a test, by file: a part of each sentence."""
