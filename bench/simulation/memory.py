"""Memory and extents of no content: what the rooms lease, view and name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from infinity.io.engine import Transfer
from infinity.io.store import Extent
from infinity.plan.layout import StateLayout, UnitLayout
from infinity.state.unit import Unit
from infinity.tiers.home import GroupStates, Home, UnitHomes, WeightsHome
from simulation.clock import Future
from simulation.disk import Disk

FILE = "the swap file"


@dataclass(frozen=True)
class Memory:
    """A piece of memory. Args: where: host or device."""

    where: str
    nbytes: int


@dataclass(frozen=True)
class Stream:
    """As _native.StateStream."""

    memory: Memory | None = None
    file: str | None = None
    offset: int = 0
    write_offset: int = 0
    source: Memory | None = None

    @property
    def read_from_file(self) -> bool:
        return self.source is None and self.memory is None

    @property
    def on_device(self) -> bool:
        """Its current values are in a GPU's slot."""
        place = self.source or self.memory
        return place is not None and place.where == "device"


class Lease:
    """As io.arena.Lease."""

    def __init__(self, space: Space | None, nbytes: int, where: str = "host") -> None:
        self._space = space
        self.nbytes = nbytes
        self._where = where

    def view(self, start: int = 0, nbytes: int | None = None) -> Any:
        return Memory(self._where, self.nbytes - start if nbytes is None else nbytes)

    def tensor(self) -> torch.Tensor:
        """One of no bytes, in a storage of its own: the rooms tell slots apart by their storages."""
        return torch.empty(0, dtype=torch.uint8)

    def release(self) -> None:
        if self._space is not None:
            self._space.free_bytes += self.nbytes
            self._space = None


class Space:
    """As io.arena.Space and PinnedArena: bytes are counted, and never in pieces too small."""

    def __init__(self, nbytes: int) -> None:
        self.free_bytes = nbytes

    def try_lease(self, nbytes: int, *, from_top: bool = False) -> Lease | None:
        if nbytes > self.free_bytes:
            return None
        self.free_bytes -= nbytes
        return Lease(self, nbytes)


class Store:
    """As io.store.SwapStore, of weights that are fetched."""

    file = FILE

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def read(self, extent: Extent, into: Any, *, copy: int | None = None, after: Transfer | None = None) -> Transfer:
        first: Any = () if after is None else (after.future,)
        future: Any = self._disk.read("weights", extent.nbytes, first)
        return Transfer(future, extent.unit, extent.state, 0)

    def is_scratch(self, path: str, offset: int) -> bool:
        return False


def homes_of(layout: UnitLayout, weights_ram: Space) -> UnitHomes:
    """As Resources opens them."""
    unit = layout.unit
    lease: Any = weights_ram.try_lease(layout.weight_lease_bytes) if layout.weight_lease_bytes else None

    def home(state: str, index: int, place: StateLayout | None) -> Home | None:
        if place is None:
            return None
        own: Any = Lease(None, place.lease_bytes) if place.lease_bytes else None
        return Home(own, 0, place.nbytes, extent_of(unit, index, state, place))

    groups = tuple(
        Home(lease, each.group.weight_offset, each.weight.nbytes, extent_of(unit, index, "weight", each.weight))
        for index, each in enumerate(layout.groups)
    )
    states = {
        index: GroupStates(
            master=each.master,
            moments=each.group.moments,
            residual=home("residual", index, each.states.get("residual")),
            exp_avg=home("exp_avg", index, each.states.get("exp_avg")),
            exp_avg_sq=home("exp_avg_sq", index, each.states.get("exp_avg_sq")),
            gradient=None,
            spilled=extent_of(unit, index, "grad", layout.gradients[index]),
        )
        for index, each in enumerate(layout.groups)
        if each.states
    }
    return UnitHomes(WeightsHome(lease, groups, unit.weight_bytes), states)


def extent_of(unit: Unit, group: int, state: str, place: StateLayout) -> Extent | None:
    return Extent(unit.name, group, state, place.offsets, place.nbytes) if place.offsets else None


def spare_copy(extent: Extent) -> int | None:
    return next((copy for copy in range(len(extent.offsets)) if copy != extent.copy), None)


class Views:
    """As units.parameters.ParameterViews, of parameters that nobody reads."""

    open = False

    def show(self, slot: Any) -> None:
        return

    def hide(self) -> None:
        return

    def open_up(self) -> None:
        return

    def require_untouched(self) -> None:
        return

    def saved_by_autograd(self) -> bool:
        return False


class Pool:
    """Pieces of equal memory, handed out in the order in which they were asked for."""

    def __init__(self, pieces: int) -> None:
        self._free = pieces
        self._waiting: list[Future] = []

    def take(self, future: Future) -> Future:
        """`future` is complete once a piece is there."""
        if self._free:
            self._free -= 1
            future.complete()
        else:
            self._waiting.append(future)
        return future

    def give_back(self) -> None:
        if self._waiting:
            self._waiting.pop(0).complete()
        else:
            self._free += 1
