"""Weights on their way up: from pinned RAM, or in pieces from NVMe through a landing memory."""

from __future__ import annotations

from collections import deque

from infinity import _native
from infinity.base.accelerator import Accelerator, Event
from infinity.io.arena import Lease, Space
from infinity.io.engine import Transfer
from infinity.io.store import SwapStore
from infinity.tiers.destination import Destination, Written
from infinity.tiers.home import WeightsHome
from infinity.tiers.slab import SlabLease


class UploadQueue:
    """One stream up.

    Args:
        gate: of the accelerator.
        arena: with `landing_bytes` of free space, which the first upload from NVMe takes for good; until then it is for
            whoever fills the store.
        piece_bytes: are read and copied at once.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        gate: _native.DeviceGate,
        engine: _native.IOEngine,
        arena: Space,
        landing_bytes: int,
        piece_bytes: int,
    ) -> None:
        self._accelerator = accelerator
        self._gate = gate
        self._engine = engine
        self._arena = arena
        self._landing_bytes = landing_bytes
        self._piece_bytes = piece_bytes
        self._stream = accelerator.stream()
        self._reading: deque[Event] = deque()  # of the copies that read homes in RAM
        self._native: _native.Uploads | None = None
        self._events: list[Event] = []  # of the pieces

    def from_ram(self, into: SlabLease, source: Lease, encoded: SlabLease | None = None) -> Event:
        """Start copying weights from their home. Nobody may change them until `synchronize`. Returns the event behind
        the copies.

        Args:
            encoded: memory for what of the home is encoded, which is its end; the rest goes to the slot.
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
        """Start reading weights, and copying what is read.

        Args:
            after: where new ones go that are on their way.
            encoded: memory for those that are encoded, one behind the other.

        Returns:
            A transfer, and an event that streams may wait for once the transfer is done. The transfer raises as
            SwapStore.read; when it fails no copy into the slot is under way.
        """
        ready = self._accelerator.event()
        leases = [into] if encoded is None else [into, encoded]
        slot, address = (leases[at].memory.data_ptr() for at in (0, -1))
        newest = (after.get(index, Destination(group)) for index, group in home.plain())
        parts = [_part(store, weights, slot + weights.home.start) for weights in newest]
        for _, kept in home.encoded():
            parts.append(_part(store, Destination(kept), address))
            address += kept.nbytes
        future = self._open().upload(
            parts,
            stream=self._accelerator.handle(self._stream),
            waits=[self._accelerator.handle(event) for lease in leases for event in lease.after],
            ready=self._accelerator.handle(ready),
        )
        return store.transfer(future, home.groups[0].stored()), ready

    def synchronize(self) -> None:
        """Wait until no copy reads homes in RAM: somebody is about to change them."""
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
            landing = self._arena.lease(self._landing_bytes, "weights on their way to the device")
            self._events = [self._accelerator.event() for _ in range(self._landing_bytes // self._piece_bytes)]
            events = [self._accelerator.handle(event) for event in self._events]
            self._native = _native.Uploads(self._engine, self._gate, landing.view(), self._piece_bytes, events)
        return self._native


def _part(store: SwapStore, weights: Destination, address: int) -> _native.UploadPart:
    """The newest values of a group, and where they go on the device."""
    file, offset = store.place(weights.home.stored(), weights.copy)
    after = None if weights.written is None else weights.written.future
    return _native.UploadPart(file, offset, weights.home.nbytes, address, after=after)
