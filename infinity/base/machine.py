"""What this machine lets us use: RAM (control groups included) and cores."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from infinity.base.control_groups import memory_limits

_ROOT = Path("/")


def available_host_bytes(root: Path = _ROOT) -> int:
    """RAM that can be taken now: the system's, or what the control groups leave, whichever is less.

    Args:
        root: of /sys and /proc where the groups are, for tests.
    """
    left = [max(limit - usage, 0) for limit, usage in memory_limits(root)]
    return min([int(psutil.virtual_memory().available), *left])


def budgets_in_ram(left: int) -> dict[str, str]:
    """memory.host and memory.device that fit together, where the CPU computes. Args: left: RAM that can be taken."""
    return {"host": f"{left // 2 >> 20}MiB", "device": f"{left // 4 >> 20}MiB"}


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))
