"""States that are read during backward, for updates that are decided after it.

What an update reads is known before the step is decided, and nothing changes it until then. So where no update begins
early the first units of the next forward have their first tiles in the staging when the step comes: as many as held
jobs may have there. What was read stays right as long as nobody writes these states, through a step that is skipped,
too; who updates a unit takes its jobs out of here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from infinity import _native
from infinity.base.interrupt import interrupts_deferred
from infinity.state.unit import Unit
from infinity.tiers.resources import Resources
from infinity.units.update import hold_update


class ReadAhead:
    """Invariant: the states of the units in here are in the store, and nothing writes them."""

    def __init__(self, units: Sequence[Unit], resources: Resources) -> None:
        self._units = units
        self._resources = resources
        self._held: dict[int, dict[int, _native.UpdateFuture]] = {}

    def begin(self, order: Iterable[int], step: int) -> None:
        """Read the states of units, as far as the staging reaches; those that are in the store.

        Args:
            order: units that no update is under way of, the one that is wanted first comes first.
        """
        room = self._resources.pipeline.held_tiles_max - sum(map(self._tiles, self._held))
        for index in order:
            if room <= 0:
                return
            if index not in self._held and self._resources.states_in_store(index):
                self._hold(index, step)
                room -= self._tiles(index)

    def _tiles(self, index: int) -> int:
        unit, tile = self._units[index], self._resources.plan.tile_numel
        return sum(-(-unit.groups[group].numel // tile) for group in self._resources.states[index])

    def _hold(self, index: int, step: int) -> None:
        with interrupts_deferred():
            held = self._held[index] = {}
            for group_index in self._resources.states[index]:
                held[group_index] = hold_update(self._resources, self._units[index], group_index, step=step)

    def take(self, index: int, groups: Collection[int]) -> Mapping[int, _native.UpdateFuture]:
        """The held jobs of a unit's `groups`, for the updates that take them over. Those of its others are dropped."""
        held = self._held.pop(index, {})
        for group_index in held.keys() - set(groups):
            self._resources.pipeline.cancel(held[group_index])
        return held

    def drop(self, but: Collection[int]) -> None:
        """Forget what was read for other units than these. A device that failed will tell whoever reads it next."""
        for index in [index for index in self._held if index not in but]:
            self.take(index, ())
