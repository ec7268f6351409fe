"""Which steps are committed: every N-th. Where the plan only knows an upper bound for N (plan/frequency.py), N is
measured while the run goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from infinity.plan.frequency import Frequency, affordable_every

logger = logging.getLogger(__name__)


class Pace:
    """Which steps are committed.

    A run that measures commits its first two steps, to see what a commit costs and how long a step takes, and after
    each commit sets N so that commits take 5 % of the time at most. What counts as cost is the time in which the loop
    waits for a commit.

    Invariant: what due() answers for a step does not change once it was asked, because updates begin by it.

    Several ranks commit the same steps. What one of them has measured counts for nothing until all have heard of it:
    before each step they agree on the largest N of any of them (lead), which holds from the step after that one on.

    Args:
        led: this process is one of several.
        clock: gives seconds.
    """

    def __init__(
        self, commits: Frequency, *, led: bool = False, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._most = commits.every
        self._led = led
        self._measures = commits.at_most
        self._clock = clock
        self._every = self._asked_every = self._measured = 1 if self._measures else commits.every
        self._asked = -1
        self._held_s = 0.0
        self._last: tuple[int, float] | None = None  # the step of the last commit, and when it was finished

    @property
    def every(self) -> int:
        """Steps between commits, as this process has measured."""
        return self._measured

    def lead(self, every: int, step: int) -> None:
        """All ranks commit each `every`-th step from the one after `step` on, until they agree again: whether `step` is
        due some of them may have asked."""
        self.due(step)
        self._every = every

    def due(self, step: int) -> bool:
        """Whether optimizer step `step`, counted from 1, is committed."""
        if step != self._asked:
            self._asked, self._asked_every = step, self._every
        return step % self._asked_every == 0

    @contextmanager
    def working(self) -> Iterator[None]:
        """The loop waits for a commit in this context."""
        began = self._clock()
        try:
            yield
        finally:
            self._held_s += self._clock() - began

    def finished(self, step: int) -> None:
        """The commit of `step` is durable."""
        if not self._measures:
            return
        cost_s, now = self._held_s, self._clock()
        if self._last is not None and step > self._last[0]:
            step_s = (now - self._last[1] - cost_s) / (step - self._last[0])
            every = min(affordable_every(cost_s, step_s), self._most)
            if every != self._measured:
                logger.info("commits: every %d steps (one takes %.3g s, a step %.3g s)", every, cost_s, step_s)
            self._measured = every
            if not self._led:
                self._every = every
        self._last, self._held_s = (step, now), 0.0
