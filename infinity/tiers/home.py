"""Where a state rests between uses: RAM or the store."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from infinity import _native
from infinity.io.arena import Lease
from infinity.io.store import Extent
from infinity.state.moments import Moment
from infinity.state.unit import Group, Unit


@dataclass(eq=False)
class Home:
    """Where one state of a group rests: RAM, or the store.

    Attributes:
        lease, start, nbytes: bytes [start, start + nbytes) of a lease, for a state that rests in RAM.
        extent: its place in the store; a state in RAM has one only where generations are kept.
        dirty: the bytes in RAM are newer than those in the store.
    """

    lease: Lease | None
    start: int
    nbytes: int
    extent: Extent | None
    dirty: bool = False

    @property
    def in_memory(self) -> bool:
        return self.lease is not None

    def view(self) -> memoryview:
        """The bytes in RAM."""
        if self.lease is None:
            raise AssertionError("a state that lives in the store has no memory")
        return self.lease.view(self.start, self.nbytes)

    def stored(self) -> Extent:
        """The place in the store."""
        if self.extent is None:
            raise AssertionError("a state without a place in the store")
        return self.extent

    def changed(self) -> None:
        """The bytes in RAM are new."""
        self.dirty = True

    def read(self) -> None:
        """The bytes in RAM are those of the store."""
        self.dirty = False

    def written(self, copy: int) -> None:
        """A copy of the extent has all new bytes: this copy counts from now on."""
        self.stored().turn_to(copy)
        self.dirty = False

    def move(self, lease: Lease) -> Lease:
        """The state rests in other memory from now on. Returns the lease of before."""
        if self.lease is None:
            raise AssertionError("a state that lives in the store has no memory")
        before, self.lease = self.lease, lease
        return before


@dataclass(eq=False)
class WeightsHome:
    """Where the weights of a unit rest, group by group.

    Invariant: all groups rest in one lease, or each in an extent.

    Attributes:
        nbytes: of all groups, which lie one after the other.
        unit: whose weights they are; None: of nobody, and as in a slot.
    """

    groups: tuple[Home, ...]
    nbytes: int
    unit: Unit | None = None

    @property
    def lease(self) -> Lease | None:
        """The memory of all groups; None where they rest in the store."""
        return self.groups[0].lease if self.groups else None

    @property
    def slot_bytes(self) -> int:
        """Of the slot that the weights are fetched to."""
        return self.nbytes if self.unit is None else self.unit.weight_bytes

    @property
    def name(self) -> str:
        return "" if self.unit is None else self.unit.name

    @property
    def encoded_bytes(self) -> int:
        """Of `nbytes`, the last ones: what is decoded into a slot."""
        return 0 if self.unit is None else self.unit.encoded_bytes

    @property
    def trained_bytes(self) -> int:
        """Of a slot, the first ones: what the optimizer changes."""
        return self.slot_bytes if self.unit is None else self.unit.trained_bytes

    def plain(self) -> Iterator[tuple[int, Home]]:
        """The homes, by the index of their group, of what lies in a slot as it does at home."""
        for index, home in enumerate(self.groups):
            if self.unit is None or self.unit.groups[index].codec is None:
                yield index, home

    def encoded(self) -> Iterator[tuple[Group, Home]]:
        """The groups that have a codec, and their homes."""
        if self.unit is not None:
            for group, home in zip(self.unit.groups, self.groups, strict=True):
                if group.codec is not None:
                    yield group, home

    def move(self, lease: Lease) -> Lease:
        """The weights rest in other memory from now on. Returns the lease of before."""
        before = self.lease
        if before is None:
            raise AssertionError("weights in the store have no other memory")
        for home in self.groups:
            home.move(lease)
        return before


@dataclass(frozen=True)
class GroupStates:
    """Where the optimizer states of a trainable group rest, the host memory its gradients wait in, and their place in
    the store: at least one of the two."""

    master: _native.MasterName
    moments: _native.MomentsName
    residual: Home | None
    exp_avg: Home | None
    exp_avg_sq: Home | None
    gradient: Lease | None
    spilled: Extent | None

    def updated(self, moments: Collection[str] | None) -> dict[str, Home]:
        """The homes of the states that an update changes, by name.

        Args:
            moments: that the optimizer uses; None: all.
        """
        named = {"residual": self.residual, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        uses = named if moments is None else {"residual", *moments}
        return {name: home for name, home in named.items() if home is not None and name in uses}

    def homes(self) -> list[Home]:
        return list(self.updated(None).values())

    def moment(self, name: Moment) -> Home | None:
        return self.exp_avg if name == "exp_avg" else self.exp_avg_sq


@dataclass(frozen=True)
class UnitHomes:
    """Where everything of one unit rests.

    Attributes:
        states: of the trainable groups, by index.
    """

    weights: WeightsHome
    states: Mapping[int, GroupStates]

    def __iter__(self) -> Iterator[Home]:
        yield from (home for home in self.weights.groups if home.nbytes)
        for states in self.states.values():
            yield from states.homes()

    def updated(self, group: int, moments: Collection[str] | None) -> dict[str, Home]:
        """The homes of what an update of a group changes, by the name of the state. Args: as GroupStates.updated."""
        return {"weight": self.weights.groups[group]} | self.states[group].updated(moments)

    def all_states(self) -> list[Home]:
        """The homes of the optimizer states."""
        return [home for states in self.states.values() for home in states.homes()]

    def states_in_store(self) -> list[Home]:
        """The homes of the optimizer states; none where any of them is in RAM."""
        homes = self.all_states()
        return [] if any(home.in_memory for home in homes) else homes
