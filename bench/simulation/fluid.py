"""Activities that take time. Each activity has its own rate, and is slower if it shares resources.

[Note: how activities share]
An activity has an amount of work, a rate when nothing else runs, and an amount of each resource per unit of work. If
activities need more of a resource than exists, each gets a part in proportion to its weight (the number of threads, for
cores). The others get the part that an activity cannot use. This is weighted max-min fairness, by which a scheduler
assigns cores and a memory controller assigns bandwidth. An activity that is slowed down by one resource uses less of
the others.

Transfers of devices have precedence (`TRANSFER`): the few requests of a disk or a link cannot wait, and the cores get
the remaining memory bandwidth.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from simulation.clock import Clock

TRANSFER = 1000.0
"""Weight of a device's transfer; the weight of an activity of cores is the number of its threads."""

_NOTHING = 1e-9  # tolerance for rounding, as a share of an activity's work, and in seconds


class Activity:
    """A running transfer or computation.

    Args:
        work: amount of work, in any unit.
        alone: units per second when nothing else runs.
        takes: amount of each resource per unit, by name.
        weight: weight for a resource that is too small for all activities.
    """

    __slots__ = ("alone", "done", "left", "rate", "takes", "weight", "work")

    def __init__(self, work: float, alone: float, takes: Mapping[str, float], weight: float = 1.0) -> None:
        self.work = self.left = work
        self.alone = alone
        self.takes = {name: amount for name, amount in takes.items() if amount > 0}
        self.weight = weight
        self.rate = 0.0
        self.done: Callable[[], None] = lambda: None


class Fluid:
    """Running activities. Attributes: used: amount used of each resource (core seconds, bytes, device seconds)."""

    def __init__(self, clock: Clock, capacity: Mapping[str, float]) -> None:
        self._clock = clock
        self._capacity = dict(capacity)
        self._running: list[Activity] = []
        self._at = 0.0
        self._version = 0
        self._planned = False
        self.used: dict[str, float] = defaultdict(float)

    def start(self, activity: Activity, done: Callable[[], None]) -> None:
        """Begin an activity. The function `done` is called when the activity has ended."""
        activity.done = done
        if activity.work <= 0:
            self._clock.after(0.0, done)
            return
        for name, amount in activity.takes.items():
            self.used[name] += activity.work * amount
        self._flow()
        self._running.append(activity)
        self._plan_soon()

    def _flow(self) -> None:
        """Update the remaining work of all activities to the present time."""
        elapsed, self._at = self._clock.now - self._at, self._clock.now
        if elapsed > 0:
            for each in self._running:
                each.left -= each.rate * elapsed

    def _plan_soon(self) -> None:
        if not self._planned:
            self._planned = True
            self._clock.after(0.0, self._plan)

    def _plan(self) -> None:
        self._planned = False
        self._flow()
        ended = [each for each in self._running if each.left <= _NOTHING * max(each.work, each.rate)]
        if ended:
            self._running = [each for each in self._running if each not in ended]
            for each in ended:
                each.done()
            self._plan_soon()
            return
        if not self._running:
            return
        share(self._running, self._capacity)
        self._version += 1
        version = self._version
        next_end = min(each.left / each.rate for each in self._running)
        self._clock.after(next_end, lambda: self._plan() if version == self._version and not self._planned else None)


def share(activities: list[Activity], capacity: Mapping[str, float]) -> None:
    """Set the rates of the activities ([Note: how activities share])."""
    left = dict(capacity)
    open_ones = list(activities)
    while open_ones:
        weights: dict[str, float] = defaultdict(float)
        for each in open_ones:
            for name in each.takes:
                weights[name] += each.weight
        fair = {
            id(each): min(
                (left[name] * each.weight / weights[name] / amount for name, amount in each.takes.items()),
                default=each.alone,
            )
            for each in open_ones
        }
        content = [each for each in open_ones if fair[id(each)] >= each.alone]
        # If no activity gets its full rate, fix the rate of the slowest activity: later changes release nothing of the
        # resource that limits it.
        fixed = content or [min(open_ones, key=lambda each: fair[id(each)] / each.alone)]
        for each in fixed:
            each.rate = max(min(fair[id(each)], each.alone), 1e-12 * each.alone)
            for name, amount in each.takes.items():
                left[name] = max(left[name] - each.rate * amount, 0.0)
        open_ones = [each for each in open_ones if each not in fixed]
