"""The units on the device: which units are fetched, and which units are evicted to make room.

After its forward a unit keeps its slot until the memory is needed. The unit with the farthest next use is evicted
first. A unit may be evicted when none of its forwards is in progress, its backward was not announced, and nothing
except its parameters refers to its slot.

Autograd may refer to a slot through views that it has unpacked, and the script may have made views of the slot, too.
The recomputation of torch.utils.checkpoint keeps no views (runtime/recomputed_weights.py), but the recomputation of
another implementation of reentrant checkpoints may keep views, or the parameters themselves.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress

from infinity.base.profiler_ranges import profiled
from infinity.base.timeline import Timeline
from infinity.errors import InfinityError, PlanError
from infinity.plan.policy import to_prefetch, update_order, victims
from infinity.plan.visit_trace import VisitTrace
from infinity.sizes import format_bytes
from infinity.tiers.resources import ModelResources
from infinity.tiers.slots import Slot, SlotPool
from infinity.units.fetch_rules import FetchRules
from infinity.units.released_parameters import in_backward
from infinity.units.unit import OffloadedUnit
from infinity.units.update_queue import UpdateQueue
from infinity.units.weights import Residency


class Fetcher:
    """Device memory for weights, and the units in this memory. The methods are called under the coordinator's lock.

    Invariant: `_present` has the units that are not RELEASED, `_fetching` the units that are FETCHING, `_held` the
    units that are held.

    Args:
        rules: rules that permit fetches and evictions. Among the permitted ones, the expected order of the units
            decides.

    Attributes:
        units: the units, in the order of their indices.
        unit_at: function that returns the unit whose slot has a given storage (`_cdata`); None when no slot has the
            storage.
    """

    def __init__(
        self,
        units: Sequence[OffloadedUnit],
        resources: ModelResources,
        updates: UpdateQueue,
        timeline: Timeline,
        slots: SlotPool,
        rules: FetchRules,
    ) -> None:
        self.units = units
        self._resources = resources
        self._updates = updates
        self._timeline = timeline
        self._at: dict[int, OffloadedUnit] = {}  # units by the storage of their slots
        self.unit_at: Callable[[int], OffloadedUnit | None] = self._at.get  # called for each saved tensor
        self._slots = slots
        self._rules = rules
        self._viewed: list[Slot] = []  # slots of released units, kept because views of them exist
        self._present: dict[int, OffloadedUnit] = {}
        self._fetching: dict[int, OffloadedUnit] = {}
        self._held: list[OffloadedUnit] = []
        forward = [unit.index for unit in units if not unit.full.stays]
        self._staying = [unit.index for unit in units if unit.full.stays]
        self._takes_room = frozenset(unit.index for unit in units if slots.counts(unit.homes.weights))
        self._sizes = [unit.full.weight_bytes if unit.index in self._takes_room else 0 for unit in units]
        routed = [unit.index for unit in units if unit.full.routed]
        self._traces = {True: VisitTrace(forward + forward[::-1], routed), False: VisitTrace(forward, routed)}
        self._training = True

    # -- iterations ---------------------------------------------------------------------------------------------------

    def begin_pass(self, *, training: bool) -> None:
        """Begin a training iteration or an evaluation. The units that are used from now on belong to this pass."""
        self._training = training
        if not training:
            self._traces[False].close()

    def end_iteration(self) -> None:
        """End a training iteration. The next iteration is expected to visit the units in the same order."""
        self._traces[True].close()

    def expect(self, indices: Iterable[int], among: Collection[int]) -> None:
        """Expect uses of these units next (VisitTrace.expect)."""
        self._trace.expect(indices, among)

    def order(self) -> list[OffloadedUnit]:
        """Return all units. The unit that the next training forward uses first comes first."""
        order = update_order(len(self.units), lambda index: self.units[index].full.stays, self._traces[True])
        return [self.units[index] for index in order]

    @property
    def _trace(self) -> VisitTrace:
        return self._traces[self._training]

    def hold(self, indices: Collection[int]) -> list[int]:
        """Hold these units and no other units. A held unit must not be evicted, because its backward was announced.

        Returns:
            Indices of the units that are no longer held.
        """
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
        """Count the end of a forward of the unit, which may have ended with an exception."""
        unit.weights.unuse()
        if not in_backward():  # in a recomputation, the unit's backward is still to come
            unit.weights.rest()

    def forget_uses(self) -> None:
        """Forget the uses of units by a forward or backward that an exception ended."""
        for unit in self.units:
            unit.weights.forget_uses()
        self._held = []

    # -- parameters ---------------------------------------------------------------------------------------------------

    def require_untouched(self) -> None:
        """Check that no parameter was changed without infinity.

        Raises:
            ModelError: a parameter was replaced, converted or modified in place.
        """
        for unit in self.units:
            unit.views.require_untouched()

    def close_all(self) -> None:
        """Forbid reads of all parameters except gathered parameters."""
        for unit in self.units:
            unit.views.close()

    def release_all(self) -> bool:
        """Free the slots of all units, after the model is closed and its threads have ended.

        Returns:
            Whether the memory of all slots is free. The memory is not free while views of a slot exist, or if a disk
            that did not answer before a deadline may still write to a slot.
        """
        for unit in self.units:
            if unit.weights.residency is Residency.FETCHING:
                with suppress(InfinityError):  # the weights are no longer needed
                    self._finish(unit)
            if unit.weights.slot is not None:
                self._vacate(unit)
        resting = all(unit.weights.residency is Residency.RELEASED for unit in self.units)
        return resting and not any(slot.outstanding() for slot in self._viewed)

    # -- fetches ------------------------------------------------------------------------------------------------------

    def fetch(self, unit: OffloadedUnit) -> None:
        """Fetch a unit and wait for it. When this method returns, the unit's parameters have their values.

        Raises:
            PlanError: there is no device memory for the unit.
            SwapIOError: the device failed.
        """
        if not unit.full.stays:
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
        """Apply the update of a unit before the unit is used, without waiting for other updates."""
        unit.apply_update()
        if unit.weights.residency is Residency.STALE:
            self._vacate(unit)
        elif unit.weights.residency is Residency.UPDATING:
            unit.weights.updated()

    def prefetch(self) -> None:
        """Fetch the next units in the expected order, as long as there is room.

        If a unit cannot be fetched yet because its update is in progress, room for this unit is reserved. If a later
        unit took this room, the later unit would have to be evicted again before the earlier unit could be fetched.
        """
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
            if self._rules.may_prefetch(unit) and not self._start(unit, distance):
                return

    def _prefetch_staying(self) -> None:
        """Fetch the units that are never evicted before all other units.

        If such a unit were fetched later, its slot would be placed between other slots and fragment the memory.
        """
        for index in self._staying:
            unit = self.units[index]
            if unit.weights.residency is Residency.RELEASED and self._rules.may_prefetch(unit):
                self._start(unit, 0)

    def finish_fetches(self) -> None:
        """Wait for all fetches in flight."""
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
        """Begin a fetch. While there is no room for the fetch, evict units.

        Args:
            unit: unit to fetch.
            distance: a unit may be evicted only if its next use is more than `distance` visits away; None: any unit may
                be evicted.

        Returns:
            Whether the fetch began.
        """
        for slot in [slot for slot in self._viewed if not slot.outstanding()]:
            self._viewed.remove(slot)
            self._slots.free(slot)
        if self._slots.waits(unit.homes.weights):
            if distance is not None:
                return False
            self.finish_fetches()
        while True:
            fits = self._rules.fits(unit, self._present.values())
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
        rearranges = self._rules.rearranges
        if rearranges and self._make_room(unit):
            return
        if self._let_held_go() and (self._start(unit, None) or (rearranges and self._move_others(unit))):
            return
        budgets = self._resources.plan.budgets
        needed = unit.full.weight_bytes + sum(other.full.weight_bytes for other in busy)
        every = sum(self._sizes)
        raise PlanError(
            f"memory.device has no room for unit '{unit.name}' ({format_bytes(unit.full.weight_bytes)}): the units in "
            f"use ({', '.join(other.name for other in busy)}) take the {format_bytes(budgets.slot_bytes)} planned for "
            "weights, or the program holds views of them. Drop the views, or raise memory.device to "
            f"{budgets.device_for(needed)}, or to {budgets.device_for(every)} for all units."
        )

    def _let_held_go(self) -> bool:
        """Stop holding the units whose backward was announced, because the recomputation before this backward needs
        room.

        These units are fetched again when autograd unpacks views of their weights.

        Returns:
            Whether a unit was held.
        """
        held = [unit for unit in self._held if unit.weights.held]
        for unit in held:
            unit.weights.hold(False)
        return bool(held)

    def _make_room(self, unit: OffloadedUnit) -> bool:
        """Make room in other ways than by evictions, and begin a fetch: wait for updates, collect garbage, move other
        units.

        Returns:
            Whether the fetch began.
        """
        self._updates.wait_for_readers()
        if self._start(unit, None):
            return True
        gc.collect()  # reference cycles may keep views of slots alive
        return self._start(unit, None) or self._move_others(unit)

    def _move_others(self, unit: OffloadedUnit) -> bool:
        """Begin a fetch for which enough bytes are free, but not in one piece.

        Other units without views of their slots give up their slots. After the fetch of this unit has begun, the other
        units are fetched again into the memory that is left.

        Returns:
            Whether the unit and the other units fit.
        """
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
        every = sorted([unit, *others], key=lambda each: -each.full.weight_bytes)
        for each in every:
            each.weights.use()  # so that none of these units is evicted to make room for another one
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

    # -- evictions ----------------------------------------------------------------------------------------------------

    def _in_order(self) -> Iterator[OffloadedUnit]:
        """Return the present units in the order of their indices, which is the same on every rank."""
        return (self._present[index] for index in sorted(self._present))

    def _victim(self, distance: int | None) -> OffloadedUnit | None:
        """Return the unit to evict next; None when no unit may be evicted.

        Args:
            distance: the same as in `_start`.
        """
        units = (self.units[index] for index in victims(sorted(self._present), self._trace, distance))
        return next((unit for unit in units if self._may_go(unit, prefetch=distance is not None)), None)

    def _may_go(self, unit: OffloadedUnit, *, prefetch: bool) -> bool:
        if unit.weights.in_use or unit.full.stays or unit.index not in self._takes_room or unit.reads_slot():
            return False
        return self._rules.may_evict(unit, prefetch=prefetch)

    def _evict(self, unit: OffloadedUnit) -> None:
        with profiled("release", unit.name):
            self._release(unit)

    def _release(self, unit: OffloadedUnit) -> None:
        if unit.weights.residency is Residency.FETCHING:
            self._finish(unit)
        if unit.weights.residency in (Residency.UPDATING, Residency.STALE) or unit.writes_from_slot():
            unit.await_slot()
        if unit.weights.residency is Residency.RESIDENT:
            unit.views.require_untouched()  # a write to the slot would be lost
        self._vacate(unit)

    def _vacate(self, unit: OffloadedUnit) -> None:
        """Free the slot of a unit. The caller has checked that nothing uses the slot any more."""
        slot = unit.weights.release()
        del self._present[unit.index]
        del self._at[slot.tensor.untyped_storage()._cdata]
        if slot.outstanding():
            self._viewed.append(slot)
        else:
            self._slots.free(slot)

    # -- the step -----------------------------------------------------------------------------------------------------

    def updates_decided(self, begun: Sequence[OffloadedUnit], everywhere: Sequence[OffloadedUnit]) -> None:
        """Adapt the slots to the updates of a decided step.

        Args:
            begun: units with an update in this process.
            everywhere: units with an update on any rank.
        """
        indices = {unit.index for unit in everywhere}
        changed = begun if self._rules.keeps_slots else [unit for unit in self.order() if unit.index in indices]
        for unit in changed:  # all versions change, even if a slot cannot be given up
            self._count_update(unit)
        for unit in changed:
            self._adapt_slot(unit)

    def weights_changed(self, unit: OffloadedUnit) -> None:
        """Count a change of the weights at home, other than by an update."""
        unit.weights.bump()
        self._slots.changed(unit.homes.weights, unit.weights.version, {})

    def update_decided(self, unit: OffloadedUnit) -> None:
        """Adapt a unit to its decided update."""
        self._count_update(unit)
        self._adapt_slot(unit)

    def _count_update(self, unit: OffloadedUnit) -> None:
        """Count the new version of a unit's weights, and say where it will be."""
        unit.weights.bump()
        update = unit.decided
        if not self._rules.keeps_slots:
            new = unit.weights_under_way("computed")
            publication = self._slots.changed(unit.homes.weights, unit.weights.version, new)
            if update is not None:
                update.end_after(publication)

    def _adapt_slot(self, unit: OffloadedUnit) -> None:
        """Adapt the slot of a unit to its decided update.

        The slot has the old weights, which are no longer valid. The slot is therefore kept only if the update uses the
        slot.
        """
        update = unit.decided
        if unit.weights.residency is Residency.UPDATING:  # the unit was not used since its last update, which is done
            unit.weights.updated()
        slot = unit.weights.slot
        if slot is None or unit.weights.residency is not Residency.RESIDENT:
            return
        if not self._rules.keeps_slots:
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
        """Return whether views of the slot's memory exist. Such views may also belong to an earlier slot at the same
        address."""
        at = slot.tensor.data_ptr()
        return any(each.outstanding() for each in [slot, *self._viewed] if each.tensor.data_ptr() == at)

    def adopt(self) -> None:
        """Turn the parameters of all units into placeholders.

        The homes of the units must already have the values of the parameters.
        """
        for unit in self.units:
            unit.views.adopt(self._resources.torch_device)

    def filled(self) -> None:
        """Record that the homes of all units have their first values."""
        for unit in self.units:
            self._slots.changed(unit.homes.weights, unit.weights.version, {})
