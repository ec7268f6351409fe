"""Upload of weights to a device, from pinned RAM or, through a bounce buffer, from NVMe."""

from __future__ import annotations

from collections import deque

from infinity import _native
from infinity.base.accelerator import Accelerator, Event
from infinity.io.arena import ArenaRegion, Lease
from infinity.io.engine import Transfer
from infinity.io.store import SwapStore
from infinity.tiers.destination import StateDestination, Written
from infinity.tiers.home import WeightsHome
from infinity.tiers.slab import SlabLease


class UploadQueue:
    """Uploads on one stream to the device.

    Args:
        accelerator: the device.
        gate: native entry points of the device.
        engine: engine that reads from NVMe.
        arena: space with `bounce_bytes` of free memory. The first upload from NVMe leases this memory until the end of
            the run. Before that, the code that fills the store may use the memory.
        bounce_bytes: size of the bounce buffer.
        piece_bytes: number of bytes that are read and copied at a time.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        gate: _native.DeviceGate,
        engine: _native.IOEngine,
        arena: ArenaRegion,
        bounce_bytes: int,
        piece_bytes: int,
    ) -> None:
        self._accelerator = accelerator
        self._gate = gate
        self._engine = engine
        self._arena = arena
        self._bounce_bytes = bounce_bytes
        self._piece_bytes = piece_bytes
        self._stream = accelerator.stream()
        self._reading: deque[Event] = deque()  # events of the copies that read homes in RAM
        self._native: _native.Uploads | None = None
        self._events: list[Event] = []  # one event per piece of the bounce buffer

    def from_ram(self, into: SlabLease, source: Lease, encoded: SlabLease | None = None) -> Event:
        """Start to copy weights from their home. The home must not change until `synchronize` is called.

        Args:
            into: memory of the slot.
            source: home of the weights.
            encoded: device memory for the encoded groups, which are at the end of the home. All other groups are copied
                to the slot.

        Returns:
            An event that follows the copies.
        """
        home = source.tensor()
        plain = into.nbytes if encoded is None else home.numel() - encoded.nbytes
        pairs = [(into.memory[:plain], home[:plain], into.after)]
        if encoded is not None:
            pairs.append((encoded.memory, home[plain:], encoded.after))
        for target, values, after in pairs:
            if target.numel():
                ready = self._accelerator.copy(target, values, on=self._stream, after=after)
        self._forget_reached()
        self._reading.append(ready)
        return ready

    def from_store(
        self, into: SlabLease, home: WeightsHome, after: Written, store: SwapStore, encoded: SlabLease | None = None
    ) -> tuple[Transfer, Event]:
        """Start to read weights, and to copy each piece to the device once it is read.

        Args:
            into: memory of the slot.
            home: homes of the weights.
            after: destinations of new weights of an update in progress.
            store: store of the weights.
            encoded: device memory for the encoded groups, which are concatenated there.

        Returns:
            A transfer, and an event for which streams may wait after the transfer is done. The transfer raises the
            errors of SwapStore.read. After a failed transfer, no copy into the slot is in flight.
        """
        ready = self._accelerator.event()
        leases = [into] if encoded is None else [into, encoded]
        slot, address = (leases[at].memory.data_ptr() for at in (0, -1))
        newest = (after.get(index, StateDestination(group)) for index, group in home.plain())
        parts = [_part(store, weights, slot + weights.home.start) for weights in newest]
        for _, kept in home.encoded():
            parts.append(_part(store, StateDestination(kept), address))
            address += kept.nbytes
        future = self._open().upload(
            parts,
            stream=self._accelerator.handle(self._stream),
            waits=[self._accelerator.handle(event) for lease in leases for event in lease.after],
            ready=self._accelerator.handle(ready),
        )
        return store.transfer(future, home.groups[0].stored()), ready

    def synchronize(self) -> None:
        """Wait until no copy reads homes in RAM. The caller is about to change these homes."""
        self._forget_reached()
        if self._reading:
            self._accelerator.synchronize(self._reading[-1])
            self._reading.clear()

    def close(self) -> None:
        """Wait until no copy uses host memory or slots."""
        if self._native is not None:
            self._native.close()
        self._accelerator.synchronize(self._accelerator.record(self._stream))
        self._reading.clear()

    def _forget_reached(self) -> None:
        while self._reading and self._accelerator.reached(self._reading[0]):
            self._reading.popleft()

    def _open(self) -> _native.Uploads:
        if self._native is None:
            bounce = self._arena.lease(self._bounce_bytes, "weights on their way to the device")
            self._events = [self._accelerator.event() for _ in range(self._bounce_bytes // self._piece_bytes)]
            events = [self._accelerator.handle(event) for event in self._events]
            self._native = _native.Uploads(self._engine, self._gate, bounce.view(), self._piece_bytes, events)
        return self._native


def _part(store: SwapStore, weights: StateDestination, address: int) -> _native.UploadPart:
    """Return the native description of a group's upload: the place of the newest weights, and the device address to
    which they are copied."""
    file, offset = store.place(weights.home.stored(), weights.copy_index)
    after = None if weights.written is None else weights.written.future
    return _native.UploadPart(file, offset, weights.home.nbytes, address, after=after)
