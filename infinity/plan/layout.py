"""Layout of all states: each state's copies in the swap file, and each state's lease in the arena.

[Note: the order in the swap file]
The swap file contains one unit after the other. The weights of a unit's groups come first. The residual and the moments
of each trained group follow. The copies of a state are adjacent. The space for gradients that spill is behind all
units, so that a run can be resumed with a different share of the gradients in RAM. An existing store is read with the
same order. Therefore a change of the order needs a new version of the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from infinity import _native
from infinity.io.manifest import sum_bytes
from infinity.plan.budgets import Budgets
from infinity.plan.placement import GradientPlacement, StatePlacement, TierSplit
from infinity.plan.plan_input import FLAG_BYTES, PlanInput, UnitBytes
from infinity.state.dtypes import master_format
from infinity.state.unit import FlatParameterGroup, Unit

_EXTENT_RECORD_BYTES = 256
_BODY_BYTES = 1 << 20


@dataclass(frozen=True)
class StateLayout:
    """The place of one state of a group.

    Attributes:
        nbytes: bytes of the state, and of each copy of the state; a multiple of 4 KiB.
        offsets: offsets of the state's copies in the swap file; empty if the state has no extent.
        lease_bytes: bytes of the state's lease in the arena; 0 if the state does not rest in RAM. Gradients may take
            fewer bytes in the arena than in the swap file.
        resident_bytes: bytes of the state's memory on the device; 0 if the state does not rest on the device.
    """

    nbytes: int
    offsets: tuple[int, ...]
    lease_bytes: int
    resident_bytes: int = 0


@dataclass(frozen=True)
class GroupLayout:
    """The places of a group's weights and optimizer states.

    Attributes:
        master: form of the master of the group's weights.
        states: places of the group's optimizer states, by name; empty if the group is frozen.
    """

    group: FlatParameterGroup
    master: _native.MasterName
    weight: StateLayout
    states: Mapping[str, StateLayout]


@dataclass(frozen=True)
class UnitLayout:
    """The places of all states of a unit.

    Attributes:
        local: the part of the unit that this rank keeps.
        full: the complete unit.
        gradients: places of the gradients of each group, in the order of the groups; a frozen group's place has 0
            bytes.
    """

    local: Unit
    full: Unit
    groups: tuple[GroupLayout, ...]
    gradients: tuple[StateLayout, ...]

    @property
    def weight_lease_bytes(self) -> int:
        """Bytes of the one lease in which the weights of all groups rest; 0 if the weights do not rest in RAM."""
        return sum(group.weight.lease_bytes for group in self.groups)

    @cached_property
    def resident_bytes(self) -> int:
        """Bytes of device memory for the states of the unit that are kept there; 0 if there are none."""
        nbytes = sum(state.resident_bytes for state in self.kept())
        return nbytes + FLAG_BYTES if nbytes else 0

    @property
    def is_resident(self) -> bool:
        """Whether all states of the unit are kept on the device."""
        return any(group.weight.resident_bytes for group in self.groups)

    def kept(self) -> list[StateLayout]:
        """Return the places of the unit's states that belong to generations: all but the gradients."""
        return [state for group in self.groups for state in (group.weight, *group.states.values())]


@dataclass(frozen=True)
class SwapBytes:
    """Bytes of the swap file.

    Attributes:
        states: one copy of each state that has an extent.
        further_copies: the other copies of these states, which contain earlier generations or are free for the next
            write.
        scratch: space for the gradients that spill.
    """

    states: int
    further_copies: int
    scratch: int

    @property
    def kept(self) -> int:
        """Bytes of the swap file that a resumed run uses again."""
        return self.states + self.further_copies

    @property
    def nbytes(self) -> int:
        return self.kept + self.scratch


@dataclass(frozen=True)
class ArenaBytes:
    """Bytes of the arena.

    Attributes:
        weights, states, gradients: weights, optimizer states and gradients that rest in RAM.
        shared_weights, shared_exchange, shared_transfers: this rank's part of the memory that all ranks share, which is
            not in the arena: its slices of the weights, its gradients on their way to other ranks, and its slots or
            slices of weights on their way to other ranks.
        shadows: new weights and states of speculative updates.
        landing: the window that gradients land in.
        staging: the update's tiles, including the tiles that are read ahead.
        transfers: weights in transfer. Weights are fetched into this memory, or are read into this memory before they
            are copied to the device or decoded.
        bounce: gradients from the device that are to be added to gradients in host memory.
        copies: weights that were copied from the device for updates to read.
        commits: states that commits copy from the device.
        activations: tensors that a forward keeps for its backward.
        exchange: gradients on their way to the ranks that own them.
        secondary: copies of weights that this rank keeps for the gather group G (sharded/gathered_slots.py).
    """

    weights: int
    shared_weights: int
    shared_exchange: int
    shared_transfers: int
    states: int
    gradients: int
    shadows: int
    landing: int
    staging: int
    transfers: int
    bounce: int
    copies: int
    commits: int
    activations: int
    exchange: int
    secondary: int

    @property
    def homes_and_shadows(self) -> int:
        """Bytes of the one lease for homes and shadows. When an update is applied, its shadow becomes the home of the
        state."""
        return self.weights + self.states + self.shadows

    @property
    def shared(self) -> int:
        """This rank's part of the memory that all ranks share."""
        return self.shared_weights + self.shared_exchange + self.shared_transfers

    @property
    def nbytes(self) -> int:
        """Exact size of the arena, which is the only pinned allocation."""
        resting = self.homes_and_shadows + self.gradients
        moving = self.landing + self.staging + self.transfers + self.bounce + self.copies
        return resting + moving + self.commits + self.activations + self.exchange + self.secondary


@dataclass(frozen=True)
class StorageLayout:
    """Every extent and every lease.

    Attributes:
        units: layouts of all units, in the order of their indices.
        checksum_bytes: RAM for the checksums of the swap file, outside the arena.
        manifest_bytes: bytes on the first path for the manifests of all generations that are kept, and for one more
            manifest. The size of a manifest is estimated without tracked objects.
    """

    units: tuple[UnitLayout, ...]
    swap: SwapBytes
    arena: ArenaBytes
    checksum_bytes: int
    manifest_bytes: int

    @cached_property
    def numel(self) -> int:
        """Number of parameters."""
        return sum(unit.local.numel for unit in self.units)

    @cached_property
    def trainable_numel(self) -> int:
        return _trained_numel(self.units)

    @cached_property
    def resident_numel(self) -> int:
        """Number of trained parameters whose weights, states and gradients rest on the device."""
        return _trained_numel(unit for unit in self.units if unit.is_resident)

    @cached_property
    def updated_on_device_numel(self) -> int:
        """Number of trained parameters that are updated on the device."""
        return _trained_numel(unit for unit in self.units if unit.resident_bytes)

    @cached_property
    def trained_count(self) -> int:
        """Number of units that have optimizer states."""
        return sum(any(group.states for group in unit.groups) for unit in self.units)

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of all weights of the model at home, in any tier."""
        return sum(unit.local.home_bytes for unit in self.units)

    @cached_property
    def encoded_bytes(self) -> int:
        """Bytes of the weights that are encoded at home: a part of weight_bytes."""
        return sum(unit.local.encoded_bytes for unit in self.units)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of all optimizer states of the model, in any tier."""
        return sum(state.nbytes for unit in self.units for group in unit.groups for state in group.states.values())


def _trained_numel(units: Iterable[UnitLayout]) -> int:
    """Return the number of trained parameters of these units."""
    groups = [group for unit in units for group in unit.local.trainable_groups]
    return sum(spec.numel for group in groups for spec in group.specs)


class _ExtentAllocator:
    """Allocator of extents in the swap file, from the start of the file on."""

    def __init__(self) -> None:
        self.nbytes = 0

    def add(self, nbytes: int, copies: int) -> tuple[int, ...]:
        """Allocate the copies of an extent, and return their offsets."""
        offsets = tuple(self.nbytes + index * nbytes for index in range(copies))
        self.nbytes += copies * nbytes
        return offsets


def lay_out(
    inputs: PlanInput, placement: StatePlacement, gradients: GradientPlacement, budgets: Budgets
) -> StorageLayout:
    """Choose the place of every extent and every lease."""
    file = _ExtentAllocator()
    kept = [_lay_out_groups(unit, inputs, placement, file) for unit in inputs.all_units]
    kept_bytes = file.nbytes
    spilled = [_lay_out_gradients(unit, gradients, placement, file) for unit in inputs.all_units]
    units = tuple(
        UnitLayout(unit.local, unit.full, groups, of_gradients)
        for unit, groups, of_gradients in zip(inputs.all_units, kept, spilled, strict=True)
    )
    stored = [state.nbytes for unit in units for state in unit.kept() if state.offsets]
    swap = SwapBytes(sum(stored), kept_bytes - sum(stored), file.nbytes - kept_bytes)
    return StorageLayout(
        units=units,
        swap=swap,
        arena=_lay_out_arena(units, placement, budgets),
        checksum_bytes=inputs.checksum_bytes(swap.nbytes),
        manifest_bytes=_manifest_bytes(stored, placement),
    )


def _lay_out_groups(
    unit: UnitBytes, inputs: PlanInput, placement: StatePlacement, file: _ExtentAllocator
) -> tuple[GroupLayout, ...]:
    def state(nbytes: int, resting: TierSplit, *, changes: bool = True) -> StateLayout:
        if not nbytes:
            return StateLayout(0, (), 0)  # a rank's slice may contain no part of a group
        in_ram, resident = unit.index in resting.in_ram, unit.index in resting.resident
        copies = inputs.copies(changes=changes, in_ram=in_ram or resident)
        if copies and changes and unit.index in placement.updates.spare_units:
            copies += 1
        return StateLayout(nbytes, file.add(nbytes, copies), nbytes * in_ram, nbytes * resident)

    weights = [state(group.weight, placement.weights, changes=group.group.trainable) for group in unit.groups]
    return tuple(
        GroupLayout(
            group=group.group,
            master=master_format(group.group.dtype, placement.form.master),
            weight=weight,
            states={name: state(nbytes, placement.optimizer) for name, nbytes in group.states.items()},
        )
        for group, weight in zip(unit.groups, weights, strict=True)
    )


def _lay_out_gradients(
    unit: UnitBytes, gradients: GradientPlacement, placement: StatePlacement, file: _ExtentAllocator
) -> tuple[StateLayout, ...]:
    layouts = []
    for group in unit.groups:
        if unit.index in placement.gradients.resident:
            nbytes = group.gradient_fp32 if gradients.inputs.resident_adds_up else group.gradient_native
            layouts.append(StateLayout(group.gradient_fp32, (), 0, nbytes))
            continue
        scratch = gradients.scratch_bytes(unit, group)
        offsets = file.add(scratch, 1 if scratch else 0)
        layouts.append(StateLayout(group.gradient_fp32, offsets, gradients.lease_bytes(unit, group)))
    return tuple(layouts)


def _lay_out_arena(units: Sequence[UnitLayout], placement: StatePlacement, budgets: Budgets) -> ArenaBytes:
    limits = budgets.limits
    slots_are_here = limits.in_place and (limits.gathers or placement.weights.tier == "nvme" or budgets.decodes)
    weights = sum(unit.weight_lease_bytes for unit in units)
    shares, at_home = limits.sharing != "nothing", limits.sharing == "weights"
    transfers = (budgets.slot_bytes if slots_are_here else 0) + budgets.upload_bytes
    passed = budgets.slot_bytes if limits.in_place else budgets.upload_bytes
    shared_transfers = passed if limits.sharing == "transfers" else 0
    return ArenaBytes(
        weights=0 if at_home else weights,
        shared_weights=weights if at_home else 0,
        shared_exchange=budgets.exchange_bytes if shares else 0,
        shared_transfers=shared_transfers,
        states=sum(state.lease_bytes for unit in units for state in unit.kept()) - weights,
        gradients=sum(gradient.lease_bytes for unit in units for gradient in unit.gradients),
        shadows=budgets.shadow_bytes,
        landing=budgets.landing_bytes,
        staging=budgets.staging.nbytes + budgets.staging.ahead_bytes,
        transfers=transfers - shared_transfers,
        bounce=budgets.bounce_bytes,
        copies=budgets.copies_bytes,
        commits=budgets.commit_bytes,
        activations=budgets.activation_bytes,
        exchange=0 if shares else budgets.exchange_bytes,
        secondary=budgets.secondary_bytes,
    )


def _manifest_bytes(stored: Sequence[int], placement: StatePlacement) -> int:
    if not placement.commit_every:
        return 0
    sums = sum(sum_bytes(nbytes) for nbytes in stored)
    # A pinned generation has a manifest of its own. A new manifest replaces an old one only once it is durable.
    count = placement.keep + 1 + (placement.pins + 1 if placement.pins else 0)
    return count * (sums + _EXTENT_RECORD_BYTES * len(stored) + _BODY_BYTES)
