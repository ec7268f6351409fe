"""The interval between commits: every N-th step is committed.

If the plan has only an upper bound of N (plan/commit_frequency.py), N is computed from measurements during the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from infinity.plan.commit_frequency import CommitFrequency, affordable_every

logger = logging.getLogger(__name__)


class CommitSchedule:
    """The decision which steps are committed.

    A run that measures N commits its first two steps, to measure the cost of a commit and the time of a step. After
    each commit, the run sets N such that commits take at most 5 % of the time. The cost of a commit is the time during
    which the loop waits for the commit.

    Invariant: all calls of due() for the same step return the same answer, because updates that rely on the first
    answer have begun.

    Several ranks commit the same steps. Before each step, the ranks agree on the largest N that any rank has measured
    (`lead`). This N is used from the step after the next one on. Until then, a rank's own measurement has no effect.

    Args:
        commits: interval between commits from the plan.
        agreed: whether several ranks agree on N (GenerationMaker.agrees_on_pace).
        clock: function that returns the time in seconds.
    """

    def __init__(
        self, commits: CommitFrequency, *, agreed: bool = False, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._most = commits.every
        self._agreed = agreed
        self._measures = commits.at_most
        self._clock = clock
        self._every = self._asked_every = self._measured = 1 if self._measures else commits.every
        self._asked = -1
        self._held_s = 0.0
        self._last: tuple[int, float] | None = None  # of the last commit: its step and its end

    @property
    def every(self) -> int:
        """Number of steps between commits, as measured by this process."""
        return self._measured

    def lead(self, every: int, step: int) -> None:
        """Commit every `every`-th step of the steps after `step`, until the ranks agree again.

        For `step` itself the former interval is used, because some ranks may have already called due() for this step.
        """
        self.due(step)
        self._every = every

    def due(self, step: int) -> bool:
        """Return whether optimizer step `step`, counted from 1, is committed."""
        if step != self._asked:
            self._asked, self._asked_every = step, self._every
        return step % self._asked_every == 0

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the time in this context as time during which the loop waits for a commit."""
        began = self._clock()
        try:
            yield
        finally:
            self._held_s += self._clock() - began

    def finished(self, step: int) -> None:
        """Record that the commit of `step` is durable, and measure N again."""
        if not self._measures:
            return
        cost_s, now = self._held_s, self._clock()
        if self._last is not None and step > self._last[0]:
            step_s = (now - self._last[1] - cost_s) / (step - self._last[0])
            every = min(affordable_every(cost_s, step_s), self._most)
            if every != self._measured:
                logger.info("commits: every %d steps (a commit takes %.3g s, a step %.3g s)", every, cost_s, step_s)
            self._measured = every
            if not self._agreed:
                self._every = every
        self._last, self._held_s = (step, now), 0.0
