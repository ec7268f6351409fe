"""Ctrl-C and SIGTERM wait for the end of a step: half of an update is no state to stop in."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Run the block to its end and deliver signals that came meanwhile afterwards. Only the main thread gets any, and
    only those that have a handler are held back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    held = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in held:
        signal.signal(number, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        for first, frame in came[:1]:
            held[signal.Signals(first)](first, frame)
