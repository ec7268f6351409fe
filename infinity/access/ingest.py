"""Filling of a new model's homes: weights are written unit by unit, and moments in chunks.

At any time, at most one weight tensor is in memory twice. Moments are converted to the form that the config sets.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from infinity import _native
from infinity.base.page_advice import preload_pages
from infinity.coordinator.coordinator import Coordinator
from infinity.errors import ModelError, SwapIOError, SwapTimeoutError
from infinity.io.arena import ArenaRegion, Lease
from infinity.io.engine import Transfer
from infinity.io.store import wait_all
from infinity.sharded.rank_dependent_parts import open_broadcast
from infinity.sizes import PAGE_BYTES, round_up
from infinity.state.dtypes import native_name, residual_itemsize
from infinity.state.frozen_codecs import encoded_form
from infinity.state.int8 import blocks_of, put_scales_back
from infinity.state.moments import Moment
from infinity.state.unit import FlatParameterGroup, ParameterSpec
from infinity.state.values import Source
from infinity.tiers.home import StateHome
from infinity.units.unit import OffloadedUnit

logger = logging.getLogger(__name__)

_CHUNK_NUMEL = 1 << 20
_MOMENTS_NUMEL = 4 * _native.CHUNK_NUMEL


def ingest(coordinator: Coordinator, source: Source | None, in_memory: Callable[[str], bool]) -> None:
    """Move every parameter's values to their home, and leave placeholders in the model.

    Args:
        coordinator: coordinator of the model.
        source: function that returns a parameter's values by the parameter's name. None: the values are taken from the
            parameters themselves, and the memory of the parameters is freed unit by unit.
        in_memory: function that returns whether a parameter's values were made in memory, and not read from a file.

    Raises:
        SwapIOError: the device failed.
        ModelError: `source` returned a tensor of another shape, or a parameter has no values (meta device).
        PeerError: another rank's file has other values.
    """
    broadcast = open_broadcast(coordinator.world)
    with _UnitWrites(coordinator.transfers) as writes:
        for unit in coordinator.units:
            _ingest_unit(coordinator, unit, broadcast.values_of(unit, source, in_memory), writes)
            unit.adopt(coordinator.torch_device)
            coordinator.heap.check()  # reading and encoding leave holes
    coordinator.heap.restart()  # the original weights are freed
    broadcast.say()


class _UnitWrites:
    """Writes of units to the store, while the next units are read and encoded.

    Life cycle: lease() → start(), repeatedly; leaving the `with` block waits for all writes. The lease of a unit is
    released once all writes from the lease are finished. After a timeout the lease is never released, because the disk
    may still read from its memory.
    """

    def __init__(self, space: ArenaRegion) -> None:
        self._space = space
        self._under_way: deque[tuple[Lease, list[Transfer]]] = deque()

    def __enter__(self) -> _UnitWrites:
        return self

    def __exit__(self, kind: type[BaseException] | None, raised: BaseException | None, *where: object) -> None:
        failures: list[SwapIOError] = []
        while self._under_way:
            try:
                self._end_oldest()
            except SwapIOError as error:
                failures.append(error)
        if not failures:
            return
        if raised is not None:
            logger.warning("a write failed as well: %s", failures[0])
            return
        raise next((each for each in failures if isinstance(each, SwapTimeoutError)), failures[0])

    def lease(self, nbytes: int, what: str) -> Lease:
        """Return memory for a unit. If there is no free memory, wait for the oldest writes."""
        # No unit is fetched yet, so the space for slots (or uploads) is free.
        while self._under_way and not self._space.fits(nbytes):
            self._end_oldest()
        return self._space.lease(nbytes, what)

    def start(self, lease: Lease, writes: Iterable[Callable[[], Transfer]]) -> None:
        """Begin writes from a lease."""
        begun: list[Transfer] = []
        self._under_way.append((lease, begun))
        for write in writes:
            begun.append(write())

    def _end_oldest(self) -> None:
        lease, transfers = self._under_way[0]
        try:
            wait_all(transfers)
        except SwapTimeoutError:
            self._under_way.popleft()
            raise
        except SwapIOError:
            self._under_way.popleft()
            lease.release()
            raise
        self._under_way.popleft()
        lease.release()


def _ingest_unit(coordinator: Coordinator, unit: OffloadedUnit, source: Source | None, writes: _UnitWrites) -> None:
    weights = unit.weights_home
    if not weights.nbytes:
        return  # this rank has no part of the unit
    if weights.groups[0].in_memory:
        _fill(coordinator, unit, weights.groups, source)
        return
    lease = writes.lease(weights.nbytes, f"loading unit '{unit.name}'")
    filled = [StateHome(lease, home.start, home.nbytes, None) for home in weights.groups]
    try:
        _fill(coordinator, unit, filled, source)
    except BaseException:
        lease.release()
        raise
    stored = [(home, each.view()) for home, each in zip(weights.groups, filled, strict=True) if home.nbytes]
    writes.start(lease, [partial(coordinator.write_home, home, view) for home, view in stored])


def _fill(coordinator: Coordinator, unit: OffloadedUnit, homes: Sequence[StateHome], source: Source | None) -> None:
    """Write the weights of a unit to homes in memory, one for each group, and the residuals to their own homes."""
    for index, group in enumerate(unit.full.groups):
        if group.codec is not None:
            _fill_encoded(coordinator, unit, index, homes[index], source)
            continue
        for spec in group.specs:
            piece = unit.shard.piece(spec, index)
            if piece is None and spec.numel:
                continue  # this rank has no part of the parameter
            value = _value_of(unit, spec, source)
            if piece is None:
                continue
            begin = piece.index - spec.index
            _place(coordinator, unit, index, piece, value[begin : begin + piece.numel], homes[index])


def _fill_encoded(
    coordinator: Coordinator, unit: OffloadedUnit, index: int, home: StateHome, source: Source | None
) -> None:
    """Fill the home of an encoded group, which is the group or this rank's slice of it.

    Values that the file has in the group's codec are copied; others are encoded. A parameter that is divided between
    ranks is encoded by each of them.
    """
    group = unit.full.groups[index]
    if group.codec is None:
        raise AssertionError("a group without a codec is not encoded")
    mine = unit.shard.mine(index)
    for name, (begin, end) in group.encoded.items():
        first, last = max(begin, mine[0]), min(end, mine[1])
        if first >= last:
            continue  # this rank has no part of the parameter
        into = home.view()[first - mine[0] : last - mine[0]]
        known = encoded_form(unit.parameters[name])
        if known is not None and known.codec == group.codec:
            torch.frombuffer(into, dtype=torch.uint8).copy_(known.read()[first - begin : last - begin])
            continue
        _, spec = unit.full.find(name)
        # It is rounded first, so that the encoded bits equal the bits of a model in this dtype.
        value = _rounded(_value_of(unit, spec, source), group.dtype)
        complete = into if last - first == end - begin else memoryview(bytearray(end - begin))
        if value.numel():
            coordinator.encode(name, value, group.codec, complete)
        else:
            complete[:] = bytes(len(complete))
        if complete is not into:
            into[:] = complete[first - begin : last - begin]


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
    value = value.cpu().contiguous().reshape(-1)
    if source is not None:
        preload_pages(value)
    # Files are memory-mapped. After a header of odd length, values are at unaligned addresses. The native core refuses
    # unaligned addresses.
    return value.clone() if value.data_ptr() % value.element_size() else value


def _place(
    coordinator: Coordinator, unit: OffloadedUnit, index: int, spec: ParameterSpec, value: torch.Tensor, home: StateHome
) -> None:
    """Write the weight of one parameter, and its residual if the source has more bits than the weight."""
    group = unit.local.groups[index]
    states = unit.states_of(index)
    residual = None if states is None else states.residual
    for begin in range(0, spec.numel, _CHUNK_NUMEL):
        part = value[begin : begin + _CHUNK_NUMEL]
        home.write((spec.offset + begin) * group.dtype.itemsize, _rounded(part, group.dtype).view(torch.uint8))
        if states is None or residual is None or (states.master == "split16" and value.dtype == torch.bfloat16):
            continue
        at = (spec.offset + begin) * residual_itemsize(states.master)
        coordinator.write_parts(residual, {at: residual_of(part, states.master)})


def _rounded(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return values in the dtype of their weights."""
    if value.dtype == dtype:
        return value
    if dtype == torch.float32:
        return value.float()
    rounded = torch.empty(value.numel(), dtype=dtype, device="cpu")
    _native.round_weights(_bytes(value.float()), _bytes(rounded), native_name(dtype))
    return rounded


def residual_of(values: torch.Tensor, master: _native.MasterName) -> torch.Tensor:
    """Return the residual (uint8) of weights with these values: the low half of split16, or the fp32 master."""
    if master != "split16":
        return values.float().view(torch.uint8)
    high, rest = torch.empty(values.numel(), dtype=torch.int16), torch.empty(values.numel(), dtype=torch.int16)
    _native.encode_split16(_bytes(values.float()), high.numpy(), rest.numpy())
    return rest.view(torch.uint8)


def _bytes(tensor: torch.Tensor) -> _native.Buffer:
    """Return the memory of a contiguous tensor, for reading or writing."""
    return tensor.contiguous().view(torch.uint8).numpy()


# -- moments -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class IngestedMoment:
    """A moment of one parameter.

    Attributes:
        values: fp32 values, of the parameter's shape.
        scales: fp32 scales, one per block, if the moment was int8; None otherwise.
    """

    values: torch.Tensor
    scales: torch.Tensor | None


MomentSource = Callable[[str, Moment], IngestedMoment | None]
"""Function that returns a moment of a parameter, by the parameter's name. It returns None if no step has made the
moment."""


def fill_moments(coordinator: Coordinator, source: MomentSource) -> None:
    """Write moments to their homes, before the first step.

    Args:
        coordinator: coordinator of the model.
        source: function that returns the moments.

    Raises:
        ModelError: the model was offloaded for an optimizer that keeps fewer moments.
        SwapIOError: the device failed.
    """
    states: tuple[Moment, ...] = ("exp_avg", "exp_avg_sq")
    for unit in coordinator.units:
        for index, group, homes in unit.trained():
            whole = {spec.name: spec for spec in unit.full.groups[index].specs}
            for state in states:
                home = homes.moment(state)
                named = [(spec, source(spec.name, state)) for spec in group.specs if spec.numel]
                given = [
                    _PieceWithMoment(spec, spec.index - whole[spec.name].index, moment)
                    for spec, moment in named
                    if moment is not None
                ]
                if given and home is None:
                    raise ModelError(
                        f"the run has {state} of '{given[0].spec.name}', but this model was offloaded without room "
                        "for this state. Give the optimizer of the run as optimizer=."
                    )
                if given and home is not None:
                    _fill_moment(coordinator, group, state, home, given)


@dataclass(frozen=True)
class _PieceWithMoment:
    """A piece of a parameter in this process, with the moment of the parameter.

    Attributes:
        spec: the piece.
        skipped: number of elements of the parameter before the piece.
        moment: moment of the full parameter.
    """

    spec: ParameterSpec
    skipped: int
    moment: IngestedMoment


def _fill_moment(
    coordinator: Coordinator,
    group: FlatParameterGroup,
    state: Moment,
    home: StateHome,
    given: Sequence[_PieceWithMoment],
) -> None:
    nbytes = round_up(_native.moment_bytes(group.moments, min(_MOMENTS_NUMEL, group.numel)), PAGE_BYTES)
    memory = _native.Arena(nbytes, huge_pages=False)
    for begin in range(0, group.numel, _MOMENTS_NUMEL):
        numel = min(_MOMENTS_NUMEL, group.numel - begin)
        values = _assemble(given, begin, numel, with_scales=group.moments == "int8")
        at, end = (_native.moment_bytes(group.moments, count) for count in (begin, begin + numel))
        whole = memory.view(0, round_up(end - at, PAGE_BYTES))
        target = whole[: end - at]
        _native.encode_moments(values.numpy(), group.moments, is_signed=state == "exp_avg", data=target)
        if home.in_memory:
            coordinator.write_parts(home, {at: torch.frombuffer(target, dtype=torch.uint8)})
        else:
            wait_all([coordinator.write_home(home, whole, at=at, io_class="states")])


def _assemble(given: Sequence[_PieceWithMoment], begin: int, numel: int, *, with_scales: bool) -> torch.Tensor:
    """Return the moments of elements [begin, begin + numel) of a group, fp32; zeros where no moment is given."""
    values = torch.zeros(numel, dtype=torch.float32)
    for each in given:
        spec, moment = each.spec, each.moment
        first, last = max(begin, spec.offset), min(begin + numel, spec.offset + spec.numel)
        if first >= last:
            continue
        at = first - spec.offset + each.skipped
        values[first - begin : last - begin] = moment.values.reshape(-1)[at : at + last - first]
        if with_scales and moment.scales is not None:
            start, count = blocks_of(at), blocks_of(last - first)
            of_blocks = values[first - begin : first - begin + count * _native.BLOCK_NUMEL]
            put_scales_back(of_blocks, moment.scales[start : start + count])
    return values
