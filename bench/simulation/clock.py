"""Simulated time: scheduled events, and futures whose waiter advances the time until they are done."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Any


class StuckError(AssertionError):
    """A caller waits, but no event is scheduled that could end the wait."""


class Clock:
    """Simulated time. Attributes: now: seconds since the simulation began."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Run `action` after a number of seconds. Actions at the same instant run in the order of their requests."""
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, action))

    def run_until(self, done: Callable[[], bool]) -> None:
        """Advance time until `done` returns true. Raises StuckError if `done` can never return true."""
        while not done():
            if not self._events:
                raise StuckError(f"nothing is under way at {self.now:.6f} s")
            self.now, _, action = heapq.heappop(self._events)
            action()

    def sleep(self, seconds: float) -> None:
        """Keep the caller busy for a number of seconds; other activities continue."""
        if seconds > 0:
            over = Future(self)
            self.after(seconds, over.complete)
            over.wait()


class Future:
    """Counterpart of _native.IOFuture whose waiter advances time. Attributes: at: time at which the future was done."""

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
        """Wait until the future is done. The wait never times out, because the simulated devices always answer."""
        if not self._done:
            self._clock.run_until(self.done)
        return True

    def then(self, action: Callable[[], None]) -> None:
        """Run `action` when the future is done; immediately if it is done already."""
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
    """Run `action` when all futures are done; immediately if they are done already."""
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
