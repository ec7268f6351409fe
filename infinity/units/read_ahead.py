"""States that are read during backward, for updates that are decided after the backward.

The states that an update reads are known before the step is decided, and the states do not change before the decision.
If updates do not speculate, the states of the units that the next forward uses first are read ahead, tile by tile, into
the memory of the updates' tiles (the staging). The size of the staging limits the number of tiles that are read ahead.
The tiles remain valid as long as nothing writes these states, even if a step is skipped. The update of a unit takes
over the jobs that read ahead for this unit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from infinity import _native
from infinity.base.interrupt import interrupts_deferred
from infinity.tiers.resources import ModelResources
from infinity.units.unit import OffloadedUnit
from infinity.units.update_jobs import read_update_ahead


class ReadAheadJobs:
    """Jobs that read ahead, by unit and group.

    Invariant: `_jobs` has only units whose states are in the store and are not being written.
    """

    def __init__(self, resources: ModelResources) -> None:
        self._resources = resources
        self._jobs: dict[OffloadedUnit, dict[int, _native.UpdateFuture]] = {}  # by unit and group

    def begin(self, order: Iterable[OffloadedUnit], step: int) -> None:
        """Read ahead the states of units whose states are all in the store, until the staging is full.

        Args:
            order: units without an update in progress; the unit that is needed first comes first.
            step: the optimizer step that will use the states.
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
        """Return the jobs of a unit's `groups`; the updates of these groups take over the jobs.

        Cancel the jobs of the unit's other groups.
        """
        taken = self._jobs.pop(unit, {})
        for index in taken.keys() - set(groups):
            self._resources.pipeline.cancel(taken[index])
        return taken

    def drop(self, but: Collection[int]) -> None:
        """Cancel the jobs of all units except the units in `but`. If the disk has failed, the next read reports the
        error."""
        for unit in [unit for unit in self._jobs if unit.index not in but]:
            self.take(unit, ())
