"""States that are read during backward, for updates that are decided after it.

What an update reads is known before the step is decided, and nothing changes it until then. So where no update
speculates, the first units of the next forward have their first tiles in the staging when the step comes: as many as
may be read ahead. What was read stays right as long as nobody writes these states, through a step that is skipped, too.
The update of a unit takes over the jobs that read ahead for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from infinity import _native
from infinity.base.interrupt import interrupts_deferred
from infinity.tiers.resources import Resources
from infinity.units.jobs import read_update_ahead
from infinity.units.unit import OffloadedUnit


class ReadAhead:
    """Invariant: `_jobs` are of units whose states are in the store, and nothing writes those."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._jobs: dict[OffloadedUnit, dict[int, _native.UpdateFuture]] = {}  # by group

    def begin(self, order: Iterable[OffloadedUnit], step: int) -> None:
        """Read the states of units, as far as the staging reaches; those that are in the store.

        Args:
            order: units that no update is under way of, the one that is wanted first comes first.
        """
        room = self._resources.pipeline.ahead_tiles_max - sum(map(self._tiles, self._jobs))
        for unit in order:
            if room <= 0:
                return
            if unit not in self._jobs and unit.homes.states_in_store():
                self._begin(unit, step)
                room -= self._tiles(unit)

    def _tiles(self, unit: OffloadedUnit) -> int:
        tile = self._resources.plan.budgets.staging.tile_numel
        return sum(-(-unit.local.groups[group].numel // tile) for group in unit.homes.states)

    def _begin(self, unit: OffloadedUnit, step: int) -> None:
        with interrupts_deferred():
            jobs = self._jobs[unit] = {}
            for index in unit.homes.states:
                jobs[index] = read_update_ahead(self._resources, unit, index, step=step)

    def take(self, unit: OffloadedUnit, groups: Collection[int]) -> Mapping[int, _native.UpdateFuture]:
        """The jobs of a unit's `groups`, for the updates that take them over. Those of its others are dropped."""
        taken = self._jobs.pop(unit, {})
        for index in taken.keys() - set(groups):
            self._resources.pipeline.cancel(taken[index])
        return taken

    def drop(self, but: Collection[int]) -> None:
        """Forget what was read for other units than these. A device that failed will tell whoever reads it next."""
        for unit in [unit for unit in self._jobs if unit.index not in but]:
            self.take(unit, ())
