"""Whether the call that ran a hook is still in progress.

[Note: calls that die]
torch runs one hook before a call and one hook after the call. An exception during the call, or Ctrl-C, skips the second
hook. The call is then dead: its frame is no longer on the stack of any thread. Later code must close everything that
the first hook opened for the call.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection
from types import FrameType

_AROUND_HOOKS = ("infinity.", "torch._dynamo.")
"""Prefixes of the modules whose frames may be between a hook and its caller, because torch.compiler.disable wraps
hooks."""


class CallerFrame:
    """The innermost call of a function outside of infinity that is in progress when this object is made.

    Args:
        beyond: names of functions that are skipped, too: the call of such a function does not count, but the call
            around it does.
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
        """Whether the call is still in progress: it has not returned and has not raised."""
        frame: FrameType | None = sys._getframe(1)
        if not self.of_this_thread:
            frame = sys._current_frames().get(self._thread)
        while frame is not None:
            if frame is self._frame:
                return True
            frame = frame.f_back
        return False
