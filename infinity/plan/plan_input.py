"""Input of the planner: the config, the limits, and the bytes that each unit's states need in any tier.

Every size in a plan comes from `GroupBytes`, and every number of copies in the swap file from `PlanInput.copies`. The
search for a placement and the layout use the same `GroupBytes` and `copies`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from infinity.config import SwapConfig
from infinity.plan.disk import DiskLimits
from infinity.sizes import PAGE_BYTES, round_up
from infinity.state.dtypes import master_format, residual_itemsize
from infinity.state.moments import Moment
from infinity.state.shard import RankPartition
from infinity.state.unit import FlatParameterGroup, Unit, experts_of

WEIGHT_SHARE_OF_DEVICE = 0.5
"""Share of memory.device for weights, if it is not known how many bytes the activations need."""
_FOR_ACTIVATIONS_MAX = 40 << 30
FLAG_BYTES = PAGE_BYTES
"""Bytes of device memory in which the update of a unit on the device reports whether all new values are finite."""
DECODING_SCRATCH_BYTES = 13 << 22
"""Bytes of device memory for decoding (codes, indices, values, products); a part of the memory for activations."""
_COMMIT_BYTES_MIN = 4 << 20
_COMMIT_SHARE_OF_HOST = 64
_ACTIVATION_BYTES_MIN, _ACTIVATION_BYTES_MAX = 4 << 20, 2 << 30
_ACTIVATION_SHARE_OF_HOST = 8
_SCRATCH_ITEMSIZE, _SCRATCH_NUMEL = 24, 1 << 22
_CHECKSUM_BYTES = 4  # bytes of RAM for each page of the swap file


Sharing = Literal["nothing", "transfers", "weights"]
"""Memory that the ranks of a machine share.

nothing     weights and gradients go over sockets
transfers   slices of weights and gradients on their way to other ranks (sharded/shared_window.py)
weights     one copy of all weights, and gradients on their way (sharded/shared_homes.py)
"""


@dataclass(frozen=True)
class MemoryLimits:
    """The two budgets: device memory and host memory.

    Attributes:
        device: bytes for weights, activations and gradients in flight, on the device.
        host: bytes of RAM for everything that infinity keeps or stages in RAM.
        in_place: whether the device has no memory of its own, so that both budgets are RAM.
        slice_count: number of ranks over which every unit is divided. 0: units are not divided.
        ranks: number of ranks that divide the machine's budgets. These limits are the share of one rank.
        activations: bytes of `device` that activations need; None: not known, or the device has no memory of its own.
        block: bytes of `activations` that the backward of one block, or the loss, needs; None: not known.
        away: bytes of activations that a pass moves to NVMe, or to RAM that `activations: auto` has reserved; 0: not
            known, or none.
        sharing: what the ranks share in RAM (PeerFacts.sharing).
    """

    device: int
    host: int
    in_place: bool
    slice_count: int = 0
    ranks: int = 1
    activations: int | None = None
    block: int | None = None
    away: int = 0
    sharing: Sharing = "nothing"

    @property
    def for_weights(self) -> int:
        """Bytes of `device` for slots, the ring and resident units."""
        if self.activations is None:
            return int(self.device * WEIGHT_SHARE_OF_DEVICE)
        return max(self.device - self.activations, 0) // PAGE_BYTES * PAGE_BYTES

    @property
    def beside_activations(self) -> int:
        """Bytes of `device` for resident units and everything else but activations, with `optimizer: auto`."""
        if self.activations is None:
            return self.device - min(int(self.device * (1 - WEIGHT_SHARE_OF_DEVICE)), _FOR_ACTIVATIONS_MAX)
        return self.for_weights

    @property
    def ram(self) -> int:
        """Bytes of RAM in both budgets."""
        return self.host + self.device * self.in_place

    @property
    def for_each(self) -> str:
        """Words for messages: the number of ranks that have these budgets each; '' if there is one rank."""
        return f" for each of the {self.ranks} ranks on this machine" if self.ranks > 1 else ""

    @property
    def gathers(self) -> bool:
        """Whether the ranks gather weights from their slices, in a slot for each use."""
        return self.slice_count > 0 and self.sharing != "weights"

    @property
    def used_at_home(self) -> bool:
        """Whether weights that rest in RAM are used in place."""
        return self.in_place and not self.gathers


@dataclass(frozen=True)
class GroupBytes:
    """Bytes of one group.

    Attributes:
        states: bytes of each optimizer state of the group, by name; empty if the group is frozen.
        gradient_native, gradient_fp32: bytes of the gradients in autograd's dtype, and in fp32. Several gradients of a
            parameter are added in fp32. 0 if the group is frozen.
    """

    group: FlatParameterGroup
    states: Mapping[str, int]
    gradient_native: int
    gradient_fp32: int

    @property
    def weight(self) -> int:
        """Bytes of the weights at home."""
        return self.group.home_bytes


@dataclass(frozen=True)
class PeerFacts:
    """Facts about the other ranks that a plan needs.

    Attributes:
        cut: this rank's slice of every unit.
        on_machine: number of ranks on this machine, which divide its RAM and its cores.
        sharded: whether weights are gathered and gradients exchanged, even if there is only one rank.
        memory: bytes of the device and of RAM that each rank may take, agreed by all ranks; None: the memory that the
            config sets, or that is available on this machine.
        near: the slice of every unit of which this rank keeps a copy for the gather group G
            (sharded/gathered_slots.py); None: G is the group of all ranks.
        sharing: what the ranks share in RAM; as input of the planner, what they can share. The planner changes
            "weights" to "transfers" unless all weights rest in RAM.
    """

    cut: RankPartition
    on_machine: int
    sharded: bool = True
    memory: tuple[int, int] | None = None
    near: RankPartition | None = None
    sharing: Sharing = "nothing"

    @property
    def slice_count(self) -> int:
        """Number of ranks over which every unit is divided (MemoryLimits.slice_count)."""
        return self.cut.count if self.sharded else 0

    @property
    def facts(self) -> dict[str, int]:
        """Values that must be the same in a run that resumes states of this rank."""
        cut = self.cut
        return {"rank": cut.index, "ranks": cut.count, "slice_numel": cut.numel} if self.sharded else {}


NO_PEERS = PeerFacts(RankPartition(1, 0), 1, sharded=False)


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of one unit: the sum over its groups.

    Attributes:
        local: the part of the unit that this rank keeps: all of it, or its slice.
        full: the complete unit, which a slot contains.
    """

    local: Unit
    full: Unit
    groups: tuple[GroupBytes, ...]

    @property
    def index(self) -> int:
        return self.local.index

    @property
    def weight(self) -> int:
        """Bytes of the weights at home."""
        return self.local.home_bytes

    @property
    def encoded(self) -> int:
        """Bytes of the encoded weights that each fetch decodes into a slot, of all ranks together."""
        return self.full.encoded_bytes

    @cached_property
    def trained_weight(self) -> int:
        """Bytes of the weights that the optimizer changes."""
        return sum(group.weight for group in self.groups if group.group.trainable)

    @cached_property
    def state(self) -> int:
        """Bytes of the optimizer states (residual and moments); 0 if nothing of the unit is trained."""
        return sum(sum(group.states.values()) for group in self.groups)

    def resident_bytes(self, *, fp32: bool) -> int:
        """Return the bytes of device memory for all states and the gradients of the unit.

        Args:
            fp32: whether the gradients have room for fp32.
        """
        gradients = self.gradient_fp32 if fp32 else self.gradient_native
        return self.full.weight_bytes + self.state + gradients + FLAG_BYTES

    @cached_property
    def gradient_native(self) -> int:
        return sum(group.gradient_native for group in self.groups)

    @cached_property
    def gradient_fp32(self) -> int:
        return sum(group.gradient_fp32 for group in self.groups)


@dataclass(frozen=True)
class PlanInput:
    """Everything that the planner places, and the limits.

    Attributes:
        units: bytes of the units whose states are not kept on the device, in the order of their indices.
        stored: the moments that the optimizer keeps.
        known_passes: number of backward passes before a step, if the caller passed this number; None: not known.
        commit_every: number of steps between durable generations; 0: no generations. If the config leaves this number
            open, the planner tries several values.
        secondary_bytes: bytes of host memory for the copies of weights that this rank keeps for the gather group G
            (sharded/gathered_slots.py).
        resident: bytes of the units all of whose states are kept on the device (resident_units.py).
        states_on_device: indices of the units in `units` whose optimizer states are kept on the device, where they are
            updated, although their weights and gradients rest elsewhere.
    """

    config: SwapConfig
    limits: MemoryLimits
    disks: DiskLimits
    units: tuple[UnitBytes, ...]
    stored: tuple[Moment, ...]
    known_passes: int | None
    commit_every: int
    secondary_bytes: int = 0
    resident: tuple[UnitBytes, ...] = ()
    states_on_device: frozenset[int] = frozenset()

    @cached_property
    def all_units(self) -> list[UnitBytes]:
        """Bytes of all units, in the order of their indices."""
        return sorted((*self.units, *self.resident), key=lambda unit: unit.index)

    @cached_property
    def resident_bytes(self) -> int:
        """Bytes of device memory for the states that are kept and updated there, for the gradients of the resident
        units, and for the memory of the updates."""
        whole = sum(unit.resident_bytes(fp32=self.resident_adds_up) for unit in self.resident)
        return whole + sum(map(device_state_bytes, self.updated_on_device)) + self.scratch_bytes + self.operand_bytes

    @property
    def scratch_bytes(self) -> int:
        """Bytes of device memory for temporary values in the updates on the device, and in the norms of resident
        units."""
        return scratch_bytes((*self.resident, *self.updated_on_device))

    @property
    def operand_bytes(self) -> int:
        """Bytes of device memory for the weights and gradients of updates of `states_on_device`."""
        return operand_bytes(self.updated_on_device)

    @cached_property
    def updated_on_device(self) -> list[UnitBytes]:
        """Bytes of the units of `states_on_device`."""
        return [unit for unit in self.units if unit.index in self.states_on_device]

    @cached_property
    def updated_on_processor(self) -> list[UnitBytes]:
        """Bytes of the units whose optimizer states are in RAM or on NVMe, and that the processor updates."""
        return [unit for unit in self.units if unit.state and unit.index not in self.states_on_device]

    @property
    def passes(self) -> int:
        """Number of backward passes before a step, as the plan counts them: 1 if the number is not known."""
        return self.known_passes or 1

    @cached_property
    def weight(self) -> int:
        return sum(unit.weight for unit in self.units)

    @cached_property
    def slots(self) -> int:
        """Bytes of the slots that all weights together would need."""
        return sum(unit.full.weight_bytes for unit in self.units)

    @cached_property
    def decoded(self) -> frozenset[int]:
        """Indices of the units that have weights to decode at each fetch."""
        return frozenset(unit.index for unit in self.units if unit.encoded)

    @cached_property
    def decoding_bytes(self) -> int:
        """Bytes of memory for encoded weights on their way to slots: the encoded weights of the two largest units."""
        return sum(sorted(unit.encoded for unit in self.units)[-2:])

    @cached_property
    def state(self) -> int:
        """Bytes of the optimizer states that are not on the device."""
        return sum(unit.state for unit in self.updated_on_processor)

    @cached_property
    def every(self) -> frozenset[int]:
        """Indices of these units."""
        return frozenset(unit.index for unit in self.units)

    @cached_property
    def trained(self) -> frozenset[int]:
        """Indices of the units that have optimizer states."""
        return frozenset(unit.index for unit in self.units if unit.state)

    @property
    def largest(self) -> Unit:
        return max(self.all_units, key=lambda unit: unit.weight).local

    @cached_property
    def ring_bytes_min(self) -> int:
        """Smallest device memory for gradients on their way to the host: the gradients of the largest unit."""
        return 0 if self.limits.in_place else max((unit.full.gradient_bytes for unit in self.units), default=0)

    @cached_property
    def exchange_bytes(self) -> int:
        """Host memory for gradients on their way to the ranks that own them."""
        if not self.limits.slice_count:
            return 0
        # With shared memory, a rank receives no piece from itself: it adds its own piece from the box.
        senders = self.limits.slice_count - (self.limits.sharing != "nothing")
        return exchange_bytes([(unit.full, unit.local) for unit in self.units], senders)

    @cached_property
    def commit_bytes(self) -> int:
        """Host memory for the states on the device on their way to the store; 0 if there are no commits."""
        if not self.commit_every:
            return 0
        longest = max(_COMMIT_BYTES_MIN, self.limits.host // _COMMIT_SHARE_OF_HOST // PAGE_BYTES * PAGE_BYTES)
        whole = sum(unit.weight + unit.state for unit in self.resident)
        return min(longest, whole + sum(unit.state for unit in self.updated_on_device))

    @property
    def activation_bytes(self) -> int:
        """Host memory for tensors that a forward keeps: for all that leave the device, or on their way to NVMe."""
        if self.config.activations != "nvme":
            return self.limits.away  # 0 with activations: host, which takes what states leave
        share = self.limits.host // _ACTIVATION_SHARE_OF_HOST // PAGE_BYTES * PAGE_BYTES
        return min(max(share, _ACTIVATION_BYTES_MIN), _ACTIVATION_BYTES_MAX)

    @property
    def reserved_bytes(self) -> int:
        """Host memory that is needed because of other ranks, for the commits of resident units, and for activations on
        NVMe."""
        return self.exchange_bytes + self.secondary_bytes + self.commit_bytes + self.activation_bytes

    @property
    def adds_up(self) -> bool:
        """Whether a parameter gets several gradients before a step: from several passes, micro-batches or ranks."""
        return self.passes > 1 or self.config.vertical or self.limits.slice_count > 0

    @property
    def resident_adds_up(self) -> bool:
        """Whether gradients on the device have room for fp32 (adds_up_there)."""
        return adds_up_there(self.known_passes, self.config)

    def weight_of(self, indices: Collection[int]) -> int:
        return sum(unit.weight for unit in self.units if unit.index in indices)

    def state_of(self, indices: Collection[int]) -> int:
        return sum(unit.state for unit in self.units if unit.index in indices)

    def copies(self, *, changes: bool, in_ram: bool) -> int:
        """Return the number of copies of a state in the swap file.

        Without generations, a state on NVMe has one copy and a state that rests in RAM has none. With generations, a
        state that does not change has one copy. A state that changes has `keep` + `pins` + 1 copies: one for each
        generation that is kept or pinned, and one for the next write.
        """
        if not self.commit_every:
            return 0 if in_ram else 1
        return self.config.keep + self.config.pins + 1 if changes else 1

    def swap_bytes(self, weights_in_ram: Collection[int], states_in_ram: frozenset[int]) -> int:
        """Return the size of the swap file without gradients."""
        total, in_memory = 0, states_in_ram | self.states_on_device
        for unit in self.units:
            weights, states = unit.index in weights_in_ram, unit.index in in_memory
            total += unit.trained_weight * self.copies(changes=True, in_ram=weights)
            total += (unit.weight - unit.trained_weight) * self.copies(changes=False, in_ram=weights)
            total += unit.state * self.copies(changes=True, in_ram=states)
        for unit in self.resident:
            total += (unit.trained_weight + unit.state) * self.copies(changes=True, in_ram=True)
            total += (unit.weight - unit.trained_weight) * self.copies(changes=False, in_ram=True)
        return total

    def checksum_bytes(self, swap_bytes: int) -> int:
        """Return the RAM for the checksums of a swap file."""
        return swap_bytes // PAGE_BYTES * _CHECKSUM_BYTES if self.config.nvme.checksums else 0

    def cost(self, nbytes: int) -> int:
        """Return how much more RAM is used if a state of `nbytes` rests in RAM.

        Without generations, a state that rests in RAM has no copy in the swap file, and the RAM for its checksums is
        saved.
        """
        return nbytes if self.commit_every else nbytes - self.checksum_bytes(nbytes)


def count(group: FlatParameterGroup, config: SwapConfig, stored: Sequence[Moment]) -> GroupBytes:
    """Return the bytes of one group's states and gradients.

    Args:
        group: the group.
        config: the swap config.
        stored: names of the moments that the optimizer keeps.
    """
    if not group.trainable or not group.numel:
        return GroupBytes(group, {}, 0, 0)
    residual = group.state_bytes(residual_itemsize(master_format(group.dtype, config.master)))
    return GroupBytes(
        group=group,
        states=({"residual": residual} if residual else {}) | dict.fromkeys(stored, group.moment_bytes),
        gradient_native=group.gradient_bytes,
        gradient_fp32=group.state_bytes(4),
    )


def adds_up_there(passes: int | None, config: SwapConfig) -> bool:
    """Return whether gradients on the device have room for fp32: unless a parameter is known to get one gradient.

    Args:
        passes: number of backward passes before a step; None: not known.
        config: the swap config.
    """
    return passes != 1 or config.vertical


def scratch_bytes(resident: Iterable[UnitBytes]) -> int:
    """Return the bytes of device memory for temporary values in the updates of these units, and in the sums of squares
    of their gradients.

    It is SCRATCH_ITEMSIZE (device_update/rules.py) for each element that is updated at a time.
    """
    numel = max((group.numel for unit in resident for group in unit.local.trainable_groups), default=0)
    return round_up(_SCRATCH_ITEMSIZE * min(numel, _SCRATCH_NUMEL), PAGE_BYTES)


def device_state_bytes(unit: UnitBytes) -> int:
    """Return the bytes of device memory for the optimizer states of a unit that is updated there."""
    return unit.state + FLAG_BYTES


def operand_bytes(units: Iterable[UnitBytes]) -> int:
    """Return the bytes of device memory for the weights and gradients of updates whose weights and gradients rest in
    RAM: room for two groups, one of which is copied while the other is updated."""
    groups = [group for unit in units for group in unit.groups if group.states]
    sizes = (round_up(group.weight, PAGE_BYTES) + round_up(group.gradient_fp32, PAGE_BYTES) for group in groups)
    return 2 * max(sizes, default=0)


def exchange_bytes(units: Sequence[tuple[Unit, Unit]], senders: int) -> int:
    """Return the bytes for gradients on their way to the ranks that own them.

    There is room for the gradients of the two largest units: the gradients that a rank sends, and the gradients that
    arrive from all ranks. There is also room for the gradients of the units that stay on the device, because these
    gradients are sent last, and for those of all experts of a block, because these are sent when the backward of the
    block has ended.

    Args:
        units: each complete unit, and the slice of it that this rank keeps. Those of rank 0 are the longest.
        senders: number of ranks whose gradients for its slice this rank receives.
    """
    staying = sum(unit.gradient_bytes for unit, _ in units if unit.stays)
    boxes = [unit.gradient_bytes + senders * local.gradient_bytes for unit, local in units]
    sizes = {unit.index: unit.gradient_bytes for unit, _ in units}
    experts = experts_of([unit for unit, _ in units]).values()
    return sum(sorted(boxes)[-2:]) + staying + max((sum(map(sizes.__getitem__, each)) for each in experts), default=0)


def secondary_bytes(units: Iterable[Unit], near: RankPartition) -> int:
    """Return the bytes of the copies of weight slices that a rank keeps for the gather group G.

    Units that stay in their slots until they are updated need no copy.

    Args:
        units: the complete units.
        near: the slice of each unit of which the rank keeps a copy.
    """
    return sum(near.of(unit).local.home_bytes for unit in units if not unit.stays)


def as_far_as(costs: Iterable[tuple[int, int]], room: int) -> frozenset[int]:
    """Choose pairs (index, bytes) in order, and return their indices.

    Together the chosen pairs have at most `room` bytes. A pair for which there is no room is skipped.
    """
    chosen = set()
    for index, nbytes in costs:
        if nbytes <= room:
            chosen.add(index)
            room -= nbytes
    return frozenset(chosen)
