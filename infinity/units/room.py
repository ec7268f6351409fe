"""Units on the device: every transition of a unit's weights between their home and the parameters.

[Note: the life of a unit's weights]

    RELEASED ──start──▶ FETCHING ──finish──▶ RESIDENT ──evict──▶ RELEASED
                                                │ step              ▲
                                                └─────▶ UPDATING ───┘ or back to RESIDENT, when that is computed

An UPDATING unit's slot is where its update works, or reads; its parameters are placeholders, as those of a released
one. A released parameter is a stride-0 NaN of its true shape and dtype; a resident one is a view of the unit's slot.
The class of a parameter says whether it may be read now (released.py): a unit is OPEN from where a forward, a backward
or a gathering brings it to where that ends, or to its eviction.

After its forward a unit is only evictable: it goes when room is needed, the one with the farthest next use first. It is
evictable when no forward runs in it (`uses`), no backward was announced for it (`held`), and nothing but its parameters
refers to the slot: autograd may hold views it unpacked, and recomputation keeps detached ones, or the parameters.

`version` counts the updates of a unit's weights. What was saved for backward names the version it saw.
"""

from __future__ import annotations

import enum
import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from infinity.base.interrupt import interruptible
from infinity.base.timeline import Timeline
from infinity.errors import ModelError, PlanError, SwapTimeoutError
from infinity.io.arena import Lease
from infinity.sizes import format_bytes
from infinity.state.released import ReleasedParameter, in_backward
from infinity.state.unit import Place, Unit
from infinity.tiers.accelerator import HostSlot, Slot
from infinity.tiers.resources import Resources
from infinity.tiers.slots import Fetch, SlotPool, nan_placeholder, open_slots
from infinity.units.trace import Trace
from infinity.units.updates import UnitUpdate, Updates

_TELLS_REFERENCES = hasattr(torch.Tensor, "_use_count")


class Residency(enum.Enum):
    RELEASED = "released"
    FETCHING = "fetching"
    RESIDENT = "resident"
    UPDATING = "updating"


@dataclass(eq=False)
class UnitRecord:
    """One unit's line in the coordinator."""

    unit: Unit
    parameters: dict[str, nn.Parameter]
    placeholders: dict[str, torch.Tensor] = field(default_factory=dict)
    classes: dict[str, type[nn.Parameter]] = field(default_factory=dict)
    residency: Residency = Residency.RELEASED
    fetch: Fetch | None = None
    slot: Slot | None = None
    uses: int = 0
    held: bool = False
    open: bool = False
    """The parameters have their own class, not the released one."""
    gathered: set[str] = field(default_factory=set)
    """Parameters whose data is a copy of their values that somebody asked for."""
    references: dict[str, int] = field(default_factory=dict)
    """Of a unit that a backward opened: how many references each parameter had then."""
    stale: bool = False
    """UPDATING, and the new weights will not be in the slot."""
    version: int = 0
    marks: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """For each parameter the (storage, offset, version) infinity left it with."""


def _references(parameter: nn.Parameter) -> int:
    """Of autograd and torch's own; its own one and that of the node which accumulates its gradient among them."""
    return int(torch.Tensor._use_count(parameter)) if _TELLS_REFERENCES else 0  # type: ignore[attr-defined]


def _mark(parameter: nn.Parameter) -> tuple[int, int, int]:
    return parameter.untyped_storage()._cdata, int(parameter.storage_offset()), parameter._version


class Residents:
    """The units of a model. Its methods are called under the coordinator's lock.

    Invariant: `parameter.data` is the placeholder, a view of the slot of a RESIDENT unit, or a gathered copy.

    Attributes:
        records: in the order of the units.
        at: by the storage of the slot (its `_cdata`), those that have one.
        training: which trace the visits belong to.

    Args:
        take_in, free_slot: wait for a unit's decided update, if there is one, as the methods of Updates do.
        released: the class of parameters that may not be read.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        parameters: Sequence[dict[str, nn.Parameter]],
        resources: Resources,
        updates: Updates,
        timeline: Timeline,
        take_in: Callable[[int], None],
        free_slot: Callable[[int], None],
        released: type[ReleasedParameter],
    ) -> None:
        self._resources = resources
        self._updates = updates
        self._timeline = timeline
        self._take_in = take_in
        self._free_slot = free_slot
        self.records = [UnitRecord(unit, named) for unit, named in zip(units, parameters, strict=True)]
        self.at: dict[int, UnitRecord] = {}
        self._slots: SlotPool = open_slots(resources)
        self._viewed: list[Slot] = []  # given up, and somebody still holds views of them
        forward = [unit.index for unit in units if not unit.resident]
        self._traces = {True: Trace(forward + forward[::-1]), False: Trace(forward)}
        self.training = True
        self._released = released

    def adopt(self, record: UnitRecord) -> None:
        """Take over parameters whose values are at home now: from here on they are placeholders."""
        device = self._resources.device.device
        for name, parameter in record.parameters.items():
            record.placeholders[name] = nan_placeholder(parameter.shape, parameter.dtype, device)
            record.classes[name] = type(parameter)
        record.open = True
        self._hide(record)

    def places(self) -> Iterator[tuple[nn.Parameter, Place]]:
        for record in self.records:
            for index, group in enumerate(record.unit.groups):
                for spec in group.specs:
                    yield record.parameters[spec.name], Place(record.unit, index, spec)

    def hold(self, indices: Collection[int]) -> None:
        """These units are kept, and no others."""
        for record in self.records:
            record.held = record.unit.index in indices

    def forget_uses(self) -> None:
        """Of a forward or backward that an exception ended."""
        for record in self.records:
            record.uses = 0
            record.held = False

    def finish_fetches(self) -> None:
        for record in self.records:
            if record.residency is Residency.FETCHING:
                self._finish(record)

    def end_iteration(self, *, training: bool) -> None:
        """What was visited is what will be."""
        self._traces[training].close()

    def order(self) -> list[int]:
        """All units, the one that the next training forward uses first comes first: those that stay are taken up when
        it begins."""
        first_use = self._traces[True].first_use
        return sorted(
            range(len(self.records)), key=lambda index: (not self.records[index].unit.resident, first_use(index))
        )

    def slot_of(self, index: int) -> Lease | None:
        """The host memory a unit's weights were fetched to, when they are used there and are the newest; else None."""
        record = self.records[index]
        return record.slot.lease if isinstance(record.slot, HostSlot) and not record.stale else None

    def require_untouched(self) -> None:
        """Raises ModelError when a parameter was replaced, converted, modified in place or unfrozen behind our back."""
        for record in self.records:
            self._require_untouched(record)

    @staticmethod
    def _require_untouched(record: UnitRecord) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for name, parameter in record.parameters.items():
                if _mark(parameter) != record.marks[name] and name not in record.gathered:
                    raise ModelError(
                        f"parameter '{name}' of unit '{record.unit.name}' was changed outside infinity (.to(), "
                        ".half(), .data, load_state_dict or an in-place operation); the change would be lost. Do "
                        "it in `with infinity.gathered(model, module, write=True):`, before infinity.offload, or "
                        "on the saved model."
                    )

    # -- transitions --------------------------------------------------------------------------------------------------

    @property
    def _trace(self) -> Trace:
        return self._traces[self.training]

    def bring(self, record: UnitRecord) -> None:
        """When this returns its parameters have their values."""
        if not record.unit.resident:
            self._trace.visit(record.unit.index)
        self._resources.device.idle_begins()
        self._settle(record)
        if record.residency is Residency.RELEASED:
            with self._timeline.stall("room", record.unit.name):
                self._start_or_raise(record)
        self.prefetch()
        if record.residency is Residency.FETCHING:
            with self._timeline.stall("fetch", record.unit.name):
                self._finish(record)
        if record.slot is not None:
            record.slot.wait()
        self._open(record)
        self._resources.device.idle_ends()

    def update_decided(self, record: UnitRecord, update: UnitUpdate) -> None:
        """A unit's update is decided: its weights of before are void, and the slot stays only where the update uses
        it."""
        record.version += 1
        if record.residency is not Residency.RESIDENT or record.slot is None:
            return
        moves = update.place.shadow is not None
        update.viewed = moves and self._is_viewed(record.slot)
        if moves or not self._resources.device.shares_memory:
            self._evict(record)
            return
        with torch.inference_mode(False), torch.no_grad():
            self._hide(record)
        record.residency, record.stale = Residency.UPDATING, update.place.speculative

    def _is_viewed(self, slot: Slot) -> bool:
        """Whether somebody holds views of the slot's memory: through it, or an earlier slot of the same weights."""
        at = slot.tensor.data_ptr()
        return any(each.outstanding() for each in [slot, *self._viewed] if each.tensor.data_ptr() == at)

    def _settle(self, record: UnitRecord) -> None:
        """Before a unit is used: its update must be computed, this one only."""
        self._take_in(record.unit.index)
        if record.residency is not Residency.UPDATING or record.slot is None:
            return
        if record.stale:
            self._vacate(record)
        else:
            record.residency = Residency.RESIDENT
            with torch.inference_mode(False), torch.no_grad():
                self._show(record, record.slot)

    def _start_or_raise(self, record: UnitRecord) -> None:
        if self._start(record, None):
            return
        self._updates.wait_for_readers()
        if self._start(record, None):
            return
        gc.collect()  # views of slots may hang in reference cycles
        if self._start(record, None):
            return
        used = [other for other in self.records if other.residency is not Residency.RELEASED]
        busy = [other.unit for other in used if self._takes_room(other)]
        if self._resources.device.shares_memory and self._move_others(record):
            return
        needed = record.unit.weight_bytes + sum(unit.weight_bytes for unit in busy)
        raise PlanError(
            f"no device memory for unit '{record.unit.name}' ({format_bytes(record.unit.weight_bytes)}): the units "
            f"in use "
            f"({', '.join(unit.name for unit in busy)}) take the {format_bytes(self._resources.plan.slot_bytes)} "
            f"planned for "
            f"weights. Raise memory.device to {format_bytes(2 * needed)}."
        )

    def _move_others(self, record: UnitRecord) -> bool:
        """Begin a fetch where there are bytes enough, but not in one piece: units in use that nobody holds views of
        leave their slots, and come again into what the fetch leaves them. False where that does not help."""
        others = [
            other
            for other in self.records
            if other.residency is Residency.RESIDENT
            and self._takes_room(other)
            and not (other.slot is not None and self._is_referred_to(other, other.slot))
            and not self._updates.reads_slot(other.unit.index)
        ]
        were_open = [other for other in others if other.open]
        for other in others:
            self._evict(other)
        every = sorted([record, *others], key=lambda each: -each.unit.weight_bytes)
        for each in every:
            each.uses += 1  # none of these makes room for another
        try:
            fits = all(self._start(each, None) for each in every)
            if not fits:
                self._evict(record)
            for other in others:
                if other.residency is Residency.FETCHING or self._start(other, None):
                    self._finish(other)
            for other in were_open:
                if other.residency is Residency.RESIDENT:
                    self._open(other)
        finally:
            for each in every:
                each.uses -= 1
        return fits

    def _start(self, record: UnitRecord, distance: int | None) -> bool:
        """Begin a fetch, evicting what is used later than `distance` visits from now (anything, when None)."""
        for slot in [slot for slot in self._viewed if not slot.outstanding()]:
            self._viewed.remove(slot)
            self._slots.free(slot)
        while True:
            index = record.unit.index
            weights, decided = self._resources.weights[index], self._updates.decided.get(index)
            fetch = self._slots.start(weights, {} if decided is None else decided.written(weights))
            if fetch is not None:
                record.fetch, record.residency = fetch, Residency.FETCHING
                self._timeline.begin("fetch", record.unit.name)
                return True
            victim = self._victim(distance)
            if victim is None:
                return False
            self._evict(victim)

    def _takes_room(self, record: UnitRecord) -> bool:
        return self._slots.counts(self._resources.weights[record.unit.index])

    def _victim(self, distance: int | None) -> UnitRecord | None:
        best, farthest = None, -1 if distance is None else distance
        for record in self.records:
            if record.residency is Residency.RELEASED or record.uses or record.held or record.unit.resident:
                continue
            if not self._takes_room(record):
                continue
            if record.residency is Residency.FETCHING and distance is not None:
                continue  # a prefetch makes room for what is needed now, not for another prefetch
            if self._updates.reads_slot(record.unit.index) or (distance is not None and not self._at_rest(record)):
                continue
            next_use = self._trace.next_use(record.unit.index)
            if next_use > farthest and not (record.slot is not None and self._is_referred_to(record, record.slot)):
                best, farthest = record, next_use
        return best

    @staticmethod
    def _is_referred_to(record: UnitRecord, slot: Slot) -> bool:
        """Whether anything but its parameters refers to a slot, or autograd saved parameters themselves.

        The latter happens in what reentrant checkpointing recomputes, where no hook packs them. Who referred to a
        parameter before the backward opened it does not want the values of now.
        """
        if slot.outstanding():
            return True
        if not record.open or not in_backward():
            return False
        if not _TELLS_REFERENCES:
            return True  # rather too little room than weights that are gone
        return any(
            _references(parameter) > max(record.references.get(name, 0), 1 + parameter.requires_grad)
            for name, parameter in record.parameters.items()
        )

    def _at_rest(self, record: UnitRecord) -> bool:
        """Whether no update uses the slot of a unit."""
        decided = self._updates.decided.get(record.unit.index)
        return decided is None or decided.reached("weights")

    def prefetch(self) -> None:
        """Fetch ahead as far as there is room."""
        for record in self.records:
            if record.fetch is not None:
                record.fetch.advance()
        for distance, index in enumerate(self._trace.upcoming()):
            record = self.records[index]
            if record.residency is not Residency.RELEASED or not self._can_fetch(record):
                continue
            if not self._start(record, distance):
                return

    def _can_fetch(self, record: UnitRecord) -> bool:
        """Weights in RAM wait for their update; a read from the store is chained to it."""
        decided = self._updates.decided.get(record.unit.index)
        if decided is None or self._resources.weights[record.unit.index].lease is None:
            return True
        if decided.reached("computed"):
            self._take_in(record.unit.index)
            return True
        return False

    def _finish(self, record: UnitRecord) -> None:
        if record.fetch is None:
            raise AssertionError(f"unit {record.unit.name} is fetching nothing")
        with interruptible():
            record.fetch.wait()
        with torch.inference_mode(False), torch.no_grad():
            try:
                slot = record.fetch.finish()
            except SwapTimeoutError:
                raise  # the device was given up: nothing else will come from it
            except Exception:
                self._timeline.end("fetch", record.unit.name)
                record.fetch, record.residency = None, Residency.RELEASED
                raise
            self._timeline.end("fetch", record.unit.name)
            record.fetch, record.slot, record.residency = None, slot, Residency.RESIDENT
            self.at[slot.tensor.untyped_storage()._cdata] = record
            self._show(record, slot)

    def _show(self, record: UnitRecord, slot: Slot) -> None:
        own = [name for name in record.parameters if name not in record.gathered]
        with torch._C.DisableTorchFunctionSubclass():
            for name in own:
                parameter = record.parameters[name]
                parameter.data = self.value_in(record, slot, name)
                record.marks[name] = _mark(parameter)
        slot.expect(len(own))

    @staticmethod
    def value_in(record: UnitRecord, slot: Slot, name: str) -> torch.Tensor:
        """The view of a unit's slot that has the values of a parameter."""
        group, spec = record.unit.find(name)
        start, end = group.byte_range(spec)
        return slot.tensor[start:end].view(group.dtype).view(spec.shape)

    def _hide(self, record: UnitRecord) -> None:
        self._close(record)
        with torch._C.DisableTorchFunctionSubclass():
            for name, parameter in record.parameters.items():
                if name not in record.gathered:
                    parameter.data = record.placeholders[name]
                    record.marks[name] = _mark(parameter)

    def _open(self, record: UnitRecord) -> None:
        if not record.open:
            for name, parameter in record.parameters.items():
                parameter.__class__ = record.classes[name]
                if in_backward():
                    record.references[name] = _references(parameter)
            record.open = True

    def _close(self, record: UnitRecord) -> None:
        if record.open:
            for name, parameter in record.parameters.items():
                if name not in record.gathered:
                    parameter.__class__ = self._released
            record.references.clear()
            record.open = False

    # -- gathering ----------------------------------------------------------------------------------------------------

    def gather(self, record: UnitRecord, values: Mapping[str, torch.Tensor]) -> None:
        """These parameters have these tensors as their data, whatever becomes of the unit, until they are scattered."""
        with torch._C.DisableTorchFunctionSubclass():
            for name, value in values.items():
                record.gathered.add(name)
                record.parameters[name].data = value
                record.parameters[name].__class__ = record.classes[name]
        if record.slot is not None and record.residency is Residency.RESIDENT:
            record.slot.expect(len(record.parameters) - len(record.gathered))

    def scatter(self, record: UnitRecord, names: Collection[str]) -> None:
        """Parameters that were gathered are the unit's again."""
        record.gathered.difference_update(names)
        slot = record.slot if record.residency is Residency.RESIDENT else None
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for name in names:
                parameter = record.parameters[name]
                parameter.data = record.placeholders[name] if slot is None else self.value_in(record, slot, name)
                record.marks[name] = _mark(parameter)
                parameter.__class__ = record.classes[name] if record.open else self._released
        if slot is not None:
            slot.expect(len(record.parameters) - len(record.gathered))

    def close_all(self) -> None:
        """Nobody may read any parameter from now on."""
        for record in self.records:
            self._close(record)

    def _evict(self, record: UnitRecord) -> None:
        if record.residency is Residency.FETCHING:
            self._finish(record)
        if record.residency is Residency.UPDATING or self._updates.writes_from_slot(record.unit.index):
            self._free_slot(record.unit.index)
        if record.residency is Residency.RESIDENT:
            self._require_untouched(record)  # what was written to the slot goes with it
        with torch.inference_mode(False), torch.no_grad():
            self._hide(record)
        self._vacate(record)

    def _vacate(self, record: UnitRecord) -> None:
        """Give up the slot of a unit whose parameters are placeholders."""
        slot, record.slot = record.slot, None
        record.residency, record.stale = Residency.RELEASED, False
        if slot is None:
            return
        del self.at[slot.tensor.untyped_storage()._cdata]
        slot.expect(0)
        if slot.outstanding():
            self._viewed.append(slot)
        else:
            self._slots.free(slot)
