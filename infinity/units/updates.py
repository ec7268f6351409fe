"""The updates under way, unit by unit: begun early on a guess, or once the step is decided, and landed one by one.

[Note: a step is a dataflow]

    gradients complete ──guess──▶ GUESSED ──step() agrees──▶ DECIDED
                                     └──step() disagrees, or never comes──▶ undone: what was current still is
    step() ─────────────────────────────────▶ DECIDED ──computed──▶ taken in ──written──▶ landed
    backward begins ──▶ first states READ AHEAD ──taken over──┘

A guess is that the step will neither clip nor skip, with the hyperparameters of now. It reads what is current and
writes beside it: into a slot of the store that nobody names, and for weights in RAM into other memory. So it may be
dropped at any time, and whoever looks meanwhile sees the weights of before.

A decided update may overwrite. Whoever wants the unit waits for this unit alone, and where its new weights are in
memory only until they are computed: then they are taken in, while what goes to the store may still be on its way there.
From the landing on that counts, too.

Both end in the same bits as a step that waits for all of it, since it is the same jobs over the same bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from infinity.base.interrupt import interrupts_deferred
from infinity.errors import SwapIOError
from infinity.io.arena import Lease
from infinity.io.engine import Transfer
from infinity.io.store import wait_all
from infinity.state.request import GroupUpdate
from infinity.state.unit import Unit
from infinity.tiers.home import UnitWeights
from infinity.tiers.resources import Resources
from infinity.tiers.slots import Written
from infinity.units.gradients import Gradients
from infinity.units.read_ahead import ReadAhead
from infinity.units.update import Milestone, UpdateTransfer, WeightsPlace, submit_update

logger = logging.getLogger(__name__)

UnitRequest = Mapping[int, GroupUpdate]
"""What is wanted of a unit's groups, by their index."""

_SLOT_SHARE = 4  # of the memory for fetched weights, what early updates may keep from being used for others: 1/4


@dataclass(eq=False)
class UnitUpdate:
    """One unit's update under way.

    Attributes:
        place: where its weights are and go, and whether it is a guess.
        committed: it writes what a generation needs.
        viewed: somebody holds views of the weights' memory, so that the new ones must go there.
        taken_in: the new weights that are in memory count.
    """

    unit: Unit
    wanted: UnitRequest
    place: WeightsPlace
    committed: bool
    transfers: dict[int, UpdateTransfer]
    viewed: bool = False
    taken_in: bool = False

    def until(self, milestone: Milestone) -> list[Transfer]:
        return [transfer.until(milestone) for transfer in self.transfers.values()]

    def reached(self, milestone: Milestone) -> bool:
        """Well or not."""
        return all(transfer.done() for transfer in self.until(milestone))

    def wait(self, milestone: Milestone) -> None:
        """Until it is reached, well or not."""
        for transfer in self.until(milestone):
            transfer.wait()

    def written(self, weights: UnitWeights) -> Written:
        """The new weights that are on their way to the store."""
        return {
            index: (transfer.slot_of(weights.groups[index]), transfer.until("weights"))
            for index, transfer in self.transfers.items()
        }


class Updates:
    """Invariant: a unit has at most one update under way, a guess or a decided one.

    Attributes:
        guesses, decided: by unit.
        shadow_bytes: host memory that is free for the new weights of early updates; while these are not worth while it
            is lent to the staging.
        ahead: what was read for updates that are neither.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        resources: Resources,
        gradients: Gradients,
    ) -> None:
        self._units = units
        self._resources = resources
        self._gradients = gradients
        self.shadow_bytes = resources.plan.shadow_bytes
        self.guesses: dict[int, UnitUpdate] = {}
        self.decided: dict[int, UnitUpdate] = {}
        self.ahead = ReadAhead(units, resources)
        self._lent: list[Lease] = []

    # -- guesses ------------------------------------------------------------------------------------------------------

    def can_guess(self, index: int) -> bool:
        """Whether an early update of a unit can leave everything as it is, and has transfers to hide."""
        resources = self._resources
        homes = resources.states_in_store(index)
        if not self._gradients.in_ram(index):
            return False  # it would wait for their way to the store and back
        if index in self.guesses or index in self.decided or not homes:
            return False
        weights = resources.weights[index]
        trained = [weights.groups[group] for group in resources.states[index]]
        if weights.lease is None:
            homes += trained
        elif weights.nbytes > self.shadow_bytes:
            return False
        return all(resources.spare_slot(home.stored()) is not None for home in homes)

    def guess(self, index: int, wanted: UnitRequest, slot: Lease | None, step: int, *, committed: bool) -> bool:
        """Begin the update of a unit before the step is decided. False where there is no memory for it, or where only a
        part of its weights would be new in other memory.

        Args:
            slot: the host memory its weights were fetched to, where they are used there.
        """
        unit, weights = self._units[index], self._resources.weights[index]
        place = WeightsPlace(speculative=True)
        if weights.lease is None:
            place = replace(place, slot=slot if self._may_hold(unit) else None)
        else:
            if len(wanted) < len(unit.groups):
                return False  # the other memory would have nothing of a group without gradients
            shadow = self._resources.weights_ram.try_lease(weights.nbytes)
            if shadow is None:
                return False
            self.shadow_bytes -= shadow.nbytes
            place = replace(place, shadow=shadow)
        with interrupts_deferred():
            self._submit(self.guesses, unit, wanted, place, step, committed=committed)
        return True

    @property
    def lent_bytes(self) -> int:
        """Of the memory for early updates, what the staging has."""
        return sum(lease.nbytes for lease in self._lent)

    def lend_shadows(self) -> None:
        """No early updates for now: have their memory used for states that are read ahead."""
        for index in sorted(self._resources.plan.weights_in_ram):
            nbytes = self._units[index].weight_bytes
            if not 0 < nbytes <= self.shadow_bytes:
                continue
            with interrupts_deferred():
                lease = self._resources.weights_ram.try_lease(nbytes)
                if lease is not None:
                    self._resources.pipeline.lend(lease.view())
                    self._lent.append(lease)
                    self.shadow_bytes -= lease.nbytes

    def reclaim_shadows(self) -> None:
        """Early updates are worth while again. What was read ahead is dropped; waits for what is to be computed, which
        may need that memory, and for writes from it."""
        if not self._lent:
            return
        self.ahead.drop(but=())
        for update in self.decided.values():
            update.wait("computed")
        with interrupts_deferred():
            while self._lent:
                lease = self._lent.pop()
                if self._resources.pipeline.reclaim(lease.view()):  # else a device that was given up may still use it
                    lease.release()
                    self.shadow_bytes += lease.nbytes

    def read_ahead(self, order: Iterable[int], step: int) -> None:
        """Read states of units for `step`, which is not decided yet, in this order, as far as the staging reaches."""
        under_way = self.guesses.keys() | self.decided.keys()
        self.ahead.begin((index for index in order if index not in under_way), step)

    def _may_hold(self, unit: Unit) -> bool:
        """Updates that read slots must not hold up those who need one."""
        held = sum(update.unit.weight_bytes for update in self.guesses.values() if self._reads_slot(update))
        return (held + unit.weight_bytes) * _SLOT_SHARE <= self._resources.plan.slot_bytes

    @staticmethod
    def _reads_slot(update: UnitUpdate) -> bool:
        return update.place.speculative and update.place.slot is not None and not update.reached("computed")

    def reads_slot(self, index: int) -> bool:
        """Whether an early update reads the weights from the slot of this unit, so that it must stay."""
        update = self.guesses.get(index) or self.decided.get(index)
        return update is not None and self._reads_slot(update)

    def wait_for_readers(self) -> None:
        """Wait until no update reads a slot. A failure is told by whoever lands the update, or drops it."""
        for update in [*self.guesses.values(), *self.decided.values()]:
            if self._reads_slot(update):
                update.wait("computed")

    def undo(self, indices: Iterable[int]) -> None:
        """Drop guesses: when this returns nothing of them is in flight and all is as before.

        Raises:
            SwapIOError: the device failed.
        """
        dropped = [self.guesses[index] for index in indices if index in self.guesses]
        transfers = [transfer for update in reversed(dropped) for transfer in update.transfers.values()]
        with interrupts_deferred():  # a guess that was canceled and is still there would be taken for a right one
            for transfer in transfers:
                self._resources.pipeline.cancel(transfer.future)
            failure = _wait_canceled(transfers)
            for update in dropped:
                del self.guesses[update.unit.index]
                self._free(update)
        if failure is not None:
            raise failure

    def _free(self, update: UnitUpdate) -> None:
        if update.place.shadow is not None:
            self.shadow_bytes += update.place.shadow.nbytes
            update.place.shadow.release()

    # -- the step -----------------------------------------------------------------------------------------------------

    def decide(
        self,
        requests: Mapping[int, UnitRequest],
        order: Sequence[int],
        slot_of: Callable[[int], Lease | None],
        step: int,
        *,
        committed: bool,
    ) -> list[UnitUpdate]:
        """What the step really does. Guesses that were right go on; the others are undone, and everything that is not
        under way begins, in `order`.

        Args:
            requests: by unit.
            order: of all units, the one that is used first comes first.
            slot_of: the host memory a unit's weights were fetched to, where they are used there; else None.

        Returns:
            The updates of this step.
        """
        right = [
            index
            for index, guess in self.guesses.items()
            if guess.wanted == requests.get(index) and guess.committed == committed and not self._withdrawn(guess)
        ]
        self.undo([index for index in self.guesses if index not in right])
        for index in right:
            self.decided[index] = self.guesses.pop(index)
        self.ahead.drop(but=requests)
        for index in order:
            if index in requests and index not in self.decided:
                place = WeightsPlace(slot=slot_of(index))
                self._submit(self.decided, self._units[index], requests[index], place, step, committed=committed)
        return list(self.decided.values())

    def _withdrawn(self, guess: UnitUpdate) -> bool:
        """Take back what was not begun of a guess: it may overwrite now, and comes in the order of the forward."""
        withdrawn = [self._resources.pipeline.withdraw(transfer.future) for transfer in guess.transfers.values()]
        return any(withdrawn)

    def _submit(
        self,
        where: dict[int, UnitUpdate],
        unit: Unit,
        wanted: UnitRequest,
        place: WeightsPlace,
        step: int,
        *,
        committed: bool,
    ) -> None:
        update = UnitUpdate(unit, wanted, place, committed, {})
        where[unit.index] = update
        held = self.ahead.take(unit.index, wanted)
        for group_index, group_update in wanted.items():
            update.transfers[group_index] = submit_update(
                self._resources,
                unit,
                group_index,
                group_update,
                self._gradients.of_group(unit.index, group_index),
                place,
                step=step,
                committed=committed,
                held=held.get(group_index),
            )

    # -- landing ------------------------------------------------------------------------------------------------------

    def take_in(self, index: int) -> None:
        """Wait until the decided update of a unit, if there is one, is computed: where its new weights are in memory
        they count from now on, and its gradients are not needed any more.

        Raises:
            SwapIOError: a transfer failed; the unit is partly new, partly old.
        """
        update = self.decided.get(index)
        if update is None or update.taken_in:
            return
        wait_all(update.until("computed"))
        with interrupts_deferred():
            if update.place.shadow is not None:
                self._swap(update, update.place.shadow)
            update.taken_in = True

    def free_slot(self, index: int) -> None:
        """Wait until the decided update of a unit, if there is one, does not use the slot of its weights.

        Raises:
            SwapIOError: a transfer failed; the unit is partly new, partly old.
        """
        update = self.decided.get(index)
        if update is not None:
            wait_all(update.until("weights"))

    def land(self, index: int) -> None:
        """Wait for the decided update of a unit, if there is one: from now on its new values count in the store, too.

        Raises:
            SwapIOError: a transfer failed; the unit is partly new, partly old.
        """
        update = self.decided.get(index)
        if update is None:
            return
        self.take_in(index)
        wait_all(update.until("written"))
        with interrupts_deferred():
            for transfer in update.transfers.values():
                transfer.land()
            if update.viewed:
                self._free(update)
            del self.decided[index]
        if not all(transfer.finite for transfer in update.transfers.values()):
            logger.warning(
                "step %d: a weight or a moment of unit '%s' is not finite any more; the learning rate may be too high",
                next(iter(update.transfers.values())).step,
                update.unit.name,
            )

    def writes_from_slot(self, index: int) -> bool:
        """Whether a decided update may write weights to the store from the slot they are used in."""
        update = self.decided.get(index)
        return update is not None and update.place.slot is not None and not update.reached("weights")

    def _swap(self, update: UnitUpdate, shadow: Lease) -> None:
        """The memory with the new weights is their home now; or what is viewed has them, too, and they go when they
        are written."""
        index = update.unit.index
        weights = self._resources.weights[index]
        if weights.lease is None:
            raise AssertionError("weights in the store have no other memory")
        if update.viewed:
            weights.lease.view()[:] = shadow.view()
            return
        for home in weights.groups:
            home.lease = shadow
        self._resources.weights[index] = replace(weights, lease=shadow)
        self.shadow_bytes += weights.lease.nbytes
        weights.lease.release()

    def require_well(self) -> None:
        """Raises SwapIOError when an update under way is known to have failed."""
        for update in self.decided.values():
            for transfer in update.transfers.values():
                if transfer.done() and transfer.future.failure() is not None:
                    transfer.result()


def _wait_canceled(transfers: Iterable[UpdateTransfer]) -> SwapIOError | None:
    """Wait for all; the first failure that is not their being canceled."""
    first: SwapIOError | None = None
    for transfer in transfers:
        try:
            transfer.result()
        except SwapIOError as error:
            failure = transfer.future.failure()
            if first is None and failure is not None and failure.kind != "canceled":
                first = error
    return first
