"""Writes of states from the device to the store, and reads, through a ring of host memory.

A state is written in pieces. Each piece is copied to the ring, and the write to the store begins when the copy is done,
without Python. A piece of the ring is free again when its write has ended. So the ring bounds the host memory of a
commit, and `advance` begins as many pieces as there is room for.
"""

from __future__ import annotations

from collections import deque

import torch

from infinity import _native
from infinity.base.accelerator import Accelerator, Event
from infinity.base.interrupt import interrupts_deferred
from infinity.errors import SwapIOError, SwapTimeoutError
from infinity.io.arena import ArenaRegion, Lease
from infinity.io.engine import Transfer
from infinity.io.store import SwapStore, wait_all
from infinity.sizes import PAGE_BYTES
from infinity.tiers.downloads import D2HStream
from infinity.tiers.home import StateHome

_PIECE_BYTES = 16 << 20
_PIECES = 4  # pieces of a short ring: one is copied, others are written


class StateWrite:
    """Write of one state, in progress (BackgroundWork).

    Attributes:
        home: home of the state, on the device.
        copy_index: copy in the store to which the state is written.
        begun_bytes: bytes whose copy to the host has begun.
        failure: first error of a piece; None so far.
    """

    def __init__(self, writer: StateWriter, home: StateHome, copy_index: int) -> None:
        self._writer = writer
        self.home = home
        self.copy_index = copy_index
        self.begun_bytes = 0
        self.failure: SwapIOError | None = None
        self.pieces = 0  # pieces in flight

    @property
    def ended(self) -> bool:
        """Whether all bytes are written, or the write has failed and uses no memory any more."""
        return self.pieces == 0 and (self.failure is not None or self.begun_bytes == self.home.nbytes)

    @property
    def has_failed(self) -> bool:
        """Whether a piece could not be written. Does not wait."""
        return self.failure is not None

    def done(self) -> bool:
        """Begin the pieces for which the ring has room, and return whether the write has ended."""
        self._writer.advance()
        return self.ended

    def wait(self) -> None:
        self._writer.wait(self)

    def result(self) -> None:
        """Wait, and raise the error of the write.

        Raises:
            SwapIOError: a piece could not be written.
        """
        self.wait()
        if self.failure is not None:
            raise self.failure


class StateWriter(D2HStream):
    """Queue of states from the device to the store. The methods are called under the coordinator's lock.

    Invariant: `_waiting` has the writes with bytes that are not copied yet, and `_flying` the pieces in flight, both in
    the order in which they began. After a piece has timed out (`_cut_off`), no further piece begins.

    Args:
        accelerator: the device.
        gate: native entry points of the device.
        ring: host memory of the pieces.
        pool: threads of the native part.
        store: the store.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        gate: _native.DeviceGate,
        ring: ArenaRegion,
        pool: _native.ThreadPool,
        store: SwapStore,
    ) -> None:
        super().__init__(accelerator, gate, pool)
        self._ring = ring
        self._store = store
        self._piece_bytes = min(_PIECE_BYTES, max(ring.nbytes // _PIECES // PAGE_BYTES, 1) * PAGE_BYTES)
        self._waiting: deque[StateWrite] = deque()
        self._flying: deque[tuple[StateWrite, Transfer, Lease, Event]] = deque()
        self._cut_off: SwapTimeoutError | None = None

    def write(self, home: StateHome, copy_index: int) -> StateWrite:
        """Begin to write a state. Until the write is done, no update may change the state."""
        write = StateWrite(self, home, copy_index)
        self._waiting.append(write)
        self.advance()
        return write

    def read(self, home: StateHome) -> None:
        """Read a state from the store to the device. Nothing is being written."""
        bounce = self._ring.lease(self._ring.nbytes, "states on their way to the device")
        for at in range(0, home.nbytes, bounce.nbytes):
            part = bounce.view(0, min(bounce.nbytes, home.nbytes - at))
            wait_all([self._store.read(home.stored(), part, at=at, io_class="states")])
            home.write(at, torch.frombuffer(part, dtype=torch.uint8))
        bounce.release()

    def advance(self) -> None:
        """Give back the memory of the pieces that are written, and begin further pieces. This does not wait."""
        while self._flying and self._flying[0][1].done():
            self._end_oldest()
        while self._waiting:
            write = self._waiting[0]
            write.failure = write.failure or self._cut_off
            if write.failure is None and write.begun_bytes < write.home.nbytes and not self._begin_piece(write):
                return
            if write.failure is not None or write.begun_bytes == write.home.nbytes:
                self._waiting.popleft()

    def wait(self, write: StateWrite) -> None:
        """Wait until a write is done. This raises no error; `StateWrite.failure` has the error.

        Ctrl-C can end the wait for a piece, but never comes between the changes that follow (base/interrupt.py).
        """
        while True:
            with interrupts_deferred():
                self.advance()
                if write.ended:
                    return
                oldest = self._flying[0][1]
            oldest.wait()

    def _begin_piece(self, write: StateWrite) -> bool:
        """Begin the next piece of a write. Return False if the ring has no room."""
        begin, memory = write.begun_bytes, write.home.on_device()
        nbytes = min(self._piece_bytes, write.home.nbytes - begin)
        lease = self._ring.try_lease(nbytes)
        if lease is None:
            return False
        event = self._copy(memory.memory[begin : begin + nbytes], lease, memory.uses.written)
        memory.uses.copied(event)
        landed = self._native.land(self._accelerator.handle(event), [])
        transfer = self._store.write(
            write.home.stored(),
            lease.view(0, nbytes),
            at=begin,
            io_class="states",
            copy_index=write.copy_index,
            after=landed,
        )
        self._flying.append((write, transfer, lease, event))
        write.begun_bytes += nbytes
        write.pieces += 1
        return True

    def _copy(self, piece: torch.Tensor, lease: Lease, after: list[Event]) -> Event:
        try:
            into = torch.frombuffer(lease.view(0, piece.numel()), dtype=torch.uint8)
            return self._accelerator.copy(into, piece, on=self._stream, after=after)
        except BaseException:
            self._rest()
            lease.release()
            raise

    def _end_oldest(self) -> None:
        write, transfer, lease, _ = self._flying.popleft()
        write.pieces -= 1
        try:
            transfer.result()
        except SwapTimeoutError as error:
            write.failure = self._cut_off = error  # the disk may still read the memory, which is never given back
            return
        except SwapIOError as error:
            write.failure = write.failure or error
        lease.release()

    def close(self) -> None:
        """Wait until no piece uses the ring."""
        self._waiting.clear()
        while self._flying:
            self._end_oldest()
        super().close()
