"""Homes of states: the places where states are kept between uses, in RAM, on the device or in the store."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from infinity import _native
from infinity.io.arena import Lease
from infinity.io.engine import BackgroundWork, Transfer
from infinity.io.store import Extent
from infinity.state.moments import Moment
from infinity.state.unit import FlatParameterGroup, Unit
from infinity.tiers.resident import ResidentMemory

if TYPE_CHECKING:
    from infinity.tiers.resources import ModelResources
    from infinity.tiers.state_writer import StateWrite


@dataclass(eq=False)
class StateHome:
    """Home of one state of a group: in RAM or in the store. A state on the device has a ResidentHome.

    Attributes:
        lease: memory of a state in RAM; None for any other state.
        start: offset of the state in the lease, in bytes.
        nbytes: size of the state in bytes.
        extent: place of the state in the store. A state in memory has an extent only when generations are kept.
        dirty: whether the bytes in memory are newer than the bytes in the store.
        beside: offset of the state in memory of an update, if it is another one than in `lease`: a rank's slices are
            apart from each other in the weights that all ranks share.
    """

    lease: Lease | None
    start: int
    nbytes: int
    extent: Extent | None
    dirty: bool = False
    beside: int | None = None

    @property
    def in_memory(self) -> bool:
        """Whether the state rests in RAM or on the device."""
        return self.lease is not None

    def view(self) -> memoryview:
        """Return the bytes in RAM."""
        if self.lease is None:
            raise AssertionError("a state that is not in RAM has no view")
        return self.lease.view(self.start, self.nbytes)

    def view_in(self, lease: Lease) -> memoryview:
        """Return the bytes of the state in its own lease, or in memory of an update."""
        begin = self.start if self.beside is None or lease is self.lease else self.beside
        return lease.view(begin, self.nbytes)

    def on_device(self) -> ResidentMemory:
        """Return the memory of a state on the device."""
        raise AssertionError("a state that is not on the device has no memory there")

    def read(self, begin: int, nbytes: int) -> torch.Tensor:
        """Return a copy in RAM of bytes [begin, begin + nbytes) of a state in memory, uint8."""
        return torch.frombuffer(self.view(), dtype=torch.uint8)[begin : begin + nbytes].clone()

    def write(self, begin: int, values: torch.Tensor) -> None:
        """Write uint8 values in RAM to the bytes of a state in memory, from `begin` on."""
        torch.frombuffer(self.view(), dtype=torch.uint8)[begin : begin + values.numel()].copy_(values)

    def save(
        self, resources: ModelResources, copy_index: int, after: _native.IOFuture | None = None
    ) -> StateWrite | Transfer:
        """Start to write a state in memory to a copy in the store.

        Args:
            resources: resources of the model.
            copy_index: index of the copy.
            after: request after which the state in RAM is complete; None: it is complete.
        """
        store = resources.require_store()
        return store.write(self.stored(), self.view(), io_class="states", copy_index=copy_index, after=after)

    def load(self, resources: ModelResources) -> Sequence[BackgroundWork]:
        """Start to read a state in memory from the store. Return the reads that have not ended."""
        return [resources.require_store().read(self.stored(), self.view(), io_class="states")]

    def stored(self) -> Extent:
        """Return the place of the state in the store, which the state must have."""
        if self.extent is None:
            raise AssertionError("a state without a place in the store")
        return self.extent

    def mark_changed(self) -> None:
        """Mark the bytes in memory as newer than the bytes in the store."""
        self.dirty = True

    def mark_read(self) -> None:
        """Mark the bytes in memory as equal to the bytes in the store."""
        self.dirty = False

    def mark_written(self, copy: int) -> None:
        """Make `copy` the current copy of the extent, after all new bytes were written to this copy."""
        self.stored().turn_to(copy)
        self.dirty = False

    def give_back(self) -> None:
        """Let go of device memory. Call this when nothing uses the memory any more."""

    def move(self, lease: Lease) -> Lease:
        """Move the home to other memory, which already contains the state. Return the old lease."""
        if self.lease is None:
            raise AssertionError("a state that lives in the store has no memory")
        before, self.lease = self.lease, lease
        return before


@dataclass(eq=False, kw_only=True)
class ResidentHome(StateHome):
    """Home of one state of a group on the device.

    Attributes:
        memory: memory of the state.
    """

    memory: ResidentMemory

    @property
    def in_memory(self) -> bool:
        return True

    def on_device(self) -> ResidentMemory:
        return self.memory

    def read(self, begin: int, nbytes: int) -> torch.Tensor:
        return self.memory.read(begin, nbytes)

    def write(self, begin: int, values: torch.Tensor) -> None:
        self.memory.write(begin, values)

    def save(
        self, resources: ModelResources, copy_index: int, after: _native.IOFuture | None = None
    ) -> StateWrite | Transfer:
        return resources.require_state_writer().write(self, copy_index)

    def load(self, resources: ModelResources) -> Sequence[BackgroundWork]:
        resources.require_state_writer().read(self)
        return []

    def give_back(self) -> None:
        self.memory.give_back()


@dataclass(eq=False)
class WeightsHome:
    """Homes of the weights of a unit, group by group.

    Invariant: either one lease of RAM has all groups, or one part of the device's memory, or each group has an extent
    of the store.

    Attributes:
        groups: home of each group.
        nbytes: bytes of all groups, which are concatenated.
        unit: unit of the weights; None for weights that have no unit and are stored in the layout of a slot.
        resident: memory of the weights of all groups on the device; None if they do not rest on the device.
        shared: whether the groups are this rank's slices of weights in RAM that all ranks share
            (sharded/shared_homes.py). Such a home never moves.
    """

    groups: tuple[StateHome, ...]
    nbytes: int
    unit: Unit | None = None
    resident: ResidentMemory | None = None
    shared: bool = False

    @property
    def lease(self) -> Lease | None:
        """RAM of all groups; None if the groups are not kept in RAM."""
        return self.groups[0].lease if self.groups else None

    @property
    def slot_bytes(self) -> int:
        """Size of the slot into which the weights are fetched."""
        return self.nbytes if self.unit is None else self.unit.weight_bytes

    @property
    def name(self) -> str:
        return "" if self.unit is None else self.unit.name

    @property
    def encoded_bytes(self) -> int:
        """Bytes of the encoded groups. The encoded groups are the last groups of the home."""
        return 0 if self.unit is None else self.unit.encoded_bytes

    @property
    def trained_bytes(self) -> int:
        """Bytes that the optimizer changes. The trained groups are the first groups of a slot."""
        return self.slot_bytes if self.unit is None else self.unit.trained_bytes

    def plain(self) -> Iterator[tuple[int, StateHome]]:
        """Yield the groups that are not encoded, as (group index, home)."""
        for index, home in enumerate(self.groups):
            if self.unit is None or self.unit.groups[index].codec is None:
                yield index, home

    def encoded(self) -> Iterator[tuple[FlatParameterGroup, StateHome]]:
        """Yield the groups that have a codec, as (group, home)."""
        if self.unit is not None:
            for group, home in zip(self.unit.groups, self.groups, strict=True):
                if group.codec is not None:
                    yield group, home

    def encoded_groups(self) -> list[FlatParameterGroup]:
        """Return the groups that have a codec."""
        return [group for group, _ in self.encoded()]

    def move(self, lease: Lease) -> Lease:
        """Move the homes of all groups to other memory, which already contains the weights. Return the old lease."""
        before = self.lease
        if before is None:
            raise AssertionError("weights in the store have no other memory")
        for home in self.groups:
            home.move(lease)
        return before


@dataclass(frozen=True)
class GroupStateHomes:
    """Homes of the optimizer states of a trainable group, and memory for its gradients.

    Attributes:
        master: format of the master weights.
        moments: format of the moments.
        residual: home of the residual; None without a residual.
        exp_avg: home of the first moment; None without a first moment.
        exp_avg_sq: home of the second moment; None without a second moment.
        gradient: host memory in which gradients are kept until the update; None if there is no such memory.
        spilled: place of the gradients in the store; None if there is no such place. At least one of `gradient` and
            `spilled` is set, or `resident`.
        resident: device memory in which gradients are kept until the update; None if the unit is not resident.
    """

    master: _native.MasterName
    moments: _native.MomentsName
    residual: StateHome | None
    exp_avg: StateHome | None
    exp_avg_sq: StateHome | None
    gradient: Lease | None
    spilled: Extent | None
    resident: ResidentMemory | None = None

    def updated(self, moments: Collection[str] | None) -> dict[str, StateHome]:
        """Return the homes of the states that an update changes, by name.

        Args:
            moments: names of the moments that the optimizer uses; None: all.
        """
        named = {"residual": self.residual, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        uses = named if moments is None else {"residual", *moments}
        return {name: home for name, home in named.items() if home is not None and name in uses}

    def homes(self) -> list[StateHome]:
        return list(self.updated(None).values())

    def moment(self, name: Moment) -> StateHome | None:
        return self.exp_avg if name == "exp_avg" else self.exp_avg_sq


@dataclass(frozen=True)
class UnitHomes:
    """Homes of all states of one unit.

    Attributes:
        weights: homes of the weights.
        states: optimizer states of the trainable groups, by group index.
        flags: device memory in which updates on the device report whether all new values are finite, one byte for each
            group; None if the unit is not updated there.
    """

    weights: WeightsHome
    states: Mapping[int, GroupStateHomes]
    flags: ResidentMemory | None = None

    @property
    def are_updated_on_device(self) -> bool:
        """Whether the optimizer states rest on the device, where the unit is updated."""
        return self.flags is not None

    def give_back(self) -> None:
        """Let go of memory on the device. Call this when nothing uses the memory any more."""
        for home in self:
            home.give_back()
        of_gradients = [states.resident for states in self.states.values()]
        for part in (self.weights.resident, self.flags, *of_gradients):
            if part is not None:
                part.give_back()

    def __iter__(self) -> Iterator[StateHome]:
        yield from (home for home in self.weights.groups if home.nbytes)
        for states in self.states.values():
            yield from states.homes()

    def updated(self, group: int, moments: Collection[str] | None) -> dict[str, StateHome]:
        """Return the homes of the weights and states that an update of a group changes, by the name of the state.

        Args:
            group: index of the group.
            moments: names of the moments that the optimizer uses; None: all.
        """
        return {"weight": self.weights.groups[group]} | self.states[group].updated(moments)

    def all_states(self) -> list[StateHome]:
        """Return the homes of the optimizer states."""
        return [home for states in self.states.values() for home in states.homes()]

    def states_in_store(self) -> list[StateHome]:
        """Return the homes of the optimizer states if all states are in the store; otherwise an empty list."""
        homes = self.all_states()
        return [] if any(home.in_memory for home in homes) else homes
