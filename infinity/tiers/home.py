"""Where a state rests between uses: RAM or the store."""

from __future__ import annotations

from dataclasses import dataclass

from infinity import _native
from infinity.io.arena import Lease
from infinity.io.store import Extent


@dataclass(eq=False)
class Home:
    """Where one state of a group lives for good: RAM, or the store.

    Attributes:
        lease, start, nbytes: bytes [start, start + nbytes) of a lease, when it lives in RAM.
        extent: its place in the store; for what lives in RAM only where generations are kept.
        dirty: what is in RAM is newer than what is in the extent.
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
        """Its bytes in RAM."""
        if self.lease is None:
            raise AssertionError("a state that lives in the store has no memory")
        return self.lease.view(self.start, self.nbytes)

    def stored(self) -> Extent:
        """Its place in the store."""
        if self.extent is None:
            raise AssertionError("a state without a place in the store")
        return self.extent


@dataclass(frozen=True)
class UnitWeights:
    """The home of a unit's weights, group by group: one lease, or an extent for each group.

    Attributes:
        nbytes: of all groups; they lie one after the other.
    """

    lease: Lease | None
    groups: tuple[Home, ...]
    nbytes: int


@dataclass(frozen=True)
class GroupStates:
    """The homes of a trainable group's optimizer states, the host memory its gradients wait in, and their place in the
    store: at least one of the two."""

    master: _native.MasterName
    moments: _native.MomentsName
    residual: Home | None
    exp_avg: Home | None
    exp_avg_sq: Home | None
    gradient: Lease | None
    spilled: Extent | None

    def homes(self) -> list[Home]:
        return [home for home in (self.residual, self.exp_avg, self.exp_avg_sq) if home is not None]
