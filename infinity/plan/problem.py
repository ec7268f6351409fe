"""What the planner is given: the config, the limits, and the bytes that each unit's states take, whatever tier they
are in.

Every size in a plan comes from `GroupBytes`, and every number of copies in the swap file from `Problem.copies`: the
search for a placement and the layout use the same two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from infinity.config import SwapConfig
from infinity.plan.disk import Disks
from infinity.sizes import PAGE_BYTES
from infinity.state.dtypes import master_format, residual_itemsize
from infinity.state.moments import Moment
from infinity.state.shard import Cut
from infinity.state.unit import Group, Unit

_CHECKSUM_BYTES = 4  # of RAM for each page of the swap file


@dataclass(frozen=True)
class Limits:
    """The two budgets.

    Attributes:
        device: bytes for weights, activations and gradients in flight, on the device.
        host: bytes of RAM for everything that is kept or staged there.
        in_place: the device has no memory of its own: both budgets are RAM.
        shares: over how many ranks every unit is cut, whose weights are put together in a slot to be used; 0 where
            none is cut.
        ranks: that have the machine's budgets together; these are one rank's share.
    """

    device: int
    host: int
    in_place: bool
    shares: int = 0
    ranks: int = 1

    @property
    def ram(self) -> int:
        """Bytes of RAM of both."""
        return self.host + self.device * self.in_place

    @property
    def for_each(self) -> str:
        """Whose the budgets are, in messages."""
        return f" for each of the {self.ranks} ranks on this machine" if self.ranks > 1 else ""

    @property
    def used_at_home(self) -> bool:
        """Weights that rest in RAM are used where they are."""
        return self.in_place and not self.shares


@dataclass(frozen=True)
class GroupBytes:
    """Bytes of one group.

    Attributes:
        states: of each state of the optimizer that the group has, by name; empty where the group is frozen.
        gradient_native, gradient_fp32: of the gradients, as autograd gives them and while they add up; 0 where the
            group is frozen.
    """

    group: Group
    states: Mapping[str, int]
    gradient_native: int
    gradient_fp32: int

    @property
    def weight(self) -> int:
        """At home."""
        return self.group.home_bytes


@dataclass(frozen=True)
class Peers:
    """What a plan must know of the other ranks.

    Attributes:
        cut: which slice of every unit is this rank's.
        on_machine: ranks on this machine, which have its RAM and its cores together.
        together: weights are gathered and gradients exchanged, be it by one rank alone.
        memory: bytes of the device and of RAM that each rank may take, as all ranks agreed; None: as the config says,
            or as is available here.
        near: the slice of every unit that this rank keeps a copy of, for the ranks of G; None where G is all ranks.
    """

    cut: Cut
    on_machine: int
    together: bool = True
    memory: tuple[int, int] | None = None
    near: Cut | None = None

    @property
    def shares(self) -> int:
        """As Limits.shares."""
        return self.cut.count if self.together else 0

    @property
    def facts(self) -> dict[str, int]:
        """What a run that resumes states of this rank must agree on."""
        cut = self.cut
        return {"rank": cut.index, "ranks": cut.count, "slice_numel": cut.numel} if self.together else {}


ALONE = Peers(Cut(1, 0), 1, together=False)


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of one unit; those of its groups together.

    Attributes:
        unit: what this rank keeps of it: all, or its slice.
        whole: the unit, as a slot holds it.
    """

    unit: Unit
    whole: Unit
    groups: tuple[GroupBytes, ...]

    @property
    def index(self) -> int:
        return self.unit.index

    @property
    def weight(self) -> int:
        """At home."""
        return self.unit.home_bytes

    @property
    def encoded(self) -> int:
        """Of the weights at home, those that are decoded into a slot."""
        return self.unit.encoded_bytes

    @cached_property
    def trained_weight(self) -> int:
        """Of the weights that the optimizer changes."""
        return sum(group.weight for group in self.groups if group.group.trainable)

    @cached_property
    def state(self) -> int:
        """Of the optimizer's states: residual and moments. 0 where nothing of the unit is trained."""
        return sum(sum(group.states.values()) for group in self.groups)

    @cached_property
    def gradient_native(self) -> int:
        return sum(group.gradient_native for group in self.groups)

    @cached_property
    def gradient_fp32(self) -> int:
        return sum(group.gradient_fp32 for group in self.groups)


@dataclass(frozen=True)
class Problem:
    """What is to be placed, and within which limits.

    Attributes:
        units: in the order of their indices.
        stored: the moments that the optimizer keeps.
        told: backward passes before a step, as the caller said; None: not known.
        commit_every: steps between durable generations; 0: none. Where the config leaves it open, this is what is
            being tried.
        secondary_bytes: host memory for copies of weights that this rank keeps for the ranks of G.
    """

    config: SwapConfig
    limits: Limits
    disks: Disks
    units: tuple[UnitBytes, ...]
    stored: tuple[Moment, ...]
    told: int | None
    commit_every: int
    secondary_bytes: int = 0

    @property
    def passes(self) -> int:
        """Backward passes before a step that are counted."""
        return self.told or 1

    @cached_property
    def weight(self) -> int:
        return sum(unit.weight for unit in self.units)

    @cached_property
    def slots(self) -> int:
        """Bytes of all weights as slots have them."""
        return sum(unit.whole.weight_bytes for unit in self.units)

    @cached_property
    def decoded(self) -> frozenset[int]:
        """The units of which something is decoded each time it is fetched, by index."""
        return frozenset(unit.index for unit in self.units if unit.encoded)

    @cached_property
    def decoding_bytes(self) -> int:
        """Memory for encoded weights on their way to slots: those of the two largest units."""
        return sum(sorted(unit.encoded for unit in self.units)[-2:])

    @cached_property
    def state(self) -> int:
        return sum(unit.state for unit in self.units)

    @cached_property
    def every(self) -> frozenset[int]:
        """All units, by index."""
        return frozenset(unit.index for unit in self.units)

    @cached_property
    def trained(self) -> frozenset[int]:
        """The units that have optimizer states."""
        return frozenset(unit.index for unit in self.units if unit.state)

    @property
    def largest(self) -> Unit:
        return max(self.units, key=lambda unit: unit.weight).unit

    @cached_property
    def rings(self) -> tuple[int, int, int]:
        """Device memory for the gradients of the largest unit, of the two largest, and, where those of micro-batches
        come one right after the other, of these in fp32, so that they add up there; 0 where they need not move."""
        if self.limits.in_place:
            return 0, 0, 0
        sizes = sorted(unit.whole.gradient_bytes for unit in self.units)
        wide = sorted(sum(group.state_bytes(4) for group in unit.whole.trainable_groups) for unit in self.units)
        two = sum(sizes[-2:])
        return sizes[-1], two, sum(wide[-2:]) if self.config.vertical else two

    @cached_property
    def exchange_bytes(self) -> int:
        """Host memory for the gradients of the two largest units on their way to the ranks that own them, as they are
        sent and as they come from all ranks, and of those that stay, which are sent last."""
        if not self.limits.shares:
            return 0
        staying = sum(unit.whole.gradient_bytes for unit in self.units if unit.whole.stays)
        # What comes is this rank's slice from each rank; slices are rounded up.
        boxes = [unit.whole.gradient_bytes + self.limits.shares * unit.unit.gradient_bytes for unit in self.units]
        return sum(sorted(boxes)[-2:]) + staying

    @property
    def ranks_bytes(self) -> int:
        """Host memory that there is because of other ranks."""
        return self.exchange_bytes + self.secondary_bytes

    @property
    def adds_up(self) -> bool:
        """Whether a parameter has several gradients before a step: of several passes, of several micro-batches in one,
        or of several ranks."""
        return self.passes > 1 or self.config.vertical or self.limits.shares > 0

    def weight_of(self, indices: Collection[int]) -> int:
        return sum(unit.weight for unit in self.units if unit.index in indices)

    def state_of(self, indices: Collection[int]) -> int:
        return sum(unit.state for unit in self.units if unit.index in indices)

    def copies(self, *, changes: bool, in_ram: bool) -> int:
        """How many copies of a state the swap file has room for: one, or none of what rests in RAM. Where generations
        are kept it has one of every state, and of what changes one more than generations stay and can be pinned."""
        if not self.commit_every:
            return 0 if in_ram else 1
        return self.config.keep + self.config.pins + 1 if changes else 1

    def swap_bytes(self, weights_in_ram: Collection[int], states_in_ram: Collection[int]) -> int:
        """Size of the swap file without gradients."""
        total = 0
        for unit in self.units:
            weights, states = unit.index in weights_in_ram, unit.index in states_in_ram
            total += unit.trained_weight * self.copies(changes=True, in_ram=weights)
            total += (unit.weight - unit.trained_weight) * self.copies(changes=False, in_ram=weights)
            total += unit.state * self.copies(changes=True, in_ram=states)
        return total

    def checksum_bytes(self, swap_bytes: int) -> int:
        """RAM for the checksums of a swap file."""
        return swap_bytes // PAGE_BYTES * _CHECKSUM_BYTES if self.config.nvme.checksums else 0

    def cost(self, nbytes: int) -> int:
        """RAM that it takes to have a state of `nbytes` rest there. A state that has no copy in the swap file any more
        needs no checksums."""
        return nbytes if self.commit_every else nbytes - self.checksum_bytes(nbytes)


def count(group: Group, config: SwapConfig, stored: Sequence[Moment]) -> GroupBytes:
    """The bytes of one group.

    Args:
        stored: the moments that the optimizer keeps.
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


def secondary_bytes(units: Iterable[Unit], near: Cut) -> int:
    """Of the slices of the weights that a rank keeps a copy of for the ranks of G. Units that stay in their slots until
    they are updated need none.

    Args:
        units: whole.
    """
    return sum(near.of(unit).local.weight_bytes for unit in units if not unit.stays)


def as_far_as(costs: Iterable[tuple[int, int]], room: int) -> frozenset[int]:
    """Those (index, bytes) that fit `room` together: the first first, and what does not fit is passed over."""
    chosen = set()
    for index, nbytes in costs:
        if nbytes <= room:
            chosen.add(index)
            room -= nbytes
    return frozenset(chosen)
