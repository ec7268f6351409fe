"""Simulated time: what happens when, and futures that who waits for them drives to their end."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Any


class StuckError(AssertionError):
    """Somebody waits, and nothing will ever happen any more."""


class Clock:
    """Attributes: now: seconds since the simulation began."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Have `action` run in so many seconds; of those at one instant the first that was asked for comes first."""
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, action))

    def run_until(self, done: Callable[[], bool]) -> None:
        """Let time go on until `done` says yes. Raises StuckError where that never happens."""
        while not done():
            if not self._events:
                raise StuckError(f"nothing is under way at {self.now:.6f} s")
            self.now, _, action = heapq.heappop(self._events)
            action()

    def sleep(self, seconds: float) -> None:
        """The caller is busy for so long; what is under way goes on."""
        if seconds > 0:
            over = Future(self)
            self.after(seconds, over.complete)
            over.wait()


class Future:
    """As _native.IOFuture. Whoever waits lets time go on. Attributes: at: when it was done."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._done = False
        self.at = 0.0
        self._failure: Any = None
        self._then: list[Callable[[], None]] = []

    def done(self) -> bool:
        return self._done

    def failure(self) -> Any:
        return self._failure

    def wait(self, timeout: float | None = None) -> bool:
        """Never times out: the simulated devices answer."""
        if not self._done:
            self._clock.run_until(self.done)
        return True

    def then(self, action: Callable[[], None]) -> None:
        """Have `action` run once the future is done: at once where it is."""
        if self._done:
            action()
        else:
            self._then.append(action)

    def complete(self, failure: Any = None) -> None:
        if self._done:
            return
        self._done, self._failure, self.at = True, failure, self._clock.now
        actions, self._then = self._then, []
        for action in actions:
            action()


def when_all(futures: Iterable[Future], action: Callable[[], None]) -> None:
    """Have `action` run once all are done: at once where they are."""
    open_ones = [future for future in futures if not future.done()]
    left = len(open_ones)
    if not left:
        action()
        return

    def one_less() -> None:
        nonlocal left
        left -= 1
        if not left:
            action()

    for future in open_ones:
        future.then(one_less)
