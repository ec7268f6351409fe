"""Code that begins updates before the step is decided, and reads states ahead for the other updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

from infinity.durable.commits import Commits
from infinity.state.shard import Shard
from infinity.state.update_request import is_clipped
from infinity.units.arrivals import BackwardPasses
from infinity.units.pump import UpdatePump
from infinity.units.speculation_choice import SpeculationChoice, StepPredictor
from infinity.units.unit import OffloadedUnit
from infinity.units.update import UnitRequest
from infinity.units.update_queue import UpdateQueue


class SpeculativeUpdates:
    """Object that begins speculative updates and reads states ahead. The methods are called under the coordinator's
    lock.

    With several ranks, each rank begins speculative updates without asking the other ranks, because an update contains
    no collective. The ranks decide the step together, and each rank then undoes its wrong speculative updates.

    Args:
        speculation: choice whether updates speculate.
        updates: updates in progress.
        passes: backward passes before the step.
        commits: commits of the model.
        pump: pump of the model.
        units: units, in the order of their indices.
        shards: this rank's shards, in the order of the units.
    """

    def __init__(
        self,
        speculation: SpeculationChoice,
        updates: UpdateQueue,
        passes: BackwardPasses,
        commits: Commits,
        pump: UpdatePump,
        units: Sequence[OffloadedUnit],
        shards: Sequence[Shard],
    ) -> None:
        self._speculation = speculation
        self._updates = updates
        self._passes = passes
        self._commits = commits
        self._pump = pump
        self._units = units
        self._shards = shards

    def gradients_complete(self, unit: OffloadedUnit, optimizer: StepPredictor | None, step: int) -> None:
        """Begin the update of a unit whose gradients seem to be complete, if a speculative update is possible and is
        expected to save time.

        Args:
            unit: unit with complete gradients.
            optimizer: optimizer of all parameters; None when there are several optimizers, or none.
            step: the optimizer step to which the update would belong.
        """
        if optimizer is None or not self._seems_worth_it(unit, optimizer):
            return
        self._pump.advance()
        # the copies of a generation must not be overwritten before the generation is durable
        self._pump.finish_commit()
        self._commits.retire_early()
        self._pump.finish_recovery()
        if self._updates.can_speculate(unit):
            wanted = self._shards[unit.index].localize(optimizer.expected_update(unit.index))
            if wanted:
                self._updates.speculate(unit, wanted, step, committed=self._commits.due(step))

    def _seems_worth_it(self, unit: OffloadedUnit, optimizer: StepPredictor) -> bool:
        return (
            self._speculation.worth_it
            and self._passes.is_last(optimizer.accumulation_steps)
            and unit.gradients.finite
            and (self._commits.frozen or not self._commits.under_way)
        )

    def backward_begins(
        self, order: Callable[[], Sequence[OffloadedUnit]], optimizer: StepPredictor | None, step: int
    ) -> None:
        """If the backward that begins is the last one before the step, read states ahead for updates that will not
        begin during this backward.

        Args:
            order: function that returns all units; the unit that the next forward uses first comes first.
            optimizer: optimizer of all parameters; None when there are several optimizers, or none.
            step: the optimizer step to which the updates belong.
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
        """Undo all speculative updates before the step is decided, and warn once why they were wrong.

        If only the step shows that an update is wrong, for example because the step clips, UpdateQueue.decide undoes
        the update.

        Raises:
            SwapIOError: the device failed.
        """
        self._speculation.warn(cause, advice)
        self.drop()

    def before_landing(self, index: int) -> None:
        """Prepare a unit for further gradients, which will land next.

        If the unit has a decided update, apply the update. If the unit has a speculative update, undo all speculative
        updates.

        Raises:
            SwapIOError: the device failed.
        """
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
        """Undo all speculative updates.

        Raises:
            SwapIOError: the device failed.
        """
        self._speculation.dropped(len(self._updates.speculative))
        self._pump.drop_speculation()

    def wrong(self, requests: Mapping[int, UnitRequest]) -> set[int]:
        """Return the units whose speculative updates differ from the requested updates.

        UpdateQueue.decide also undoes speculative updates that were right, if they have not begun to run. These updates
        begin again, in the order of the next forward.
        """
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
        optimizer: StepPredictor | None,
    ) -> None:
        """Learn from a decided step.

        Args:
            begun: units with an update of the step.
            wrong: units whose speculative updates are undone.
            requests: requested updates, by unit.
            optimizer: optimizer of all parameters; None when there are several optimizers, or none.
        """
        right = {unit.index for unit in begun if unit.update is not None and unit.update.speculated}
        clipped = is_clipped(requests, 1.0 if optimizer is None else optimizer.expected_scale)
        self._speculation.step_decided(right, wrong, requests.keys(), clipped=clipped)
