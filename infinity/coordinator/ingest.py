"""Bringing a model's weights home, unit by unit, so that no more than one tensor is held twice."""

from __future__ import annotations

from collections.abc import Callable

import torch

from infinity import _native
from infinity.coordinator.coordinator import Coordinator
from infinity.errors import ModelError
from infinity.io.arena import Lease
from infinity.io.store import wait_all
from infinity.sizes import PAGE_BYTES, round_up
from infinity.state.dtypes import native_name
from infinity.state.unit import Group, ParameterSpec
from infinity.tiers.home import Home
from infinity.units.unit import OffloadedUnit

Source = Callable[[str], torch.Tensor]
"""Gives the value of a parameter by its name, on the CPU, of its shape, in any floating dtype."""

_CHUNK_NUMEL = 1 << 20


def ingest(coordinator: Coordinator, source: Source | None) -> None:
    """Move every parameter to its home and leave placeholders.

    Args:
        source: where values come from; None: the parameters themselves, whose memory is freed unit by unit.

    Raises:
        SwapIOError: the device failed.
        ModelError: `source` gave another shape, or a parameter has no values (meta device).
    """
    for unit in coordinator.units:
        _ingest_unit(coordinator, unit, source)
        unit.views.adopt(coordinator.resources.device.device)


def _ingest_unit(coordinator: Coordinator, unit: OffloadedUnit, source: Source | None) -> None:
    resources = coordinator.resources
    weights = unit.homes.weights
    if weights.lease is not None:
        _fill(coordinator, unit, weights.lease, source)
        return
    store = resources.require_store()
    # Nothing is fetched yet, so the space for slots (or uploads) is free.
    lease = resources.arena.lease(unit.unit.weight_bytes, f"loading unit '{unit.name}'")
    try:
        _fill(coordinator, unit, lease, source)
        wait_all([store.write(home.stored(), lease.view(home.start, home.nbytes)) for home in weights.groups])
    finally:
        lease.release()


def _fill(coordinator: Coordinator, unit: OffloadedUnit, lease: Lease, source: Source | None) -> None:
    for index, group in enumerate(unit.unit.groups):
        for spec in group.specs:
            value = _value_of(unit, spec, source)
            start, end = group.byte_range(spec)
            _place(coordinator, unit, index, spec, value, lease.view(start, end - start))


def _value_of(unit: OffloadedUnit, spec: ParameterSpec, source: Source | None) -> torch.Tensor:
    value = source(spec.name) if source is not None else unit.parameters[spec.name].detach()
    if value.shape != spec.shape:
        raise ModelError(
            f"'{spec.name}' is {tuple(value.shape)} in the checkpoint and {tuple(spec.shape)} in the model"
        )
    if value.is_meta:
        raise ModelError(
            f"parameter '{spec.name}' is on the meta device: it has no values. Use infinity.load_pretrained."
        )
    return value.cpu().contiguous().reshape(-1)


def _place(
    coordinator: Coordinator,
    unit: OffloadedUnit,
    index: int,
    spec: ParameterSpec,
    value: torch.Tensor,
    weight: memoryview,
) -> None:
    """Write one parameter's weight, and the rest of its master where the source is finer than the weight."""
    group = unit.unit.groups[index]
    if not spec.numel:
        return
    states = unit.homes.states.get(index)
    if value.dtype == group.dtype:
        torch.frombuffer(weight, dtype=group.dtype).copy_(value)
    else:
        _native.round_weights(_bytes(value.float()), weight, native_name(group.dtype))
    if states is None or states.residual is None:
        return
    if states.master == "split16":
        if value.dtype != torch.bfloat16:
            _write_state(coordinator, states.residual, group, spec, 2, residual_of, value)
        return
    _write_state(coordinator, states.residual, group, spec, 4, lambda part: part.float().view(torch.uint8), value)


def residual_of(part: torch.Tensor) -> torch.Tensor:
    """int16 rest of split16, as uint8."""
    high, rest = torch.empty(part.numel(), dtype=torch.int16), torch.empty(part.numel(), dtype=torch.int16)
    _native.encode_split16(_bytes(part.float()), high.numpy(), rest.numpy())
    return rest.view(torch.uint8)


def _write_state(
    coordinator: Coordinator,
    home: Home,
    group: Group,
    spec: ParameterSpec,
    itemsize: int,
    convert: Callable[[torch.Tensor], torch.Tensor],
    value: torch.Tensor,
) -> None:
    """Write elements of one parameter's state, in chunks; on NVMe whole pages are read, changed and written back."""
    resources = coordinator.resources
    # Whole pages around what is written must fit the staging.
    room = min(_CHUNK_NUMEL, (resources.staging.nbytes - 2 * PAGE_BYTES) // itemsize)
    for begin in range(0, spec.numel, room):
        part = convert(value[begin : begin + room])
        at = (spec.offset + begin) * itemsize
        if home.in_memory:
            torch.frombuffer(home.view()[at : at + part.numel()], dtype=torch.uint8).copy_(part)
            home.changed()
            continue
        store, extent = resources.require_store(), home.stored()
        first = at // PAGE_BYTES * PAGE_BYTES
        nbytes = round_up(at + part.numel(), PAGE_BYTES) - first
        # The staging of the update is idle while a model is loaded.
        page = resources.staging.view(0, nbytes)
        wait_all([store.read(extent, page, at=first, io_class="states")])
        torch.frombuffer(page, dtype=torch.uint8)[at - first : at - first + part.numel()].copy_(part)
        wait_all([store.write(extent, page, at=first, io_class="states")])


def _bytes(tensor: torch.Tensor) -> _native.Buffer:
    return tensor.contiguous().view(torch.uint8).numpy()
