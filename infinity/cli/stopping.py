"""Handling of Ctrl-C and SIGTERM.

A run of `infinity finetune` ends after the current step, so that the run can be resumed.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from infinity.ranks.ranks import rank_and_world

_REPEATED_S = 2.0
"""Seconds in which a second signal counts as a repetition of the first signal.

torchrun sends a signal to its ranks several times at once.
"""


@dataclass
class StopRequest:
    """A request to stop the run.

    Attributes:
        asked: exit code of the program after Ctrl-C or SIGTERM; 0 if no signal has arrived.
        at: time of the signal, by time.monotonic().
    """

    asked: int = 0
    at: float = 0.0


@contextmanager
def stop_when_asked(say: Callable[[str], None], promise: str) -> Iterator[StopRequest]:
    """Record the first Ctrl-C or SIGTERM that arrives in the `with` block, and print `promise`.

    A second signal raises KeyboardInterrupt. With several ranks, a second signal within _REPEATED_S is ignored.

    Args:
        say: function that prints a line.
        promise: line that tells the user what happens next.
    """
    stop = StopRequest()
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
