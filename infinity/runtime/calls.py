"""Whether a call from which a hook was called still runs.

[Note: calls that die]
A call of torch runs a hook before and a hook after; an exception between them, or Ctrl-C, skips the hook after. What
the hook before opened is then of a call that is dead: its frame is on no thread's stack any more.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection
from types import FrameType

_AROUND_HOOKS = ("infinity.", "torch._dynamo.")
"""Modules whose frames may lie between a hook and what called it: torch.compiler.disable wraps hooks."""


class Call:
    """The nearest call outside of infinity, at the moment when this is made.

    Args:
        beyond: names of functions that are not meant, but what called them.
    """

    def __init__(self, beyond: Collection[str] = ()) -> None:
        self._thread = threading.get_ident()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and (
            str(frame.f_globals.get("__name__")).startswith(_AROUND_HOOKS) or frame.f_code.co_name in beyond
        ):
            frame = frame.f_back
        self._frame = frame

    @property
    def of_this_thread(self) -> bool:
        return self._thread == threading.get_ident()

    @property
    def runs(self) -> bool:
        """Whether it has not ended, well or not."""
        frame: FrameType | None = sys._getframe(1)
        if not self.of_this_thread:
            frame = sys._current_frames().get(self._thread)
        while frame is not None:
            if frame is self._frame:
                return True
            frame = frame.f_back
        return False
