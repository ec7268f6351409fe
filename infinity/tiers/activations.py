"""Tensors that a forward keeps for its backward, in RAM or on NVMe in between.

[Note: the life of a piece]

    LEAVING ──all chunks are copied──▶ AWAY ──back()──▶ BACK ──its tensors are used──▶ AWAY        any ──▶ GONE

A piece is the memory (the storage) of one or several tensors that autograd saved, at one version. A piece is copied to
host memory in chunks. Without scratch files the chunks stay there. With scratch files each chunk is written to its
place, and other chunks may use its host memory once the chunk is written. A chunk that is still in host memory needs no
read.

The piece keeps a reference to the memory until its copy has ended: until then the device may read the memory, and torch
would give it to other tensors. If host memory has no room, the piece waits on the device. Compute waits for pieces only
if too many bytes would leave at once. A tensor that is needed while it leaves is simply used.

`back` makes a tensor of the same bytes. If tensors are in host memory, the tensor of a piece of one chunk borrows the
chunk's memory: no other chunk uses the memory until the tensor is gone. Otherwise the bytes are copied. Chunks that
will be needed next are read ahead (plan/activation_order.py), as far as host memory reaches, and the next pieces are
copied to a device ahead, too. The compute stream waits for such a copy before the tensor is used, and before a tensor
that was copied ahead in vain is freed. The bytes of a piece are kept until the last saved tensor of the piece is gone,
because a graph that is retained may ask again.
"""

from __future__ import annotations

import ctypes
import enum
import logging
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import torch

from infinity import _native
from infinity.base.accelerator import Accelerator, Event, Stream
from infinity.errors import SwapIOError, SwapTimeoutError
from infinity.io.arena import ArenaRegion, Lease
from infinity.io.engine import Transfer
from infinity.io.scratch import ScratchFiles, ScratchPlace
from infinity.plan.activation_order import ActivationOrder, KeptMemory
from infinity.sizes import PAGE_BYTES, format_bytes, round_up
from infinity.state.saved_version import unchanged
from infinity.tiers.downloads import D2HStream

logger = logging.getLogger(__name__)

PIECE_BYTES_MIN = 64 << 10
"""Bytes of the smallest tensor that is moved."""
_STORAGE_SHARE = 4
_CHUNK_BYTES = 16 << 20
_CHUNKS_MIN = 4  # chunks of a short ring: one is copied, others are written
_MOVING_BYTES_MAX = 256 << 20
_MOVING_SHARE = 4
"""Divisor of the tier's share of the device: bytes that leave at once, and bytes that are copied back ahead."""
_STAY_SHARE = 2
"""Divisor of the tier's share of the device: bytes of a forward that stay there."""


class PieceState(enum.Enum):
    LEAVING = "being copied to the host"
    AWAY = "in RAM or on NVMe"
    BACK = "on the device again"
    GONE = "freed"


_NEXT = {
    PieceState.LEAVING: {PieceState.AWAY, PieceState.GONE},
    PieceState.AWAY: {PieceState.BACK, PieceState.GONE},
    PieceState.BACK: {PieceState.AWAY, PieceState.GONE},
    PieceState.GONE: set[PieceState](),
}


@dataclass(eq=False)
class _Chunk:
    """A part of a piece.

    Attributes:
        begin, nbytes: range of the piece's bytes.
        lease: host memory with the chunk; None while the chunk is on NVMe only.
        place: place of the chunk in a scratch file; None without scratch files.
        transfer: last transfer between the two; None if none was begun.
        event: last copy between host memory and the device; None on the CPU.
        down: copy from the device; the write needs the event until it ends.
        source: memory on the device that the copy may still read, though its piece is gone.
    """

    begin: int
    nbytes: int
    lease: Lease | None
    place: ScratchPlace | None = None
    transfer: Transfer | None = None
    event: Event | None = None
    down: Event | None = None
    source: torch.Tensor | None = None


@dataclass(eq=False)
class Piece:
    """Memory of saved tensors ([Note: the life of a piece]).

    Attributes:
        of, number: the forward that kept the piece, and the piece's number there.
        stream: stream whose kernels torch gives the memory to next.
        source: uint8 [nbytes]: the memory while it leaves; None afterwards.
        tensor: uint8 [nbytes]: the memory that the piece came back to; None before, and after its last first use.
        copied: number of chunks whose copy to `tensor` has begun.
        handles: saved tensors that exist. unused: those that were not used yet.
        failed: write or read that failed; its error is made anew for every later use. An error that was raised would
            keep the graph, and so the piece, through the frames in which it was raised.
    """

    of: KeptMemory
    number: int
    nbytes: int
    stream: Stream | None
    source: torch.Tensor | None
    state: PieceState = PieceState.LEAVING
    chunks: list[_Chunk] = field(default_factory=list)
    tensor: torch.Tensor | None = None
    copied: int = 0
    handles: int = 0
    unused: int = 0
    failed: Transfer | None = None

    def move(self, state: PieceState) -> None:
        if state not in _NEXT[self.state]:
            raise AssertionError(f"a piece that is {self.state.value} cannot be {state.value}")
        self.state = state


class MovedTensor:
    """A saved tensor whose memory is a piece.

    Attributes:
        piece: the memory.
        dtype, size, stride, offset: the tensor's view of the memory; `offset` is a number of elements.
        witness: tensor without memory that shares the version of the saved tensor; autograd counts changes in place
            there.
        version: the version at which the tensor was saved.
        used: whether the tensor was used by a backward.
    """

    __slots__ = ("_gone", "dtype", "offset", "piece", "size", "stride", "used", "version", "witness")

    def __init__(self, piece: Piece, tensor: torch.Tensor, gone: deque[MovedHandle]) -> None:
        self.piece, self.used, self._gone = piece, False, gone
        piece.handles += 1
        piece.unused += 1
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.offset = int(tensor.storage_offset())
        self.version = tensor._version
        self.witness = tensor.detach()
        self.witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def __del__(self) -> None:
        """Report the end, in any thread and even under a lock. ActivationTier frees the piece later."""
        self._gone.append((self.piece, self.used))


MovedHandle = tuple[Piece, bool]
"""The piece of a saved tensor that is gone, and whether the tensor was used."""


class _Copies(Protocol):
    """Copies between the memory of saved tensors and host memory. The events are None where a copy ends at once.

    Attributes:
        copies_ahead: whether pieces come back before they are needed; False if the saved tensors are in host memory.
    """

    copies_ahead: bool

    def down(self, into: memoryview, source: torch.Tensor) -> Event | None: ...

    def landed(self, event: Event | None) -> _native.IOFuture | None: ...

    def up(self, into: torch.Tensor, source: memoryview) -> Event | None: ...

    def empty(self, nbytes: int) -> torch.Tensor: ...

    def reached(self, event: Event | None) -> bool: ...

    def synchronize(self, event: Event | None) -> None: ...

    def current(self) -> Stream | None: ...

    def order(self, stream: Stream | None, event: Event | None) -> None: ...

    def lend(self, memory: torch.Tensor, stream: Stream | None) -> None: ...

    def close(self) -> None: ...


class HostCopies:
    """Copies where tensors are in host memory.

    They run in this thread alone. torch's copy_ takes all threads, which wait for each other at its end, and twice the
    processor time.
    """

    copies_ahead = False  # a copy ahead would only take memory earlier

    def down(self, into: memoryview, source: torch.Tensor) -> None:
        target = torch.frombuffer(into, dtype=torch.uint8)
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.numel())

    def landed(self, event: None) -> None:
        pass

    def up(self, into: torch.Tensor, source: memoryview) -> None:
        ctypes.memmove(into.data_ptr(), torch.frombuffer(source, dtype=torch.uint8).data_ptr(), into.numel())

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def reached(self, event: None) -> bool:
        return True

    def synchronize(self, event: None) -> None:
        pass

    def current(self) -> None:
        pass

    def order(self, stream: None, event: None) -> None:
        pass

    def lend(self, memory: torch.Tensor, stream: None) -> None:
        pass

    def close(self) -> None:
        pass


class DeviceCopies(D2HStream):
    """Copies between a device and pinned host memory, on a stream for each direction."""

    copies_ahead = True

    def __init__(self, accelerator: Accelerator, gate: _native.DeviceGate, pool: _native.ThreadPool) -> None:
        super().__init__(accelerator, gate, pool)
        self._up = accelerator.stream()

    def down(self, into: memoryview, source: torch.Tensor) -> Event:
        """Begin a copy behind all work of this thread's stream."""
        target = torch.frombuffer(into, dtype=torch.uint8)
        after = [self._accelerator.record(self._accelerator.current())]
        try:
            return self._accelerator.copy(target, source, on=self._stream, after=after)
        except BaseException:
            self._rest()  # the copy may be under way
            raise

    def landed(self, event: Event) -> _native.IOFuture:
        """Return a request after which native requests may read what a copy has written to host memory."""
        return self._native.land(self._accelerator.handle(event), [])

    def up(self, into: torch.Tensor, source: memoryview) -> Event:
        """Begin a copy behind all work of this thread's stream, which may have used the memory of `into` before.

        This stream or the host is ordered behind the copy that wrote `source`.
        """
        values = torch.frombuffer(source, dtype=torch.uint8)
        begin = [self._accelerator.record(self._accelerator.current())]
        try:
            return self._accelerator.copy(into, values, on=self._up, after=begin)
        except BaseException:
            self._accelerator.synchronize(self._accelerator.record(self._up))  # the copy may be under way
            raise

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._accelerator.device)

    def reached(self, event: Event | None) -> bool:
        return event is None or self._accelerator.reached(event)

    def synchronize(self, event: Event | None) -> None:
        if event is not None:
            self._accelerator.synchronize(event)

    def current(self) -> Stream:
        return self._accelerator.current()

    def order(self, stream: Stream, event: Event | None) -> None:
        """Make a stream wait for a copy."""
        if event is not None:
            self._accelerator.wait(stream, event)

    def lend(self, memory: torch.Tensor, stream: Stream) -> None:
        """Let this thread's stream use memory that torch will give to kernels of `stream`."""
        if self._accelerator.current() != stream:
            self._accelerator.lend(memory)

    def close(self) -> None:
        super().close()
        self._accelerator.synchronize(self._accelerator.record(self._up))


@dataclass(frozen=True)
class _KnownStorage:
    """A storage that the forward in progress has kept.

    Attributes:
        storage: function that returns the storage; None once it is freed.
        version: version of the tensor that was saved.
        number: number of the memory in its forward.
        piece: the piece; None if the storage stays.
    """

    storage: weakref.ref[torch.UntypedStorage]
    version: int
    number: int
    piece: Piece | None

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether this is the memory of a tensor of the same storage, which has no other values since then."""
        freed = self.piece is not None and self.piece.state is PieceState.GONE
        return self.storage() is not None and self.version == tensor._version and not freed


class ActivationTier:
    """The pieces of one model. All methods but `MovedTensor.__del__` are called under the coordinator's lock.

    Invariant: with scratch files, each chunk with a lease is in exactly one of `_begun` (in the order in which the
    writes began) and `_ahead` (in the order in which the reads began). Chunks whose memory was given back while a copy
    or a transfer may use it are in `_ending`. Memory that tensors borrow is in `_borrowed`. `_leaving` has the pieces
    that are LEAVING, the oldest first.

    Attributes:
        moved_bytes: bytes of all pieces so far.

    Args:
        space: host memory of the chunks.
        scratch: files on NVMe; None: the chunks stay in host memory.
        copies: copies to and from host memory.
        device_bytes: memory on the device for pieces that leave or come back ahead, and for tensors that stay. One
            piece in each direction may have more.
    """

    def __init__(self, space: ArenaRegion, scratch: ScratchFiles | None, copies: _Copies, device_bytes: int) -> None:
        self._space = space
        self._scratch = scratch
        self._copies = copies
        self._order = ActivationOrder(device_bytes // _STAY_SHARE)
        self._moving_bytes_max = min(_MOVING_BYTES_MAX, device_bytes // _MOVING_SHARE)
        self._chunk_bytes = min(_CHUNK_BYTES, max(space.nbytes // _CHUNKS_MIN // PAGE_BYTES, 1) * PAGE_BYTES)
        self._forward: KeptMemory | None = None
        self._returning: KeptMemory | None = None
        self._by_number: weakref.WeakKeyDictionary[KeptMemory, dict[int, Piece]] = weakref.WeakKeyDictionary()
        self._by_storage: dict[int, _KnownStorage] = {}
        self._leaving: dict[Piece, None] = {}
        self._leaving_bytes = 0
        self._gone: deque[MovedHandle] = deque()
        self._begun: dict[_Chunk, Piece] = {}
        self._ahead: dict[_Chunk, Piece] = {}
        self._ending: dict[_Chunk, None] = {}
        self._borrowed: set[Lease] = set()
        self._returned: deque[Lease] = deque()
        self._was_full = False
        self.moved_bytes = 0

    # -- forward -------------------------------------------------------------------------------------------------------

    def end_forward(self) -> None:
        """End the forward if one is in progress: its tensors come back next. A forward begins with its first tensor."""
        self._collect()
        self._let_go()
        forward, self._forward = self._forward, None
        if forward is not None:
            known = [each for each in self._by_storage.values() if each.storage() is not None]
            in_use = {each.number for each in known if each.piece is None or each.piece.state is PieceState.AWAY}
            self._order.end(forward, in_use)
            self._returning = forward
        self._by_storage.clear()

    def keep(self, tensor: torch.Tensor) -> MovedTensor | None:
        """Begin to move the memory of a tensor that autograd saves. Return None if the tensor stays where it is.

        A tensor with less than a quarter of its storage stays: its storage is probably in use for another reason.

        Raises:
            SwapIOError: a disk has no room for the tensor.
        """
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if nbytes < PIECE_BYTES_MIN or nbytes > _STORAGE_SHARE * tensor.numel() * tensor.itemsize:
            return None
        if tensor.is_leaf and tensor.requires_grad:
            return None
        self._collect()
        if self._forward is None:
            self._forward = self._order.begin()
            self._by_number[self._forward] = {}
        known = self._by_storage.get(storage._cdata)
        if known is None or not known.has(tensor):
            number = len(self._forward.sizes)
            piece = self._take(self._forward, storage, tensor.device)
            known = self._by_storage[storage._cdata] = _KnownStorage(
                weakref.ref(storage), tensor._version, number, piece
            )
        return None if known.piece is None else MovedTensor(known.piece, tensor, self._gone)

    def _take(self, forward: KeptMemory, storage: torch.UntypedStorage, device: torch.device) -> Piece | None:
        """Begin to move a storage. Return None if it stays, or if host memory has no room for it."""
        nbytes, number = storage.nbytes(), len(forward.sizes)
        if self._order.stays(forward, nbytes) or not self._fits(nbytes):
            return None
        source = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))
        piece = Piece(forward, number, nbytes, self._copies.current(), source)
        self._by_number[forward][number] = piece
        self._leaving[piece] = None
        self._leaving_bytes += nbytes
        self.moved_bytes += nbytes
        try:
            self._let_go()
        except BaseException:
            self._free(piece)
            raise
        return piece

    def _fits(self, nbytes: int) -> bool:
        """Return whether host memory has room for a piece that will stay there. NVMe always has."""
        if self._scratch is not None:
            return True
        leaving = sum(piece.nbytes - _begun_bytes(piece) for piece in self._leaving)
        ending = sum(chunk.lease.nbytes for chunk in self._ending if chunk.lease is not None)
        pages = round_up(nbytes, PAGE_BYTES) + PAGE_BYTES * len(self._leaving)
        if self._space.free_bytes + ending >= leaving + pages:
            return True
        if not self._was_full:
            self._was_full = True
            logger.warning(
                "activations: host: RAM has no room for %s more, and the rest stays on the device. Raise memory.host, "
                "or set activations: nvme.",
                format_bytes(nbytes),
            )
        return False

    def _let_go(self) -> None:
        """Begin the copies for which host memory has room, and free the memory of the pieces whose copies have ended.
        If too many bytes leave at once, wait for the oldest ones."""
        for piece in self._leaving:
            if not self._begin(piece, needed=False):
                break
        while self._leaving:
            piece = next(iter(self._leaving))
            crowded = self._leaving_bytes > self._moving_bytes_max and len(self._leaving) > 1
            if not self._begin(piece, needed=crowded or not self._copies.copies_ahead):
                return
            event = piece.chunks[-1].event
            if not self._copies.reached(event):
                if not crowded:
                    return
                self._copies.order(piece.stream, event)
            del self._leaving[piece]
            self._leaving_bytes -= piece.nbytes
            piece.source = None
            piece.move(PieceState.AWAY)

    def _begin(self, piece: Piece, *, needed: bool) -> bool:
        """Begin the copies of a piece to host memory. Return whether all of them have begun.

        With `needed`, other chunks make room; this may wait.
        """
        while (begin := _begun_bytes(piece)) < piece.nbytes:
            nbytes = min(self._chunk_bytes, piece.nbytes - begin)
            lease = self._lease(nbytes) if needed else self._try_lease(nbytes)
            if lease is None or piece.source is None:
                return False
            try:
                event = self._copies.down(lease.view(0, nbytes), piece.source[begin : begin + nbytes])
            except BaseException:
                lease.release()
                raise
            chunk = _Chunk(begin, nbytes, lease, event=event, down=event)
            piece.chunks.append(chunk)
            if self._scratch is not None:
                chunk.place = self._scratch.take(lease.nbytes)
                landed = self._copies.landed(event)
                chunk.transfer = self._scratch.write(chunk.place, lease.view(), after=landed)
                self._begun[chunk] = piece
        return True

    # -- backward ------------------------------------------------------------------------------------------------------

    def back(self, moved: MovedTensor) -> torch.Tensor:
        """Return a saved tensor. The compute stream of this thread may use it at once.

        Raises:
            StaleWeightsError: the tensor was changed in place after it was saved.
            SwapIOError: a transfer of the tensor failed.
        """
        unchanged(moved.witness, moved.version, moved.size)
        piece = moved.piece
        memory = self._bring(piece) if piece.source is None else piece.source
        self._copies.lend(memory, piece.stream)
        piece.of.came_back(piece.number)
        piece.unused -= not moved.used
        moved.used = True
        if piece.unused == 0 and piece.state is PieceState.BACK:
            self._used(piece)
        self._returning = piece.of
        self.advance()
        whole = memory[: memory.numel() // moved.dtype.itemsize * moved.dtype.itemsize].view(moved.dtype)
        return whole.as_strided(moved.size, moved.stride, moved.offset)

    def _bring(self, piece: Piece) -> torch.Tensor:
        _require_whole(piece)
        if piece.state is not PieceState.BACK:
            while piece.copied < len(piece.chunks):
                self._read(piece, needed=True)
                self._copy_next(piece)
            _require_whole(piece)
            piece.move(PieceState.BACK)
        if piece.tensor is None:
            raise AssertionError("a piece that is back has no memory")
        for chunk in piece.chunks:
            self._copies.order(self._copies.current(), chunk.event)
        return piece.tensor

    def _copy_next(self, piece: Piece) -> None:
        """Begin the copy of the piece's next chunk, which is in host memory, after its read."""
        chunk = piece.chunks[piece.copied]
        if chunk.lease is None:
            raise AssertionError("a chunk is copied from no memory")
        read = chunk in self._ahead
        if read:
            self._wait(chunk, piece)
        if (read or _is_written(chunk)) and self._may_borrow(piece):
            self._begun.pop(chunk, None)
            self._ahead.pop(chunk, None)
            self._borrow(chunk, chunk.lease, piece)
            return
        if piece.tensor is None:
            piece.stream, piece.tensor = self._copies.current(), self._copies.empty(piece.nbytes)
        into = piece.tensor[chunk.begin : chunk.begin + chunk.nbytes]
        chunk.event = self._copies.up(into, chunk.lease.view(0, chunk.nbytes))
        piece.copied += 1
        if read or _is_written(chunk):  # the bytes are on NVMe, and other chunks need the memory
            self._begun.pop(chunk, None)
            self._ahead.pop(chunk, None)
            self._give_back(chunk)

    def _may_borrow(self, piece: Piece) -> bool:
        """Return whether the tensor of a piece may borrow memory of a chunk. Half of the memory is never borrowed."""
        borrowed = sum(lease.nbytes for lease in self._borrowed) + piece.nbytes
        return not self._copies.copies_ahead and len(piece.chunks) == 1 and borrowed <= self._space.nbytes // 2

    def _borrow(self, chunk: _Chunk, lease: Lease, piece: Piece) -> None:
        """Make the tensor of a piece in the memory of its only chunk, whose bytes are on NVMe, too."""
        view = lease.view(0, chunk.nbytes)
        self._borrowed.add(lease)
        # The tensor gets the only reference to `view`. It may end in any thread and even under a lock.
        weakref.finalize(view, self._returned.append, lease).atexit = False
        piece.tensor = torch.frombuffer(view, dtype=torch.uint8)
        piece.copied = 1
        chunk.lease = chunk.transfer = None

    def _used(self, piece: Piece) -> None:
        """Forget the memory of a piece that came back: autograd has the last reference."""
        piece.tensor, piece.copied = None, 0
        piece.move(PieceState.AWAY)

    def advance(self) -> None:
        """Free what is no longer needed, and begin the copies and the reads for which there is room. This does not
        wait, but for a piece that must leave."""
        self._collect()
        self._let_go()
        for chunk in [each for each in self._ending if self._is_idle(each)]:
            self._release(chunk)
        if self._returning is None:
            return
        pieces, ahead = self._by_number.get(self._returning, {}), 0
        for number in self._returning.following():
            piece = pieces.get(number)
            if piece is None or piece.state is not PieceState.AWAY or piece.failed is not None:
                continue
            whole = self._read(piece, needed=False)
            ahead += piece.nbytes
            if self._copies.copies_ahead and not self._copy_ahead(piece, only=ahead == piece.nbytes, ahead=ahead):
                return
            if not whole or (self._scratch is None and ahead > self._moving_bytes_max):
                return

    def _copy_ahead(self, piece: Piece, *, only: bool, ahead: int) -> bool:
        """Begin the copies of a piece to the device, as far as it is read and as there is room. Return whether there
        may be room for the copies of the next piece."""
        if not only and ahead > self._moving_bytes_max:
            return True  # the next pieces are only read
        try:
            while piece.copied < len(piece.chunks):
                chunk = piece.chunks[piece.copied]
                if chunk.lease is None or (
                    chunk in self._ahead and chunk.transfer is not None and not chunk.transfer.done()
                ):
                    break
                self._copy_next(piece)
        except torch.OutOfMemoryError:
            return False
        return True

    def _read(self, piece: Piece, *, needed: bool) -> bool:
        """Begin to read chunks that are on NVMe only, in their order, as far as free memory reaches.

        With `needed`, other chunks make room for the first one that is not copied; this may wait. Return whether the
        reads of all chunks have begun.
        """
        for index in range(piece.copied, len(piece.chunks)):
            chunk = piece.chunks[index]
            if chunk.lease is None and self._scratch is not None and chunk.place is not None:
                first = needed and index == piece.copied
                lease = self._lease(chunk.nbytes) if first else self._try_lease(chunk.nbytes)
                if lease is None:
                    return False
                chunk.lease, chunk.event = lease, None
                chunk.transfer = self._scratch.read(chunk.place, lease.view())
                self._ahead[chunk] = piece
        return True

    # -- host memory ---------------------------------------------------------------------------------------------------

    def _try_lease(self, nbytes: int) -> Lease | None:
        return self._space.try_lease(round_up(nbytes, PAGE_BYTES))

    def _lease(self, nbytes: int) -> Lease | None:
        """Return host memory for a chunk. Other chunks make room, those that come back last at first; this may wait.
        Return None if no chunk can make room."""
        while True:
            lease = self._try_lease(nbytes)
            if lease is not None or not self._make_room():
                return lease

    def _make_room(self) -> bool:
        if self._ending:
            idle = (each for each in self._ending if self._is_idle(each))
            chunk = next(idle, None) or next(iter(self._ending))
            self._copies.synchronize(chunk.event)
            self._release(chunk)
            return True
        if not (self._begun or self._ahead):
            return False
        among = self._begun or self._ahead
        chunk = next(iter(among) if self._begun else reversed(among))
        self._wait(chunk, among[chunk])
        del among[chunk]
        self._give_back(chunk)
        return True

    def _wait(self, chunk: _Chunk, piece: Piece) -> None:
        """Wait for the transfer of a chunk. Raises SwapTimeoutError; after another error, the piece has failed.

        If Ctrl-C ends the wait, nothing is changed: the transfer may still use the memory.
        """
        transfer = chunk.transfer
        if transfer is None:
            return
        try:
            transfer.result()
        except SwapTimeoutError:
            # the disk may still use the memory, which is never given back
            piece.failed, chunk.lease, chunk.transfer = transfer, None, None
            raise
        except SwapIOError:
            piece.failed = piece.failed or transfer
        chunk.transfer = None

    def _give_back(self, chunk: _Chunk) -> None:
        """Give back the host memory of a chunk, which no transfer uses, once its copy has ended."""
        self._ending[_Chunk(chunk.begin, chunk.nbytes, chunk.lease, event=chunk.event)] = None
        chunk.lease = chunk.transfer = None

    def _is_idle(self, chunk: _Chunk) -> bool:
        return (chunk.transfer is None or chunk.transfer.done()) and self._copies.reached(chunk.event)

    def _release(self, chunk: _Chunk) -> None:
        """Free the memory and the place of a chunk whose copy has ended, after its transfer."""
        if chunk.transfer is not None:
            try:
                chunk.transfer.result()
            except SwapTimeoutError:
                del self._ending[chunk]
                return  # the disk may still use the memory and the place, which are never given back
            except SwapIOError:
                pass  # nobody needs the tensor any more
        del self._ending[chunk]
        if chunk.lease is not None:
            chunk.lease.release()
        if chunk.place is not None:
            chunk.place.lease.release()

    def _collect(self) -> None:
        """Free the pieces whose saved tensors are all gone, and memory whose borrower is gone."""
        while self._returned:
            lease = self._returned.popleft()
            self._borrowed.remove(lease)
            lease.release()
        while self._gone:
            piece, used = self._gone.popleft()
            piece.handles -= 1
            piece.unused -= not used
            if piece.handles == 0:
                self._free(piece)
            elif piece.unused == 0 and piece.state is PieceState.BACK:
                self._used(piece)

    def _free(self, piece: Piece) -> None:
        if piece.state is PieceState.GONE:
            return
        if piece in self._leaving:
            del self._leaving[piece]
            self._leaving_bytes -= piece.nbytes
        for chunk in piece.chunks:
            self._begun.pop(chunk, None)
            self._ahead.pop(chunk, None)
            chunk.source = piece.source
            if piece.tensor is not None:
                self._copies.order(piece.stream, chunk.event)
            self._ending[chunk] = None
        self._by_number.get(piece.of, {}).pop(piece.number, None)
        piece.move(PieceState.GONE)
        piece.source = piece.tensor = None
        piece.chunks = []

    @property
    def borrowed(self) -> bool:
        """Whether tensors that came back still use host memory."""
        self._collect()
        return bool(self._borrowed)

    def close(self) -> None:
        """Wait until no transfer and no copy uses memory. After that, no saved tensor can come back."""
        self._returning = self._forward = None
        self._by_storage.clear()
        for pieces in list(self._by_number.values()):
            for piece in list(pieces.values()):
                self._free(piece)
        self._copies.close()
        while self._ending:
            self._release(next(iter(self._ending)))
        if self._scratch is not None:
            self._scratch.close()


def _begun_bytes(piece: Piece) -> int:
    """Return the bytes of a piece whose copies to host memory have begun."""
    return piece.chunks[-1].begin + piece.chunks[-1].nbytes if piece.chunks else 0


def _is_written(chunk: _Chunk) -> bool:
    """Return whether the bytes of a chunk in memory are on NVMe, too."""
    return chunk.transfer is not None and chunk.transfer.done() and chunk.transfer.future.failure() is None


def _require_whole(piece: Piece) -> None:
    """Raise the error of the piece's failed transfer, if there is one."""
    if piece.failed is not None:
        piece.failed.result()
