"""Slots on a device whose weights are gathered from the slices of all ranks for each use.

[Note: the two halves of the window]
A rank brings its slice of a unit to its window (shared_window.py): it reads the slice from the store, or copies it from
RAM. All ranks then copy the slice to the slots on their devices (mailboxes.py). The window has room for the slices of
two fetches, which take turns. The place of a slice is therefore known when its fetch starts, although the place may
still have the slice of the fetch before the last. In this case the slice is brought to its place when that earlier
fetch has ended. The thread of the collectives sees the end, and waits for the slice only after that.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

from infinity.base.accelerator import Event, Stream
from infinity.errors import PlanError
from infinity.io.arena import Lease
from infinity.io.engine import Transfer
from infinity.ranks.collective_queue import OperationFuture
from infinity.ranks.operations import AllGather, SharedPlace
from infinity.sharded.gather_memory import Arrival, FillSlice, GatherFetch, GatherMemory, warn_of_views
from infinity.sharded.mailboxes import Mailboxes
from infinity.sizes import format_bytes
from infinity.state.shard import Shard
from infinity.state.unit import Unit
from infinity.tiers.device import DeviceTier
from infinity.tiers.home import StateHome, WeightsHome
from infinity.tiers.resources import ModelResources
from infinity.tiers.slab import Slab, SlabLease
from infinity.tiers.slots import SlabSlotPool, Slot

_POLL_S = 0.25


class DeviceMemories:
    """Memory for slots on a device (GatherMemories).

    Args:
        resources: resources of the model. The window is ModelResources.transfers.
        device: the device.
        units: the complete units.
        mailboxes: memory that all ranks share.
    """

    def __init__(
        self, resources: ModelResources, device: DeviceTier, units: Sequence[Unit], mailboxes: Mailboxes
    ) -> None:
        self._resources = resources
        self._device = device
        self._homes = {unit.index: _complete(unit) for unit in units}
        self._slots = SlabSlotPool(resources, device, list(self._homes.values()))
        self._mailboxes = mailboxes
        self._stream = device.accelerator.stream()
        self._halves: list[_Half] = []
        self._turn = 0
        self._told = False

    def of(self, shard: Shard, *, near: bool) -> GatherMemory:
        if near:
            raise AssertionError("ranks with devices keep no copies of slices")
        home = self._homes[shard.full.index]
        slab, slot = self._slots.lease(home)
        if slot is None:
            slab, slot = self._more(shard.full)
        encoded = self._device.decoding.try_lease(home.encoded_bytes) if home.encoded_bytes else None
        if home.encoded_bytes and encoded is None:
            raise AssertionError("no memory for encoded weights, although `waits` has looked for it")
        self._turn = 1 - self._turn
        copies = DeviceCopies(self._device, self._stream, [] if encoded is None else encoded.after)
        copies.after += slot.after
        return _DeviceMemory(
            shard, home, self._half(), self._mailboxes, _Target(self._slots, slab, slot, encoded, copies)
        )

    def _half(self) -> _Half:
        if not self._halves:
            space = self._resources.transfers
            nbytes = space.nbytes // 2  # 0 if this rank has no slice of any unit
            leases = [space.lease(nbytes, "slices on their way to devices") if nbytes else None for _ in range(2)]
            self._halves = [_Half(lease) for lease in leases]
        return self._halves[self._turn]

    def _more(self, unit: Unit) -> tuple[Slab, SlabLease]:
        """Return memory beside the planned memory.

        Raises:
            PlanError: the device has no memory.
        """
        if not self._told:
            self._told = True
            warn_of_views(unit)
        accelerator = self._device.accelerator
        try:
            memory = accelerator.slab(unit.weight_bytes)
        except torch.OutOfMemoryError as error:
            raise PlanError(
                f"{accelerator.device} has no memory for unit '{unit.name}' ({format_bytes(unit.weight_bytes)}): its "
                "free memory is in pieces, or views of weights keep theirs. Drop the views, or lower memory.device."
            ) from error
        slab = Slab(accelerator, memory, [accelerator.record(accelerator.current())])
        lease = slab.try_lease(unit.weight_bytes)
        if lease is None:
            raise AssertionError("a slab that is too small for its only lease")
        return slab, lease

    def waits(self, unit: Unit) -> bool:
        """Return whether memory for encoded weights is missing, which a fetch that is finished gives back."""
        return self._slots.waits(self._homes[unit.index])


class DeviceCopies:
    """Copies from the shared memory to a device (PieceCopies).

    Attributes:
        after: events that the copies wait for.
    """

    def __init__(self, device: DeviceTier, stream: Stream, after: Sequence[Event]) -> None:
        self._accelerator = device.accelerator
        self._events = device.weights
        self._stream = stream
        self.after = list(after)
        self._last: Event | None = None

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        self._last = self._accelerator.copy(into, source, on=self._stream, after=self.after)
        self.after.clear()

    def wait(self, check: Callable[[], None]) -> None:
        """See PieceCopies.wait. The copies wait for computations in the slots, which may depend on other ranks."""
        if self._last is not None:
            ended = self._events.future_of(self._last)
            while not ended.wait(_POLL_S):
                check()
            Transfer(ended, "", "weight").result()

    def event(self) -> Event:
        """Return an event that follows all copies."""
        return self._accelerator.record(self._stream) if self._last is None else self._last


class _Target:
    """Memory on the device for one fetch.

    Args:
        pool: pool of the slot.
        slab, slot: memory of the slot.
        encoded: memory for encoded weights; None if the unit has none.
        copies: copies to this memory.
    """

    def __init__(
        self, pool: SlabSlotPool, slab: Slab, slot: SlabLease, encoded: SlabLease | None, copies: DeviceCopies
    ) -> None:
        self._pool = pool
        self._slab = slab
        self._lease = slot
        self._encoded = encoded
        self.copies = copies

    def memory(self, *, encoded: bool) -> torch.Tensor:
        return self._encoded.memory if encoded and self._encoded is not None else self._lease.memory

    def slot(self, home: WeightsHome) -> Slot:
        """Return the slot, once the copies have ended."""
        ready = self.copies.event()
        if self._encoded is not None:
            ready = self._pool.decode(home, self._slab, self._lease, self._encoded, ready)
        return self._pool.slot(home, self._slab, self._lease, ready)


class _Half:
    """One half of the window, and the fetches that use it, the oldest first.

    Attributes:
        lease: memory of the half; None if this rank has no slice of any unit.
    """

    def __init__(self, lease: Lease | None) -> None:
        self.lease = lease
        self._lock = threading.Lock()
        self._users: deque[_DeviceMemory] = deque()

    def enter(self, user: _DeviceMemory) -> None:
        """Let a fetch fill the half, as soon as all earlier fetches have left."""
        with self._lock:
            self._users.append(user)
            is_free = self._users[0] is user
        if is_free:
            try:
                user.fill_now()
            except BaseException:
                with self._lock:
                    self._users.remove(user)
                raise

    def leave(self) -> None:
        """End the use by the oldest fetch."""
        with self._lock:
            self._users.popleft()
            following = self._users[0] if self._users else None
        if following is not None:
            following.fill_now()


class _DeviceMemory:
    """Memory of one fetch to a slot on a device (GatherMemory).

    Args:
        shard: this rank's slice of the unit.
        home: home of the complete unit.
        half: the half of the window for this rank's slice.
        mailboxes: memory that all ranks share.
        target: memory on the device.
    """

    def __init__(self, shard: Shard, home: WeightsHome, half: _Half, mailboxes: Mailboxes, target: _Target) -> None:
        self._shard = shard
        self._home = home
        self._half = half
        self._mailboxes = mailboxes
        self._target = target
        self._fills: dict[int, Callable[[], Callable[[], object]]] = {}
        self._waits: dict[int, Callable[[], object]] = {}
        self._missing = len(shard.full.groups)

    def fill(self, index: int, own: FillSlice) -> list[Callable[[], object]]:
        nbytes = self._shard.local.groups[index].home_bytes
        if not nbytes or self._half.lease is None:
            return []
        view = self._half.lease.view(self._begin(index), nbytes)
        self._fills[index] = lambda: own(index, view)
        return [lambda: self._waits[index]()]

    def begin(self) -> None:
        self._half.enter(self)

    def fill_now(self) -> None:
        """Start to bring the slices of all groups to the window."""
        self._waits.update({index: fill() for index, fill in self._fills.items()})

    def gather(self, index: int) -> AllGather:
        ranges = [self._shard.weight_range(index, rank) for rank in range(self._shard.cut.count)]
        memory = self._target.memory(encoded=self._shard.full.groups[index].codec is not None)
        lease = self._half.lease
        place = 0 if lease is None else self._mailboxes.place(lease, self._begin(index))  # nobody reads an empty slice
        return AllGather(
            memory[ranges[0][0] : ranges[-1][1]],
            [last - first for first, last in ranges],
            shared=SharedPlace(place, self._mailboxes, self._target.copies),
            in_buffer=False,
        )

    def arrived(self, index: int, keep: Arrival | None) -> None:
        self._missing -= 1
        if not self._missing:
            self._half.leave()

    def fetch(self, tickets: Sequence[OperationFuture]) -> GatherFetch:
        return _DeviceFetch(tickets, self._target, self._home)

    def _begin(self, index: int) -> int:
        return sum(group.home_bytes for group in self._shard.local.groups[:index])


class _DeviceFetch(GatherFetch):
    def __init__(self, tickets: Sequence[OperationFuture], target: _Target, home: WeightsHome) -> None:
        super().__init__(tickets)
        self._target = target
        self._home = home

    def _slot(self) -> Slot:
        return self._target.slot(self._home)


def _complete(unit: Unit) -> WeightsHome:
    """Return the home of a complete unit, which is on no rank as a whole. It has sizes and no places."""
    return WeightsHome(
        tuple(StateHome(None, 0, group.home_bytes, None) for group in unit.groups), unit.home_bytes, unit
    )
