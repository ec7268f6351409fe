"""Ctrl-C and SIGTERM end a run of `infinity finetune` where it can go on from later."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from infinity.ranks.ranks import rank_and_world

_REPEATED_S = 2.0
"""torchrun sends its ranks one signal several times at once."""


@dataclass
class Stop:
    """Whether the run was asked to stop.

    Attributes:
        asked: the exit code, once a Ctrl-C or SIGTERM came; a second one interrupts at once.
        at: when it came, by time.monotonic().
    """

    asked: int = 0
    at: float = 0.0


@contextmanager
def stop_when_asked(say: Callable[[str], None], promise: str) -> Iterator[Stop]:
    """In the block, the first Ctrl-C or SIGTERM only says `promise` and is noted."""
    stop = Stop()
    _, ranks = rank_and_world()

    def handle(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if stop.asked and ranks > 1 and now < stop.at + _REPEATED_S:
            return
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked, stop.at = 128 + number, now
        say(promise)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
