"""When updates begin before the step is decided, and when states are read ahead instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

from infinity.durable.commits import Commits
from infinity.state.request import is_clipped
from infinity.state.shard import Shard
from infinity.units.arrivals import Passes
from infinity.units.progress import Progress
from infinity.units.speculation import Predictable, Speculation
from infinity.units.unit import OffloadedUnit
from infinity.units.update import UnitRequest
from infinity.units.updates import Updates


class Speculator:
    """Called under the coordinator's lock. Where there are several ranks each speculates for itself: an update contains
    no collective, and what was begun for nothing is known when the step is decided, together.

    Args:
        units, shards: in the order of their indices.
    """

    def __init__(
        self,
        speculation: Speculation,
        updates: Updates,
        passes: Passes,
        commits: Commits,
        progress: Progress,
        units: Sequence[OffloadedUnit],
        shards: Sequence[Shard],
    ) -> None:
        self._speculation = speculation
        self._updates = updates
        self._passes = passes
        self._commits = commits
        self._progress = progress
        self._units = units
        self._shards = shards

    def complete(self, unit: OffloadedUnit, optimizer: Predictable | None, step: int) -> None:
        """A unit's gradients are complete, as far as can be told: begin its update, if that seems worth while.

        Args:
            optimizer: of all parameters; None where there are several, or none.
            step: that the update would be of.
        """
        if optimizer is None or not self._seems_worth_it(unit, optimizer):
            return
        self._progress.carry_on()
        self._progress.finish_commit()  # what the new generation names must not be written to before it is durable
        self._commits.retire_early()
        self._progress.settle()
        if self._updates.can_speculate(unit):
            wanted = self._shards[unit.index].localize(optimizer.expected_update(unit.index))
            if wanted:
                self._updates.speculate(unit, wanted, step, committed=self._commits.due(step))

    def _seems_worth_it(self, unit: OffloadedUnit, optimizer: Predictable) -> bool:
        return (
            self._speculation.worth_it
            and self._passes.is_last(optimizer.accumulation_steps)
            and unit.gradients.finite
            and (self._commits.frozen or not self._commits.under_way)
        )

    def backward_begins(
        self, order: Callable[[], Sequence[OffloadedUnit]], optimizer: Predictable | None, step: int
    ) -> None:
        """Before the last backward of a step: read what updates need that will not begin during it.

        Args:
            order: gives all units, the one that the next forward uses first comes first.
        """
        if optimizer is None or self._speculation.mode == "off":
            return
        if self._passes.is_last(optimizer.accumulation_steps):
            speculates = self._speculation.worth_it
            if speculates:
                self._commits.retire_early()
                self._updates.reclaim_shadows()
            else:
                self._updates.shadows.lend()
            waiting = (unit for unit in order() if not (speculates and self._updates.can_speculate(unit)))
            self._updates.read_ahead(waiting, step)

    def undo(self, cause: str, advice: str) -> None:
        """What comes before the step shows that speculation was wrong: say why, once, and take it back. What the step
        itself does not want, as where it clips, Updates.decide undoes. Raises SwapIOError: the device failed."""
        self._speculation.warn(cause, advice)
        self.drop()

    def gradients_land(self, index: int) -> None:
        """Gradients of a unit are about to land: no update may read those that are there. Speculation with them was
        wrong. Raises as `undo`."""
        unit = self._units[index]
        if unit.update is None:
            return
        unit.apply_update()
        if unit.speculative is not None:
            self.undo(
                "a gradient came for a unit whose update had begun",
                "Give the optimizer accumulation_steps=, or run all backward passes but the last inside "
                "model.no_sync().",
            )

    def drop(self) -> None:
        """Take speculation back. Raises SwapIOError: the device failed."""
        self._speculation.dropped(len(self._updates.speculative))
        self._progress.drop_speculation()

    def wrong(self, requests: Mapping[int, UnitRequest]) -> set[int]:
        """The units whose speculative updates do not do what is wanted. Updates.decide undoes others, too, which were
        not wrong: those that had not begun, and come in the order of the next forward."""
        return {
            unit.index
            for unit in self._updates.speculative
            if unit.update is not None and unit.update.wanted != requests.get(unit.index)
        }

    def step_decided(
        self,
        begun: Sequence[OffloadedUnit],
        wrong: Set[int],
        requests: Mapping[int, UnitRequest],
        optimizer: Predictable | None,
    ) -> None:
        """Learn from a step. Args: begun: the units with an update of it."""
        right = {unit.index for unit in begun if unit.update is not None and unit.update.speculated}
        clipped = is_clipped(requests, 1.0 if optimizer is None else optimizer.expected_scale)
        self._speculation.step_decided(right, wrong, requests.keys(), clipped=clipped)
