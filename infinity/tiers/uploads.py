"""Weights on their way up: from pinned RAM, or in pieces from NVMe through a landing memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from infinity import _native
from infinity.base.accelerator import Accelerator, Event
from infinity.io.arena import Lease, Space
from infinity.io.engine import Transfer
from infinity.io.store import Extent, SwapStore
from infinity.tiers.slab import SlabLease


@dataclass(frozen=True)
class StoredRange:
    """Weights in the store, and where in a slot they go.

    Attributes:
        begin: byte of the slot, or of the memory for encoded weights.
        copy: of the extent; None: the newest values.
        written: they are on their way to the store.
        encoded: they are decoded into the slot, later.
    """

    extent: Extent
    begin: int
    nbytes: int
    copy: int | None = None
    written: Transfer | None = None
    encoded: bool = False


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
        self, into: SlabLease, ranges: Sequence[StoredRange], store: SwapStore, encoded: SlabLease | None = None
    ) -> tuple[Transfer, Event]:
        """Start reading weights, and copying what is read.

        Args:
            encoded: memory for the ranges that are encoded.

        Returns:
            A transfer, and an event that streams may wait for once the transfer is done. The transfer raises as
            SwapStore.read; when it fails no copy into the slot is under way.
        """
        ready = self._accelerator.event()
        leases = [into] if encoded is None else [into, encoded]
        parts = []
        for each in ranges:
            address = leases[each.encoded].memory.data_ptr()
            file, offset = store.place(each.extent, each.copy)
            after = None if each.written is None else each.written.future
            parts.append(_native.UploadPart(file, offset, each.nbytes, address + each.begin, after=after))
        future = self._open().upload(
            parts,
            stream=self._accelerator.handle(self._stream),
            waits=[self._accelerator.handle(event) for lease in leases for event in lease.after],
            ready=self._accelerator.handle(ready),
        )
        return store.transfer(future, ranges[0].extent), ready

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
