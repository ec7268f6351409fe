"""The units on the device: who comes, and who goes for it.

After its forward a unit stays until room is needed; then the one with the farthest next use goes first. A unit may go
when no forward runs in it, no backward was announced for it, and nothing but its parameters refers to its slot:
autograd may hold views that it unpacked, and the script views of its own. What torch.utils.checkpoint recomputes holds
none (runtime/recomputed.py); another reentrant checkpoint may hold views, or the parameters themselves.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress

from infinity.base.ranges import profiled
from infinity.base.timeline import Timeline
from infinity.errors import InfinityError, PlanError
from infinity.plan.policy import to_prefetch, update_order, victims
from infinity.plan.trace import Trace
from infinity.sizes import format_bytes
from infinity.tiers.resources import Resources
from infinity.tiers.slots import Slot, SlotPool
from infinity.units.fetch_policy import FetchPolicy
from infinity.units.released import in_backward
from infinity.units.unit import OffloadedUnit
from infinity.units.updates import Updates
from infinity.units.weights import Residency


class Room:
    """Brings units to the device and sends others away. Its methods are called under the coordinator's lock.

    Invariant: `_present` are the units that are not RELEASED, `_fetching` those that are FETCHING, `_held` those that
    are held.

    Args:
        policy: tells which units may come and go, as far as that does not follow from the visits.

    Attributes:
        units: in the order of their indices.
        unit_at: gives the unit whose slot has a storage (its `_cdata`); None where none has.
    """

    def __init__(
        self,
        units: Sequence[OffloadedUnit],
        resources: Resources,
        updates: Updates,
        timeline: Timeline,
        slots: SlotPool,
        policy: FetchPolicy,
    ) -> None:
        self.units = units
        self._resources = resources
        self._updates = updates
        self._timeline = timeline
        self._at: dict[int, OffloadedUnit] = {}  # by the storage of the slot
        self.unit_at: Callable[[int], OffloadedUnit | None] = self._at.get  # asked of every tensor that autograd saves
        self._slots = slots
        self._policy = policy
        self._viewed: list[Slot] = []  # given up, and somebody still holds views of them
        self._present: dict[int, OffloadedUnit] = {}
        self._fetching: dict[int, OffloadedUnit] = {}
        self._held: list[OffloadedUnit] = []
        forward = [unit.index for unit in units if not unit.unit.stays]
        self._staying = [unit.index for unit in units if unit.unit.stays]
        self._takes_room = frozenset(unit.index for unit in units if slots.counts(unit.homes.weights))
        self._sizes = [unit.unit.weight_bytes if unit.index in self._takes_room else 0 for unit in units]
        self._traces = {True: Trace(forward + forward[::-1]), False: Trace(forward)}
        self._training = True

    # -- iterations ---------------------------------------------------------------------------------------------------

    def begin_pass(self, *, training: bool) -> None:
        """What is visited from now on belongs to a training iteration, or to an evaluation."""
        self._training = training
        if not training:
            self._traces[False].close()

    def end_iteration(self) -> None:
        """A training iteration is over: the next one is expected to visit the units in the same order."""
        self._traces[True].close()

    def order(self) -> list[OffloadedUnit]:
        """All units, the one that the next training forward uses first comes first."""
        order = update_order(len(self.units), lambda index: self.units[index].unit.stays, self._traces[True])
        return [self.units[index] for index in order]

    @property
    def _trace(self) -> Trace:
        return self._traces[self._training]

    def hold(self, indices: Collection[int]) -> list[int]:
        """These units are kept, and no others. Returns those that were kept and are not any more."""
        before = self._held
        for unit in before:
            unit.weights.hold(False)
        self._held = [self.units[index] for index in indices]
        for unit in self._held:
            unit.weights.hold(True)
        for unit in before:
            unit.weights.rest()
        return [unit.index for unit in before if unit.index not in indices]

    def unuse(self, unit: OffloadedUnit) -> None:
        """A forward ended, well or not."""
        unit.weights.unuse()
        if not in_backward():  # what is recomputed there is used on
            unit.weights.rest()

    def forget_uses(self) -> None:
        """Of a forward or backward that an exception ended."""
        for unit in self.units:
            unit.weights.forget_uses()
        self._held = []

    # -- parameters ---------------------------------------------------------------------------------------------------

    def require_untouched(self) -> None:
        """Raises ModelError when a parameter was replaced, converted, modified in place or unfrozen behind our back."""
        for unit in self.units:
            unit.views.require_untouched()

    def close_all(self) -> None:
        """Nobody may read any parameter from now on."""
        for unit in self.units:
            unit.views.close()

    def leave_all(self) -> bool:
        """The model is closed, and its threads have ended: no unit keeps a slot. Returns whether the memory of all of
        them is free: somebody may hold views of one, or a device that was given up may write to it."""
        for unit in self.units:
            if unit.weights.residency is Residency.FETCHING:
                with suppress(InfinityError):  # nobody wants it any more
                    self._finish(unit)
            if unit.weights.slot is not None:
                self._vacate(unit)
        resting = all(unit.weights.residency is Residency.RELEASED for unit in self.units)
        return resting and not any(slot.outstanding() for slot in self._viewed)

    # -- who comes ----------------------------------------------------------------------------------------------------

    def bring(self, unit: OffloadedUnit) -> None:
        """When this returns the parameters of the unit have their values."""
        if not unit.unit.stays:
            self._trace.visit(unit.index)
        self._resources.idle.begins()
        self._take_back(unit)
        if unit.weights.residency is Residency.RELEASED:
            with self._timeline.stall("room", unit.name):
                self._start_or_raise(unit)
        self.prefetch()
        if unit.weights.residency is Residency.FETCHING:
            with self._timeline.stall("fetch", unit.name):
                self._finish(unit)
        unit.weights.require_slot().wait()
        unit.views.open_up()
        self._resources.idle.ends()

    def _take_back(self, unit: OffloadedUnit) -> None:
        """Before a unit is used: its update must be computed, this one only."""
        unit.apply_update()
        if unit.weights.residency is Residency.STALE:
            self._vacate(unit)
        elif unit.weights.residency is Residency.UPDATING:
            unit.weights.updated()

    def prefetch(self) -> None:
        """Fetch ahead as far as there is room, also for units that cannot be fetched before their update is computed:
        a later one that took it would have to go again, and be waited for."""
        if len(self._present) == len(self.units):
            return
        self._prefetch_staying()
        upcoming = to_prefetch(
            self._trace,
            self._sizes.__getitem__,
            self._resources.plan.budgets.slot_bytes,
            [*self._staying, *(unit.index for unit in (*self._present.values(), *self._held) if unit.weights.in_use)],
            lambda index: self.units[index].weights.residency is Residency.RELEASED,
        )
        for distance, index in upcoming:
            unit = self.units[index]
            if self._policy.may_come(unit) and not self._start(unit, distance):
                return

    def _prefetch_staying(self) -> None:
        """The units that stay come first: one that came late would lie amid the others, and split the room."""
        for index in self._staying:
            unit = self.units[index]
            if unit.weights.residency is Residency.RELEASED and self._policy.may_come(unit):
                self._start(unit, 0)

    def finish_fetches(self) -> None:
        for unit in list(self._fetching.values()):
            self._finish(unit)

    def _finish(self, unit: OffloadedUnit) -> None:
        try:
            slot = unit.weights.finish_fetch()
        except Exception:
            if unit.weights.residency is Residency.RELEASED:
                del self._fetching[unit.index], self._present[unit.index]
            raise
        del self._fetching[unit.index]
        self._at[slot.tensor.untyped_storage()._cdata] = unit

    def _start(self, unit: OffloadedUnit, distance: int | None) -> bool:
        """Begin a fetch; what is used later than `distance` visits from now makes room (anything, when None)."""
        for slot in [slot for slot in self._viewed if not slot.outstanding()]:
            self._viewed.remove(slot)
            self._slots.free(slot)
        if self._slots.waits(unit.homes.weights):
            if distance is not None:
                return False
            self.finish_fetches()
        while True:
            fits = self._policy.fits(unit, self._present.values())
            weights, under_way = unit.homes.weights, unit.weights_under_way()
            with profiled("fetch", unit.name):
                fetch = self._slots.start(weights, under_way, unit.weights.version) if fits else None
            if fetch is not None:
                unit.weights.begin_fetch(fetch)
                self._fetching[unit.index] = self._present[unit.index] = unit
                return True
            victim = self._victim(distance)
            if victim is None:
                return False
            self._evict(victim)

    def _start_or_raise(self, unit: OffloadedUnit) -> None:
        if self._start(unit, None):
            return
        busy = [other for other in self._in_order() if other.index in self._takes_room]
        rearranges = self._policy.rearranges
        if rearranges and self._make_room(unit):
            return
        if self._let_held_go() and (self._start(unit, None) or (rearranges and self._move_others(unit))):
            return
        budgets = self._resources.plan.budgets
        needed = unit.unit.weight_bytes + sum(other.unit.weight_bytes for other in busy)
        every = sum(self._sizes)
        raise PlanError(
            f"no device memory for unit '{unit.name}' ({format_bytes(unit.unit.weight_bytes)}): the units in use "
            f"({', '.join(other.name for other in busy)}) take the "
            f"{format_bytes(budgets.slot_bytes)} planned for weights, or views of them are held. Let the views go, or "
            f"raise memory.device to {budgets.device_for(needed)}, or to {budgets.device_for(every)} for all units."
        )

    def _let_held_go(self) -> bool:
        """Units whose backward was announced make room for what is recomputed before it: autograd brings them again,
        where it unpacks their weights. Whether there was one."""
        held = [unit for unit in self._held if unit.weights.held]
        for unit in held:
            unit.weights.hold(False)
        return bool(held)

    def _make_room(self, unit: OffloadedUnit) -> bool:
        """Begin a fetch that finds no room among what may go now. Whether there was a way."""
        self._updates.wait_for_readers()
        if self._start(unit, None):
            return True
        gc.collect()  # views of slots may hang in reference cycles
        return self._start(unit, None) or self._move_others(unit)

    def _move_others(self, unit: OffloadedUnit) -> bool:
        """Begin a fetch where there are bytes enough, but not in one piece: units in use that nobody holds views of
        leave their slots, and come again into what the fetch leaves them. False where that does not help."""
        others = [
            other
            for other in self._in_order()
            if other.weights.residency is Residency.RESIDENT
            and other.index in self._takes_room
            and not other.weights.referred_to()
            and not other.reads_slot()
        ]
        were_open = [other for other in others if other.views.open]
        for other in others:
            self._evict(other)
        every = sorted([unit, *others], key=lambda each: -each.unit.weight_bytes)
        for each in every:
            each.weights.use()  # none of these makes room for another
        try:
            fits = all(self._start(each, None) for each in every)
            if not fits and unit.weights.residency is Residency.FETCHING:
                self._evict(unit)
            for other in others:
                if other.weights.residency is Residency.RELEASED:
                    self._start(other, None)
                if other.weights.residency is Residency.FETCHING:
                    self._finish(other)
            for other in were_open:
                if other.weights.residency is Residency.RESIDENT:
                    other.weights.require_slot().wait()
                    other.views.open_up()
        finally:
            for each in every:
                each.weights.unuse()
        return fits

    # -- who goes -----------------------------------------------------------------------------------------------------

    def _in_order(self) -> Iterator[OffloadedUnit]:
        """The units that are present, in the order of their indices: the same on every rank."""
        return (self._present[index] for index in sorted(self._present))

    def _victim(self, distance: int | None) -> OffloadedUnit | None:
        """Args: distance: of the fetch that needs room, as for `_start`."""
        units = (self.units[index] for index in victims(sorted(self._present), self._trace, distance))
        return next((unit for unit in units if self._may_go(unit, prefetch=distance is not None)), None)

    def _may_go(self, unit: OffloadedUnit, *, prefetch: bool) -> bool:
        if unit.weights.in_use or unit.unit.stays or unit.index not in self._takes_room or unit.reads_slot():
            return False
        return self._policy.may_evict(unit, prefetch=prefetch)

    def _evict(self, unit: OffloadedUnit) -> None:
        with profiled("release", unit.name):
            self._release(unit)

    def _release(self, unit: OffloadedUnit) -> None:
        if unit.weights.residency is Residency.FETCHING:
            self._finish(unit)
        if unit.weights.residency in (Residency.UPDATING, Residency.STALE) or unit.writes_from_slot():
            unit.await_slot()
        if unit.weights.residency is Residency.RESIDENT:
            unit.views.require_untouched()  # what was written to the slot goes with it
        self._vacate(unit)

    def _vacate(self, unit: OffloadedUnit) -> None:
        """Take the slot of a unit that nobody works in."""
        slot = unit.weights.leave()
        del self._present[unit.index]
        del self._at[slot.tensor.untyped_storage()._cdata]
        if slot.outstanding():
            self._viewed.append(slot)
        else:
            self._slots.free(slot)

    # -- the step -----------------------------------------------------------------------------------------------------

    def updates_decided(self, begun: Sequence[OffloadedUnit], everywhere: Sequence[OffloadedUnit]) -> None:
        """Args: begun: the units of which this process updates something; everywhere: those of which any rank does."""
        for unit in begun if self._policy.keeps_slots else everywhere:
            self.update_decided(unit)

    def update_decided(self, unit: OffloadedUnit) -> None:
        """A unit's update is decided: its weights of before are void, and the slot stays only where the update uses
        it."""
        unit.weights.bump()
        update, slot = unit.decided, unit.weights.slot
        if slot is None or unit.weights.residency is not Residency.RESIDENT:
            return
        if not self._policy.keeps_slots:
            self._evict(unit)
            return
        if update is None:
            return
        moves = update.moves_weights
        if moves and self._is_viewed(slot):
            update.keep_memory()
        if moves or not slot.at_home:
            self._evict(unit)
        else:
            unit.weights.begin_update(writes_slot=not update.speculated)

    def _is_viewed(self, slot: Slot) -> bool:
        """Whether somebody holds views of the slot's memory: through it, or an earlier slot of the same weights."""
        at = slot.tensor.data_ptr()
        return any(each.outstanding() for each in [slot, *self._viewed] if each.tensor.data_ptr() == at)

    def adopt(self) -> None:
        """Take the parameters over, whose values are at home now: from here on they are placeholders."""
        for unit in self.units:
            unit.views.adopt(self._resources.torch_device)
