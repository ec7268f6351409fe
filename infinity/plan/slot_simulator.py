"""Simulation of a step, visit by visit: the units that the step fetches, and the units that have a slot at its end.

The simulation makes the same decisions as units/fetcher.py. It does not simulate time. At each visit the used unit is
fetched first. After that, the units that are used next are fetched as long as there is room.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from infinity.io.arena import ArenaRegion, Lease
from infinity.plan.policy import to_prefetch, victims
from infinity.plan.visit_trace import VisitTrace
from infinity.state.discover import HookedModule

_STEPS_MAX = 16
"""Largest number of simulated steps. If no two consecutive steps are alike by then, the mean of the last half of the
steps is used."""


@dataclass
class FetchCounts:
    """Fetches of one unit in one step.

    Attributes:
        forwards, backwards: number of fetches for forward and backward passes.
        at_end: 1 if the unit has a slot when the step's last pass is over, 0 if not; a mean value, if steps differ.
    """

    forwards: float = 0
    backwards: float = 0
    at_end: float = 0


def in_order(units: Sequence[int], sites: Sequence[HookedModule]) -> list[int]:
    """Return these units in the order in which a forward needs them. A unit with tied weights occurs once for each of
    its uses.

    Args:
        units: indices of the units.
        sites: the units that each module needs, in the order of the forward.
    """
    wanted = {*units}
    needed = [index for site in sites for index in site.units if index in wanted]
    visits = [*needed, *sorted(wanted - {*needed})]
    return [index for at, index in enumerate(visits) if at == 0 or visits[at - 1] != index]


class SlotSimulator:
    """Simulation of consecutive steps with the same visits.

    Args:
        visits: pairs (unit, whether the visit belongs to a forward), in the order of the visits.
        sizes: bytes of each unit's slot.
        room: bytes of all slots together.
        from_top: function that tells whether a slot of a given size is allocated from the top of the memory. Slots are
            contiguous, so there may be enough free bytes for a large unit, but no free range that is long enough. None:
            only the total of free bytes is checked, which is correct for several ranks.
    """

    def __init__(
        self,
        visits: Sequence[tuple[int, bool]],
        sizes: Mapping[int, int],
        room: int,
        from_top: Callable[[int], bool] | None,
    ) -> None:
        self._visits = [visit for at, visit in enumerate(visits) if at == 0 or visits[at - 1][0] != visit[0]]
        self._sizes = sizes
        self._room = room
        self._trace = VisitTrace([index for index, _ in self._visits])
        self._slots = _SimulatedSlots(room, from_top)
        self._fetched: dict[int, FetchCounts] = {}

    def steady(self, void: Collection[int]) -> dict[int, FetchCounts]:
        """Simulate steps until two consecutive steps are alike, and return the fetches of such a step.

        Units in `void` lose their slots at the end of each step.
        """
        steps: list[dict[int, FetchCounts]] = []
        while len(steps) < _STEPS_MAX:
            fetched = self._step()
            for index in [each for each in self._slots.there if each in void]:
                self._slots.leave(index)
            if steps and fetched == steps[-1]:
                return fetched
            steps.append(fetched)
        return {index: _mean([step[index] for step in steps[_STEPS_MAX // 2 :]]) for index in self._sizes}

    def _step(self) -> dict[int, FetchCounts]:
        self._fetched = {index: FetchCounts() for index in self._sizes}
        for at, (index, forward) in enumerate(self._visits):
            self._trace.visit(index)
            if index not in self._slots.there:
                self._fetch(index, forward=forward, distance=None)
            self._fetch_ahead(at, index)
        self._trace.close()
        for index in self._slots.there:
            self._fetched[index].at_end = 1
        return self._fetched

    def _fetch_ahead(self, at: int, used: int) -> None:
        there = self._slots.there
        if len(there) == len(self._sizes):
            return
        upcoming = to_prefetch(
            self._trace, self._sizes.__getitem__, self._room, [used], lambda index: index not in there
        )
        for distance, index in upcoming:
            if not self._fetch(index, forward=self._visits[at + 1 + distance][1], distance=distance):
                return

    def _fetch(self, index: int, *, forward: bool, distance: int | None) -> bool:
        """Fetch a unit. To make room, evict units that are used more than `distance` visits from now (None: any
        unit)."""
        slots = self._slots
        while not slots.try_enter(index, self._sizes[index]):
            victim = next(victims(slots.there, self._trace, distance), None)
            if victim is None:
                return False
            slots.leave(victim)
        fetched = self._fetched[index]
        fetched.forwards += forward
        fetched.backwards += not forward
        return True


def _mean(each: Sequence[FetchCounts]) -> FetchCounts:
    totals = (sum(getattr(one, name) for one in each) for name in ("forwards", "backwards", "at_end"))
    return FetchCounts(*(total / len(each) for total in totals))


class _SimulatedSlots:
    """The memory that units are fetched into; `nbytes` and `from_top` are SlotSimulator's room and from_top.

    `there` has the units that have a slot.
    """

    def __init__(self, nbytes: int, from_top: Callable[[int], bool] | None) -> None:
        self._space = None if from_top is None else ArenaRegion(None, 0, nbytes)
        self._from_top = from_top
        self._free = nbytes
        self.there: dict[int, tuple[int, Lease | None]] = {}

    def try_enter(self, index: int, nbytes: int) -> bool:
        if nbytes > self._free:
            return False
        lease = None
        if self._space is not None and self._from_top is not None:
            lease = self._space.try_lease(nbytes, from_top=self._from_top(nbytes))
            if lease is None:
                return False
        self._free -= nbytes
        self.there[index] = nbytes, lease
        return True

    def leave(self, index: int) -> None:
        nbytes, lease = self.there.pop(index)
        self._free += nbytes
        if lease is not None:
            lease.release()
