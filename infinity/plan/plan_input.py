"""Input of the planner: the config, the limits, and the bytes that each unit's states need in any tier.

Every size in a plan comes from `GroupBytes`, and every number of copies in the swap file from `PlanInput.copies`. The
search for a placement and the layout use the same `GroupBytes` and `copies`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from infinity.config import SwapConfig
from infinity.plan.disk import DiskLimits
from infinity.sizes import PAGE_BYTES
from infinity.state.dtypes import master_format, residual_itemsize
from infinity.state.moments import Moment
from infinity.state.shard import RankPartition
from infinity.state.unit import FlatParameterGroup, Unit

_CHECKSUM_BYTES = 4  # bytes of RAM for each page of the swap file


@dataclass(frozen=True)
class MemoryLimits:
    """The two budgets: device memory and host memory.

    Attributes:
        device: bytes for weights, activations and gradients in flight, on the device.
        host: bytes of RAM for everything that infinity keeps or stages in RAM.
        in_place: whether the device has no memory of its own, so that both budgets are RAM.
        slice_count: number of ranks over which every unit is divided. The unit's weights are gathered in a slot for
            each use. 0: units are not divided.
        ranks: number of ranks that divide the machine's budgets. These limits are the share of one rank.
    """

    device: int
    host: int
    in_place: bool
    slice_count: int = 0
    ranks: int = 1

    @property
    def ram(self) -> int:
        """Bytes of RAM in both budgets."""
        return self.host + self.device * self.in_place

    @property
    def for_each(self) -> str:
        """Words for messages: the number of ranks that have these budgets each; '' if there is one rank."""
        return f" for each of the {self.ranks} ranks on this machine" if self.ranks > 1 else ""

    @property
    def used_at_home(self) -> bool:
        """Whether weights that rest in RAM are used in place."""
        return self.in_place and not self.slice_count


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
    """

    cut: RankPartition
    on_machine: int
    sharded: bool = True
    memory: tuple[int, int] | None = None
    near: RankPartition | None = None

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
        """Bytes of the weights at home that are encoded: each fetch decodes them into a slot."""
        return self.local.encoded_bytes

    @cached_property
    def trained_weight(self) -> int:
        """Bytes of the weights that the optimizer changes."""
        return sum(group.weight for group in self.groups if group.group.trainable)

    @cached_property
    def state(self) -> int:
        """Bytes of the optimizer states (residual and moments); 0 if nothing of the unit is trained."""
        return sum(sum(group.states.values()) for group in self.groups)

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
        units: bytes of all units, in the order of their indices.
        stored: the moments that the optimizer keeps.
        known_passes: number of backward passes before a step, if the caller passed this number; None: not known.
        commit_every: number of steps between durable generations; 0: no generations. If the config leaves this number
            open, the planner tries several values.
        secondary_bytes: bytes of host memory for the copies of weights that this rank keeps for the gather group G
            (sharded/gathered_slots.py).
    """

    config: SwapConfig
    limits: MemoryLimits
    disks: DiskLimits
    units: tuple[UnitBytes, ...]
    stored: tuple[Moment, ...]
    known_passes: int | None
    commit_every: int
    secondary_bytes: int = 0

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
        return sum(unit.state for unit in self.units)

    @cached_property
    def every(self) -> frozenset[int]:
        """Indices of all units."""
        return frozenset(unit.index for unit in self.units)

    @cached_property
    def trained(self) -> frozenset[int]:
        """Indices of the units that have optimizer states."""
        return frozenset(unit.index for unit in self.units if unit.state)

    @property
    def largest(self) -> Unit:
        return max(self.units, key=lambda unit: unit.weight).local

    @cached_property
    def ring_bytes_min(self) -> int:
        """Smallest device memory for gradients on their way to the host: the gradients of the largest unit."""
        return 0 if self.limits.in_place else max(unit.full.gradient_bytes for unit in self.units)

    @cached_property
    def exchange_bytes(self) -> int:
        """Host memory for gradients on their way to the ranks that own them.

        The memory has room for the gradients of the two largest units: the gradients that this rank sends, and the
        gradients that arrive from all ranks. It also has room for the gradients of the units that stay on the device,
        because these gradients are sent last.
        """
        if not self.limits.slice_count:
            return 0
        staying = sum(unit.full.gradient_bytes for unit in self.units if unit.full.stays)
        # Every rank sends its gradients for this rank's slice. The slices' sizes are rounded up.
        boxes = [unit.full.gradient_bytes + self.limits.slice_count * unit.local.gradient_bytes for unit in self.units]
        return sum(sorted(boxes)[-2:]) + staying

    @property
    def ranks_bytes(self) -> int:
        """Host memory that is needed because of other ranks."""
        return self.exchange_bytes + self.secondary_bytes

    @property
    def adds_up(self) -> bool:
        """Whether a parameter gets several gradients before a step: from several passes, micro-batches or ranks."""
        return self.passes > 1 or self.config.vertical or self.limits.slice_count > 0

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

    def swap_bytes(self, weights_in_ram: Collection[int], states_in_ram: Collection[int]) -> int:
        """Return the size of the swap file without gradients."""
        total = 0
        for unit in self.units:
            weights, states = unit.index in weights_in_ram, unit.index in states_in_ram
            total += unit.trained_weight * self.copies(changes=True, in_ram=weights)
            total += (unit.weight - unit.trained_weight) * self.copies(changes=False, in_ram=weights)
            total += unit.state * self.copies(changes=True, in_ram=states)
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


def secondary_bytes(units: Iterable[Unit], near: RankPartition) -> int:
    """Return the bytes of the copies of weight slices that a rank keeps for the gather group G.

    Units that stay in their slots until they are updated need no copy.

    Args:
        units: the complete units.
        near: the slice of each unit of which the rank keeps a copy.
    """
    return sum(near.of(unit).local.weight_bytes for unit in units if not unit.stays)


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
