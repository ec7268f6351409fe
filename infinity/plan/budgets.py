"""Sizes of the memory for moving states: staging, host copies of weights, slots and the ring of gradients.

placement.py has the sizes of the landing window, of uploads and of the bounce buffer. speculation_memory.py has the
sizes of shadows and of the memory for states that are read ahead. planner.py divides the budgets ([Note: who gets
memory first]).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from infinity import _native
from infinity.config import SwapConfig
from infinity.errors import ConfigError, DeviceRoomError, PlanError
from infinity.plan.gradient_ring import RingSize, rings_of
from infinity.plan.machine_resources import usable_cores
from infinity.plan.placement import PIECES_MIN, TierSplit
from infinity.plan.plan_input import WEIGHT_SHARE_OF_DEVICE, MemoryLimits, PlanInput
from infinity.sizes import PAGE_BYTES, enough_bytes, format_bytes, round_up
from infinity.state.discover import HookedModule
from infinity.state.dtypes import master_format, native_name
from infinity.state.unit import FlatParameterGroup, Unit

_STAGING_BYTES = 64 << 20
_STAGING_BYTES_PER_THREAD = 8 << 20
_STAGING_SHARE_OF_HOST = 1 / 8
_TILES_MIN, _TILES_MAX = 3, 32
_TILE_NUMEL_MIN = 1 << 18  # each moment of a tile is one transfer: 1 MiB in fp32
_TASKS_PER_THREAD = 4
_PIECE_BYTES = 64 << 20
_COPIES_MAX = 4  # units with waiting or running updates, each with a copy of its weights
_NAMED_MAX = 6  # number of units that a message names


@dataclass(frozen=True)
class UpdateStaging:
    """Division of updates into tiles, and the host memory for the tiles.

    Attributes:
        tile_numel, tile_bytes: number of elements, and of bytes, of a tile.
        nbytes: bytes of the tiles in flight.
        ahead_bytes: additional bytes for states that are read ahead.
        threads: number of compute threads.
    """

    tile_numel: int
    tile_bytes: int
    nbytes: int
    threads: int
    ahead_bytes: int = 0

    @property
    def ahead_tiles(self) -> int:
        return self.ahead_bytes // self.tile_bytes


@dataclass(frozen=True)
class Budgets:
    """The budgets of the plan, and the parts of these budgets that are for moving states.

    Attributes:
        slot_bytes: device memory for fetched weights.
        ring: device memory for gradients on their way to the host.
        longest_ring_bytes: size that the ring would have with a larger memory.device.
        resident_bytes: device memory for the states that are kept and updated there, including the next two.
        scratch_bytes: device memory for temporary values in the updates on the device.
        operand_bytes: device memory for weights and gradients from RAM, in updates on the device.
        decoding_bytes: device memory in which encoded weights wait until they are decoded into slots; 0 if the device
            has no memory of its own.
        decodes: whether some weights are decoded into slots.
        upload_bytes: host memory that weights are read into before they are copied to the device, or decoded.
        bounce_bytes: host memory that gradients are copied to before they are added to gradients of earlier
            micro-batches.
        copies_bytes: host memory for weights that are copied from the device for updates, so that the updates need not
            read the weights from NVMe again.
        commit_bytes: host memory for states that commits copy from the device, on their way to the store.
        activation_bytes: host memory for tensors that a forward keeps for its backward: all of these with activations:
            host, and those on their way to NVMe and back with activations: nvme.
        exchange_bytes: host memory for gradients on their way to the ranks that own them.
        secondary_bytes: host memory for copies of weights that this rank keeps for the gather group G
            (sharded/gathered_slots.py).
        landing_bytes: bytes of the window that gradients land in on their way to the store; 0 if no gradient spills.
        shadow_bytes: host memory for new values of weights and states in RAM, which speculative updates compute. While
            no update speculates, the staging uses this memory.
    """

    limits: MemoryLimits
    slot_bytes: int
    ring: RingSize
    longest_ring_bytes: int
    resident_bytes: int
    scratch_bytes: int
    operand_bytes: int
    decoding_bytes: int
    decodes: bool
    upload_bytes: int
    bounce_bytes: int
    copies_bytes: int
    commit_bytes: int
    activation_bytes: int
    exchange_bytes: int
    secondary_bytes: int
    landing_bytes: int
    shadow_bytes: int
    staging: UpdateStaging

    @property
    def ring_bytes(self) -> int:
        return self.ring.nbytes

    def device_for(self, slot_bytes: int) -> str:
        """Return a value of memory.device with room for `slot_bytes` of slots and for the longest ring of gradients."""
        beside = self.resident_bytes + self.decoding_bytes + self.longest_ring_bytes
        known = self.limits.activations
        needed = int((slot_bytes + beside) / WEIGHT_SHARE_OF_DEVICE) if known is None else slot_bytes + beside + known
        return _config_bytes(self.limits, needed)

    @property
    def piece_bytes(self) -> int:
        """Number of bytes in one read of weights that are fetched from NVMe to the device."""
        return min(_PIECE_BYTES, self.upload_bytes // PIECES_MIN)


def update_threads(config: SwapConfig) -> int:
    """Return the number of threads that compute updates."""
    return config.update.threads or min(usable_cores(), torch.get_num_threads())


def plan_staging(inputs: PlanInput, host_budget: int, *, gradients: bool) -> UpdateStaging:
    """Plan the memory that the update's tiles are read into. A `host_budget` of 0 gives the smallest staging.

    A thread works on pieces that fit its L2 cache. A tile has a few pieces for every thread, so that no thread waits
    long for the last piece.

    Args:
        inputs: the input of the planner.
        host_budget: bytes of host memory. The tiles use a share of these bytes.
        gradients: whether the tiles contain gradients, too.
    """
    _require_isa()
    config = inputs.config
    threads = update_threads(config)
    groups = [group for unit in inputs.updated_on_processor for group in unit.local.trainable_groups]
    largest = round_up(max((group.numel for group in groups), default=1), _native.CUT_NUMEL)
    if config.update.tile is not None:
        numel = max(config.update.tile // 4, 1)
    else:
        numel = max(_TILE_NUMEL_MIN, threads * _native.task_numel() * _TASKS_PER_THREAD)
    int8 = any(group.moments == "int8" for group in groups)
    numel = min(round_up(numel, _native.CHUNK_NUMEL if int8 else _native.CUT_NUMEL), largest)
    staging = min(max(_STAGING_BYTES, threads * _STAGING_BYTES_PER_THREAD), int(host_budget * _STAGING_SHARE_OF_HOST))

    def tile_bytes() -> int:
        return max((_tile_bytes(group, config, numel, gradients=gradients) for group in groups), default=PAGE_BYTES)

    while config.update.tile is None and numel >= 2 * _TILE_NUMEL_MIN and _TILES_MIN * tile_bytes() > staging:
        numel = round_up(numel // 2, _TILE_NUMEL_MIN)
    nbytes = tile_bytes()
    model_tiles = sum(-(-group.numel // numel) for group in groups)
    tiles = max(min(staging // nbytes, model_tiles, _TILES_MAX), _TILES_MIN)
    return UpdateStaging(numel, nbytes, tiles * nbytes, threads)


def _require_isa() -> None:
    """Raise ConfigError if INFINITY_ISA names an instruction set that this processor does not have."""
    try:
        _native.select_isa()
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _tile_bytes(group: FlatParameterGroup, config: SwapConfig, numel: int, *, gradients: bool) -> int:
    return _native.UpdatePipeline.staging_tile_bytes(
        min(numel, group.numel),
        weight_dtype=native_name(group.dtype),
        master=master_format(group.dtype, config.master),
        moments=group.moments,
        gradients=gradients,
    )


def copies_bytes(inputs: PlanInput, weights: TierSplit, room: int) -> int:
    """Return the bytes of host memory for weights that rest on NVMe and are copied from the device for updates.

    The memory is for a few units only, because each update frees its part for the next update.

    Args:
        inputs: the input of the planner.
        weights: where the weights rest.
        room: bytes of host memory that have no other use.
    """
    if inputs.limits.in_place or inputs.limits.gathers:
        return 0
    sizes = [unit.trained_weight for unit in inputs.units if unit.state and unit.index not in weights.in_ram]
    largest = max(sizes, default=0)
    return min(_COPIES_MAX * largest, sum(sizes), room // PAGE_BYTES * PAGE_BYTES) if largest <= room else 0


def device_bytes(inputs: PlanInput, sites: Sequence[HookedModule], weights: TierSplit) -> tuple[int, RingSize, int]:
    """Return the bytes of device memory for fetched weights, the ring for gradients, and the bytes of the longest ring.

    The ring is the longest one that leaves enough memory for the weights (gradient_ring.py).

    If the device has no memory of its own, weights in RAM and gradients are used in place.

    Raises:
        PlanError: memory.device is too small for the units that are needed at once.
    """
    limits = inputs.limits
    rings = rings_of(inputs, sites)
    if not inputs.every <= weights.in_ram:
        # a slot saves a read from NVMe; a longer ring, in which gradients add up on the device, saves less
        rings = rings[:2]
    longest = rings[-1].nbytes
    decoding = 0 if limits.in_place else inputs.decoding_bytes
    resident = inputs.resident_bytes

    def ring_beside(nbytes: int) -> RingSize:
        there = limits.device if limits.activations is None and not resident else limits.beside_activations
        room = min(limits.device // 4, there - resident - nbytes - decoding)
        return next((ring for ring in reversed(rings) if ring.nbytes <= room), rings[0])

    if limits.slice_count and weights.tier == "device":
        raise PlanError(
            "weights: device keeps all weights on every device, but with several ranks each rank keeps only a slice. "
            "Set weights: host or auto."
        )
    if weights.tier == "device" and limits.in_place and inputs.decoded:
        raise PlanError(
            f"weights: device keeps weights decoded on the device, but frozen: {inputs.config.frozen} decodes them "
            "at each use. On the CPU set weights: host or auto, or frozen: bf16."
        )
    if weights.tier == "device" or (limits.used_at_home and weights.tier == "host" and not inputs.decoded):
        ring = ring_beside(inputs.slots)
        needs = inputs.slots + decoding
        if weights.tier == "device" and needs + ring.nbytes + resident > limits.device:
            raise PlanError(
                f"weights: device needs {format_bytes(needs)}{_and_for_gradients(ring.nbytes)}; memory.device is "
                f"{format_bytes(limits.device)}. Raise it to {enough_bytes(needs + ring.nbytes + resident)} plus what "
                "activations need, or set weights: host or nvme."
            )
        return inputs.slots, ring, longest
    fetched = inputs.every - (weights.in_ram - inputs.decoded) if limits.used_at_home else inputs.every
    needed = needed_at_once([unit.full for unit in inputs.all_units], sites, fetched)
    nbytes = sum(unit.weight_bytes for unit in needed)
    ring = ring_beside(nbytes)
    share = limits.for_weights - resident - ring.nbytes - decoding
    if limits.activations is not None:
        share -= share % PAGE_BYTES  # the slots must not take a byte that the activations need
    slots = min(max(share, nbytes), sum(unit.full.weight_bytes for unit in inputs.units if unit.index in fetched))
    if slots + ring.nbytes + decoding + resident > limits.device:
        largest = max(needed, key=lambda unit: unit.weight_bytes)
        names = ", ".join(unit.name for unit in needed[:_NAMED_MAX])
        more = f" and {len(needed) - _NAMED_MAX} more" if len(needed) > _NAMED_MAX else ""
        each = limits.for_each if limits.in_place else ""
        there = f" and {format_bytes(resident)} for states that stay there" if resident else ""
        raise DeviceRoomError(
            f"unit '{largest.name}' needs {format_bytes(nbytes)} of memory.device: its weights, "
            f"{format_bytes(largest.weight_bytes)}, and those of the other units that are in use at the "
            f"same time (together {names}{more}){_and_for_encoded(decoding)}{_and_for_gradients(ring.nbytes)}{there}; "
            f"memory.device is {format_bytes(limits.device)}{each}. Raise memory.device to "
            f"{_config_bytes(limits, nbytes + ring.nbytes + decoding + resident)} plus what activations need.",
            limits.device,
        )
    return round_up(slots, PAGE_BYTES), ring, longest


def fits_slots(units: Iterable[Unit], limits: MemoryLimits) -> bool:
    """Return whether all weights certainly fit the slots. Then no weight is fetched twice between two updates."""
    return sum(unit.weight_bytes for unit in units) <= limits.for_weights


def _config_bytes(limits: MemoryLimits, nbytes: int) -> str:
    """Return the value of memory.device with which each rank gets `nbytes`.

    If memory.device is a part of RAM, the ranks divide memory.device.
    """
    return enough_bytes(nbytes * (limits.ranks if limits.in_place else 1))


def _and_for_gradients(ring: int) -> str:
    return f" and {format_bytes(ring)} for gradients" if ring else ""


def _and_for_encoded(nbytes: int) -> str:
    return f" and {format_bytes(nbytes)} for encoded weights" if nbytes else ""


def needed_at_once(units: Sequence[Unit], sites: Sequence[HookedModule], fetched: Collection[int]) -> list[Unit]:
    """Return the units that must be on the device at once: the units of the two largest modules, and the units that
    stay.

    While a module runs, its own units and the units of the modules that contain it are in use: the containing modules
    may use their units after the module returns. At the same time the next module's units are fetched, and autograd or
    recomputation may still have views of the last module's units. Therefore the device needs room for the units of two
    modules, and for the units that stay while the model runs.

    Args:
        units: all units, in the order of their indices.
        sites: the units that the forward of each module needs; empty: every unit has a module of its own.
        fetched: indices of the units that are fetched to the device.
    """
    staying = {unit.index for unit in units if unit.stays and unit.index in fetched}
    coming = frozenset(fetched) - staying

    def nbytes(indices: Iterable[int]) -> int:
        return sum(units[index].weight_bytes for index in indices)

    moving: set[frozenset[int]] = {coming & each for each in _sets(units, sites)}
    ordered = sorted(moving, key=lambda each: (-nbytes(each), sorted(each)))
    best, most = frozenset[int](), 0
    for position, one in enumerate(ordered):
        if 2 * nbytes(one) <= most:
            break  # all later pairs are smaller
        for other in ordered[position:]:
            if nbytes(one) + nbytes(other) <= most:
                break
            if nbytes(one | other) > most:
                best, most = one | other, nbytes(one | other)
    return [units[index] for index in (*sorted(best), *sorted(staying))]


def _sets(units: Sequence[Unit], sites: Sequence[HookedModule]) -> list[set[int]]:
    """Return for each module the indices of its own units, of the units of the modules around it, and of its
    `beside`."""
    if not sites:
        return [{unit.index} for unit in units]
    own: dict[str, set[int]] = {}
    for site in sites:
        own.setdefault(site.name, set()).update(site.units)
    return [set(site.beside).union(*(own.get(name, ()) for name in _around(site.name))) for site in sites]


def _around(name: str) -> list[str]:
    """Return the module's own name and the names of the modules that contain it; the model's name is ''."""
    parts = name.split(".") if name else []
    return [".".join(parts[:length]) for length in range(len(parts) + 1)]
