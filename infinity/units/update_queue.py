"""The updates in progress. An update begins speculatively, or when the step is decided. Updates are finished one by
one."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from infinity.base.interrupt import interrupts_deferred
from infinity.base.profiler_ranges import profiled
from infinity.errors import SwapIOError
from infinity.io.arena import Lease
from infinity.plan.policy import may_keep_slot, may_speculate
from infinity.tiers.destination import destination_of
from infinity.tiers.downloads import WeightsCopy
from infinity.tiers.home import StateHome
from infinity.tiers.resources import ModelResources
from infinity.units.read_ahead import ReadAheadJobs
from infinity.units.resident_update import ResidentUpdates
from infinity.units.speculative_update_buffers import SpeculativeUpdateBuffers
from infinity.units.unit import OffloadedUnit
from infinity.units.update import UnitRequest, UnitUpdate, UpdateState, UpdateTransfer
from infinity.units.update_jobs import submit_update

logger = logging.getLogger(__name__)


class UpdateQueue:
    """All updates in progress.

    Invariant: `_under_way` has the units with an update, in the order in which the updates began. Units with a decided
    update come first.

    Attributes:
        shadows: memory for the new values of speculative updates.
        ahead: states that were read ahead for updates that have not begun.
    """

    def __init__(self, resources: ModelResources, shadows: SpeculativeUpdateBuffers) -> None:
        self._resources = resources
        self.shadows = shadows
        self.ahead = ReadAheadJobs(resources)
        self._resident = ResidentUpdates(resources)
        self._under_way: dict[int, OffloadedUnit] = {}
        self._readers: list[OffloadedUnit] = []
        self._copied: list[OffloadedUnit] = []

    @property
    def speculative(self) -> list[OffloadedUnit]:
        return [unit for unit in self._under_way.values() if unit.speculative is not None]

    @property
    def decided(self) -> list[OffloadedUnit]:
        return [unit for unit in self._under_way.values() if unit.decided is not None]

    @property
    def oldest_decided(self) -> OffloadedUnit | None:
        """Unit whose decided update began first; None if there is no decided update.

        Speculative updates begin after all decided updates.
        """
        oldest = next(iter(self._under_way.values()), None)
        return None if oldest is None or oldest.decided is None else oldest

    # -- speculation --------------------------------------------------------------------------------------------------

    def can_speculate(self, unit: OffloadedUnit) -> bool:
        """Return whether a speculative update of the unit would be useful, and can write its new values without
        overwriting current values."""
        weights, states = unit.homes.weights, unit.homes.all_states()
        if unit.update is not None or not states or unit.homes.are_updated_on_device:
            return False
        at_home = weights.lease is not None
        if not may_speculate(
            trained_whole=not at_home or unit.local.trained_whole,
            weights_in_ram=at_home,
            gradients_in_ram=unit.gradients.in_ram,
        ):
            return False
        in_ram = [home for home in states if home.in_memory]
        if in_ram and unit.index not in self._resources.plan.placement.updates.in_ram:
            return False
        if sum(home.nbytes for home in in_ram) + (weights.nbytes if at_home else 0) > self.shadows.free_bytes:
            return False
        in_store = [home for home in states if not home.in_memory]
        in_store += [] if at_home else [weights.groups[group] for group in unit.homes.states]
        return self._have_spare_copies(in_store)

    def _have_spare_copies(self, homes: Iterable[StateHome]) -> bool:
        return all(self._resources.spare_copy(home.stored()) is not None for home in homes)

    def speculate(self, unit: OffloadedUnit, wanted: UnitRequest, step: int, *, committed: bool) -> bool:
        """Begin the update of a unit before the step is decided.

        Returns:
            Whether the update has begun. It does not begin if there is no memory for the new values or no spare copy in
            the store, or if only some of the unit's weights would get new memory.
        """
        weights = unit.homes.weights
        at_home = weights.lease is not None
        if at_home and len(wanted) < sum(group.numel > 0 for group in unit.local.groups):
            return False  # the new memory would not have the weights of a group without gradients
        updated = [unit.homes.updated(group, wanted[group].moments) for group in wanted]
        resting = [home for homes in updated for home in homes.values() if home.in_memory]
        if committed and not self._have_spare_copies(resting):
            return False
        with interrupts_deferred():
            states = [home for home in resting if home not in weights.groups]
            shadow = self.shadows.try_shadow(weights if at_home else None, states) if resting else {}
            if shadow is None:
                return False
            slot = unit.weights.host_memory() if self._may_keep_slot(unit) else None
            self._submit(unit, wanted, slot, shadow, step, committed=committed)
        return True

    def reclaim_shadows(self) -> None:
        """Take the lent shadow memory back, because updates will speculate again.

        Drop the states that were read ahead into this memory. Wait for decided updates, because they may use this
        memory, and for writes from this memory.
        """
        if not self.shadows.lent_bytes:
            return
        self.ahead.drop(but=())
        for unit in self.decided:
            if unit.update is not None:
                unit.update.wait("computed")
        self.shadows.reclaim()

    def read_ahead(self, order: Iterable[OffloadedUnit], step: int) -> None:
        """Read states of units, in `order`, until the staging is full.

        The states are for the updates of `step`, which is not decided yet.
        """
        self.ahead.begin((unit for unit in order if unit.update is None), step)

    def _copy_down(self, unit: OffloadedUnit) -> WeightsCopy | None:
        """Start to copy a unit's weights from the device to host memory, after releasing the copies that no update uses
        any more."""
        self._copied = [
            other for other in self._copied if other.update is not None and not other.update.release_weights_copy()
        ]
        copy = unit.weights.copy_down()
        if copy is not None:
            self._copied.append(unit)
        return copy

    def _may_keep_slot(self, unit: OffloadedUnit) -> bool:
        """Return whether there is enough slot memory for other units if an update reads the unit's slot, which then
        cannot be evicted."""
        self._readers = [other for other in self._readers if other.reads_slot()]
        kept = sum(other.full.weight_bytes for other in self._readers)
        return may_keep_slot(unit.full.weight_bytes, kept, self._resources.plan.budgets.slot_bytes)

    def wait_for_readers(self) -> None:
        """Wait until no update reads a slot. This raises no error: the error of a failed update is raised when the
        update is finished or undone."""
        for unit in self._readers:
            if unit.update is not None and unit.update.reads_slot():
                unit.update.wait("computed")

    def undo(self, units: Iterable[OffloadedUnit]) -> None:
        """Cancel and undo the speculative updates of these units. When this method returns, none of the updates'
        transfers is in flight.

        Raises:
            SwapIOError: the device failed.
        """
        dropped = [(unit, update) for unit in units if (update := unit.speculative) is not None]
        transfers = [transfer for _, update in reversed(dropped) for transfer in update.native_transfers.values()]
        with interrupts_deferred():  # a canceled update that is not undone would count as valid
            for transfer in transfers:
                self._resources.pipeline.cancel(transfer.future)
            failure = _wait_canceled(transfers)
            for unit, _ in dropped:
                del self._under_way[unit.index]
                unit.undo_update()
        if failure is not None:
            raise failure

    # -- the step -----------------------------------------------------------------------------------------------------

    def decide(
        self, requests: Mapping[int, UnitRequest], order: Sequence[OffloadedUnit], step: int, *, committed: bool
    ) -> list[OffloadedUnit]:
        """Begin the updates of a decided step.

        Speculative updates that match the step continue, and all other speculative updates are undone. After that, the
        updates that are not in progress begin, in `order`.

        Args:
            requests: requested updates, by unit.
            order: all units, in the order in which the next forward is expected to use them.
            step: the optimizer step.
            committed: whether the updates write all states that a generation needs.

        Returns:
            The units that have an update of this step.
        """
        right = {
            unit.index: update
            for unit in self.speculative
            if (update := unit.speculative) is not None
            and update.wanted == requests.get(unit.index)
            and update.committed == committed
        }
        for index in right.keys() - self._withdraw(right):
            right[index].to(UpdateState.DECIDED)
        self.undo(self.speculative)
        self.ahead.drop(but=requests)
        for unit in order:
            if unit.index in requests and unit.update is None:
                slot = unit.weights.host_memory()
                self._submit(unit, requests[unit.index], slot, None, step, committed=committed)
        return self.decided

    def _withdraw(self, updates: Mapping[int, UnitUpdate]) -> set[int]:
        """Withdraw the updates in `updates` that have not begun to run.

        A withdrawn update can begin again in the order of the forward, and can then overwrite the old values. An update
        that has begun to run continues, so that no work is done twice.

        Returns:
            The keys of the withdrawn updates.
        """
        futures = [[transfer.future for transfer in update.native_transfers.values()] for update in updates.values()]
        withdrawn = self._resources.pipeline.withdraw(futures)
        return {index for index, taken_back in zip(updates, withdrawn, strict=True) if taken_back}

    def _submit(
        self,
        unit: OffloadedUnit,
        wanted: UnitRequest,
        slot: Lease | None,
        shadow: Mapping[StateHome, Lease] | None,
        step: int,
        *,
        committed: bool,
    ) -> None:
        """Begin the update of a unit.

        Args:
            unit: unit to update.
            wanted: requested update of each group.
            slot: host memory of the slot with the current weights, which the update may use; None if there is no such
                memory.
            shadow: for a speculative update, the memory for the new values of states in RAM; None for a decided update.
            step: the optimizer step.
            committed: whether the update writes all states that a generation needs.
        """
        weights, speculative = unit.homes.weights, shadow is not None
        copy = self._copy_down(unit) if weights.lease is None else None
        current = slot if copy is None else copy.lease
        beside = {} if current is None else dict.fromkeys(weights.groups, current)
        beside.update(shadow or {})
        destinations = {
            index: {
                state: destination_of(
                    home,
                    beside.get(home),
                    self._copy_to_write(home, speculative=speculative, committed=committed),
                    speculative=speculative,
                )
                for state, home in unit.homes.updated(index, of_group.moments).items()
            }
            for index, of_group in wanted.items()
        }
        update = UnitUpdate(
            unit.name,
            wanted,
            destinations,
            committed=committed,
            speculated=speculative,
            uses_slot=slot is not None,
            weights_copy=copy,
        )
        unit.begin_update(update)
        self._under_way[unit.index] = unit
        if update.speculated and update.uses_slot:
            self._readers.append(unit)
        ahead = self.ahead.take(unit, wanted)
        with profiled("update", unit.name):
            if unit.homes.are_updated_on_device:
                update.transfers.update(self._resident.begin(unit, update, step=step))
                return
            for index in wanted:
                update.transfers[index] = submit_update(
                    self._resources, unit, update, index, step=step, ahead=ahead.get(index)
                )

    def _copy_to_write(self, home: StateHome, *, speculative: bool, committed: bool) -> int | None:
        """Return the copy in the store to which new values are written; None when the new values are kept only in
        RAM."""
        if home.in_memory and not committed:
            return None
        extent = home.stored()
        copy = self._resources.spare_copy(extent) if speculative else self._resources.copy_to_write(extent)
        if copy is None:
            raise AssertionError(f"no spare copy for {extent.state} of unit '{extent.unit}'")
        return copy

    # -- the end ------------------------------------------------------------------------------------------------------

    def finish(self, unit: OffloadedUnit) -> None:
        """If a unit has a decided update, wait for the update and finish it, so that its new values become valid.

        Raises:
            SwapIOError: a transfer failed. Some values of the unit are new, and some are old.
        """
        update = None if unit.decided is None else unit.finish_update()
        if update is None:
            return
        del self._under_way[unit.index]
        if not all(transfer.finite for transfer in update.transfers.values()):
            logger.warning(
                "step %d: a weight or a moment of unit '%s' is no longer finite; the learning rate may be too high",
                next(iter(update.transfers.values())).step,
                unit.name,
            )

    def finish_written(self) -> None:
        """Finish the updates whose new values are written, from the oldest one up to the first one that is not written
        yet."""
        while (unit := self.oldest_decided) is not None and unit.update is not None and unit.update.reached("written"):
            self.finish(unit)

    def finish_all(self) -> None:
        """Wait for every decided update, and finish it.

        Raises:
            SwapIOError: a transfer failed. Some values of the unit are new, and some are old.
        """
        for unit in self.decided:
            self.finish(unit)

    def require_well(self) -> None:
        """Raise an error if the oldest decided update has failed. Does not wait.

        Later updates are checked after they have become the oldest one.

        Raises:
            SwapIOError: a transfer of the update failed.
        """
        unit = self.oldest_decided
        update = None if unit is None else unit.update
        if update is not None:
            update.require_well()


def _wait_canceled(transfers: Iterable[UpdateTransfer]) -> SwapIOError | None:
    """Wait for all transfers. Return the first failure that is not a cancellation; None if there is none."""
    first: SwapIOError | None = None
    for transfer in transfers:
        try:
            transfer.result()
        except SwapIOError as error:
            failure = transfer.future.failure()
            if first is None and failure is not None and failure.kind != "canceled":
                first = error
    return first
