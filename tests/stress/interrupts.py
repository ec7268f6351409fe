"""Ctrl-C at random places and times: real signals, delivered while a block runs and never after it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import infinity

_ROOT = str(Path(infinity.__file__).parent)


class CtrlC:
    """The process's handler of SIGINT. Outside of `armed()`, Ctrl-C is ignored."""

    def __init__(self) -> None:
        self.delivered = 0
        self._armed = False
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._armed:
            self._armed = False
            self.delivered += 1
            raise KeyboardInterrupt

    @contextmanager
    def armed(self) -> Iterator[None]:
        self._armed = True
        try:
            yield
        finally:
            self._armed = False

    @contextmanager
    def at_line(self, nth: int) -> Iterator[None]:
        """Send Ctrl-C at the `nth` event (line, call or return) of infinity's code in this thread, if there are so many
        events.
        """
        left = nth

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal left
            if not frame.f_code.co_filename.startswith(_ROOT):
                return None
            left -= 1
            if left == 0:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
            return trace

        others = sys.gettrace()  # another trace function, such as coverage's
        with self.armed():
            sys.settrace(trace)
            try:
                yield
            finally:
                sys.settrace(others)

    @contextmanager
    def after(self, seconds: float) -> Iterator[None]:
        """Send Ctrl-C from another thread after some seconds."""
        main, over = threading.main_thread().ident or 0, threading.Event()

        def interrupt() -> None:
            if not over.wait(seconds):
                signal.pthread_kill(main, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            with self.armed():
                yield
        finally:
            over.set()
            thread.join()
