"""Copies of weights for whoever asks, and new values that come back from them.

[Note: gathering]
What is gathered is a copy beside the unit's slot: the unit may be evicted and fetched as before, a model that does not
fit into the memory planned for weights can be gathered as far as the machine has memory, and what is done to a copy
reaches the states only where it was asked for. On the way back only parameters whose bits changed are written: their
weights, and a master of exactly these values; moments stay. The write goes where no generation is (`destination`), so
the generations that exist stay whole, and the next commit has the new values.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from infinity import _native
from infinity.errors import ModelError, PlanError, SwapIOError
from infinity.io.store import wait_all
from infinity.plan.machine import available_device_bytes
from infinity.schedule.backing import Backing, Home
from infinity.schedule.device import Slot
from infinity.schedule.ingest import residual_of
from infinity.schedule.ledger import Ledger
from infinity.schedule.residents import Residents, UnitRecord
from infinity.sizes import PAGE_BYTES, format_bytes, round_up
from infinity.state.unit import Group

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 4 << 20

Named = Mapping[int, Sequence[str]]
"""For each unit, by index, names of parameters of it."""


@contextmanager
def gather(ledger: Ledger, wanted: Named, *, write: bool) -> Iterator[None]:
    """See infinity.gathered."""
    fresh = _not_gathered(ledger, wanted, write=write)
    _require_memory(ledger, fresh)
    marks: dict[int, int] = {}
    with ledger.readers.gathering():
        try:
            for index, names in fresh.items():
                record = ledger.records[index]
                with ledger.readers.taking([index]), torch.inference_mode(False), torch.no_grad():
                    copies = {name: record.parameters[name].detach().clone() for name in names}
                    with ledger.locked() as residents:
                        residents.gather(record, copies)
                if not write:
                    marks |= {id(record.parameters[name]): _sum_of_bits(record.parameters[name]) for name in names}
            yield
            if write:
                _take_home(ledger, fresh)
            else:
                _tell_of_changes(ledger, fresh, marks)
        finally:
            for index, names in fresh.items():
                record = ledger.records[index]
                with ledger.locked() as residents:
                    residents.scatter(record, [name for name in names if name in record.gathered])


def _sum_of_bits(parameter: nn.Parameter) -> int:
    """Differs, nearly always, once a value was changed, through `.data` as well; it is for a warning."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[parameter.element_size()]
    return int(parameter.detach().contiguous().view(bits).sum())


def _not_gathered(ledger: Ledger, wanted: Named, *, write: bool) -> dict[int, list[str]]:
    """What an outer context has gathered already stays as it is there."""
    fresh = {}
    for index, names in wanted.items():
        gathered = ledger.records[index].gathered
        if write and not gathered.isdisjoint(names):
            raise ModelError(
                f"parameter '{min(gathered & set(names))}' is gathered already, by an outer infinity.gathered: what is "
                "written here would not reach its copy. Leave the outer context first."
            )
        fresh[index] = [name for name in names if name not in gathered]
    return {index: names for index, names in fresh.items() if names}


def _require_memory(ledger: Ledger, wanted: Named) -> None:
    device = ledger.backing.device.device
    nbytes = 0
    for index, names in wanted.items():
        found = [ledger.records[index].unit.find(name) for name in names]
        nbytes += sum(spec.numel * group.dtype.itemsize for group, spec in found)
    free = available_device_bytes(device)
    if nbytes > free:
        raise PlanError(
            f"infinity.gathered needs {format_bytes(nbytes)} for copies of weights on {device}, and "
            f"{format_bytes(free)} are free. Gather one module after the other, or go through "
            "infinity.state_dict(model), which has one tensor in memory at a time."
        )


def _tell_of_changes(ledger: Ledger, wanted: Named, marks: Mapping[int, int]) -> None:
    changed = [
        name
        for index, names in wanted.items()
        for name in names
        if _sum_of_bits(parameter := ledger.records[index].parameters[name]) != marks[id(parameter)]
    ]
    if changed:
        logger.warning(
            "infinity.gathered: '%s'%s changed, and the change ends with the context; infinity.gathered(..., "
            "write=True) keeps it",
            changed[0],
            f" and {len(changed) - 1} other parameters were" if len(changed) > 1 else " was",
        )


# -- new values -------------------------------------------------------------------------------------------------------


def _take_home(ledger: Ledger, wanted: Named) -> None:
    ledger.prepare_writing()
    for index in wanted:
        _require_shapes(ledger.records[index], wanted[index])
    for index, names in wanted.items():
        record = ledger.records[index]
        with ledger.readers.taking([index]), torch.inference_mode(False), torch.no_grad():
            if record.slot is None:
                raise AssertionError(f"unit {record.unit.name} was brought and has no slot")
            changed = [name for name in names if not _same_bits(record, record.slot, name)]
            _require_writable(ledger.backing, record, changed)
            try:
                _write(ledger, record, record.slot, changed)
            except SwapIOError as error:
                ledger.failed = ledger.failed or error
                raise


def _require_shapes(record: UnitRecord, names: Sequence[str]) -> None:
    for name in names:
        group, spec = record.unit.find(name)
        now = record.parameters[name]
        if now.shape != spec.shape or now.dtype != group.dtype:
            raise ModelError(
                f"'{name}' is {tuple(now.shape)}, {now.dtype} at the end of infinity.gathered, and "
                f"{tuple(spec.shape)}, {group.dtype} in the store. Nothing was written; change values only."
            )


def _same_bits(record: UnitRecord, slot: Slot, name: str) -> bool:
    """Of the copy and the unit's own; NaN is compared, too."""
    mine = record.parameters[name].detach().to(slot.tensor.device).contiguous().reshape(-1)
    own = Residents.value_in(record, slot, name).reshape(-1)
    return torch.equal(mine.view(torch.uint8), own.view(torch.uint8))


def _require_writable(backing: Backing, record: UnitRecord, changed: Sequence[str]) -> None:
    """The generations of a run share one copy of frozen weights."""
    for name in changed:
        group, _ = record.unit.find(name)
        home = backing.weights[record.unit.index].groups[record.unit.groups.index(group)]
        if not group.trainable and backing.generations is not None and backing.generations.newest is not None:
            raise ModelError(
                f"parameter '{name}' is frozen, and was changed in infinity.gathered(..., write=True): the "
                f"generations of this run ({home.stored().state} of unit '{record.unit.name}') share one copy of it. "
                "Change it before the first step, or set commit_every: 0. The change is dropped."
            )


def _write(ledger: Ledger, record: UnitRecord, slot: Slot, changed: Sequence[str]) -> None:
    """Put new values into the slot, and from there into the homes of weights and master."""
    backing = ledger.backing
    for name in changed:
        Residents.value_in(record, slot, name).copy_(record.parameters[name])
    touched = {record.unit.groups.index(record.unit.find(name)[0]) for name in changed}
    for index in sorted(touched):
        group = record.unit.groups[index]
        weight = backing.weights[record.unit.index].groups[index]
        _replace(backing, weight, {0: _bytes_of(slot, group)})
        states = backing.states[record.unit.index].get(index)
        if states is not None and states.residual is not None:
            itemsize = 2 if states.master == "split16" else 4
            fresh = {}
            for name in changed:
                found, spec = record.unit.find(name)
                if found is group:
                    value = record.parameters[name].detach().cpu().contiguous().reshape(-1)
                    rest = residual_of(value) if states.master == "split16" else value.float().view(torch.uint8)
                    fresh[spec.offset * itemsize] = rest
            _replace(backing, states.residual, fresh)
    if changed:
        ledger.commits.touched()


def _bytes_of(slot: Slot, group: Group) -> torch.Tensor:
    """A group's weights on the host, uint8."""
    return slot.tensor[group.weight_offset : group.weight_offset + group.weight_bytes].cpu()


def _replace(backing: Backing, home: Home, parts: Mapping[int, torch.Tensor]) -> None:
    """Write bytes of a state, by where they begin in it; the others stay."""
    if home.in_memory:
        for begin, part in parts.items():
            torch.frombuffer(home.view(), dtype=torch.uint8)[begin : begin + part.numel()].copy_(part)
        home.dirty = True
        return
    store, extent = backing.require_store(), home.stored()
    slot = backing.destination(extent)
    memory = _native.Arena(min(_CHUNK_BYTES, round_up(home.nbytes, PAGE_BYTES)), huge_pages=False)
    for at in range(0, home.nbytes, _CHUNK_BYTES):
        page = memory.view(0, min(_CHUNK_BYTES, home.nbytes - at))
        wait_all([store.read(extent, page, at=at, io_class="states")])
        held = torch.frombuffer(page, dtype=torch.uint8)
        for begin, part in parts.items():
            first, last = max(begin, at), min(begin + part.numel(), at + len(page))
            if first < last:
                held[first - at : last - at].copy_(part[first - begin : last - begin])
        wait_all([store.write(extent, page, at=at, io_class="states", slot=slot)])
    extent.slot, home.dirty = slot, False
