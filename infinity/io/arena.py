"""The arena, which is the only pinned allocation of a model, and the leases into which the arena is divided."""

from __future__ import annotations

import bisect
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch

from infinity import _native
from infinity.base.accelerator import Accelerator
from infinity.base.fork import in_this_process
from infinity.errors import PlanError
from infinity.sizes import PAGE_BYTES, format_bytes, round_up

logger = logging.getLogger(__name__)

REGISTRATION_BYTES = 64 << 30


class Lease:
    """Borrowed piece of the arena, aligned to 4 KiB. Life cycle: ArenaRegion.lease() → release(), which is called only
    once."""

    def __init__(self, space: ArenaRegion, offset: int, nbytes: int) -> None:
        self._space = space
        self.offset = offset
        self.nbytes = nbytes

    def view(self, offset: int = 0, nbytes: int | None = None) -> memoryview:
        """Return bytes [offset, offset + nbytes) of the lease, writable."""
        nbytes = self.nbytes - offset if nbytes is None else nbytes
        if offset < 0 or offset + nbytes > self.nbytes:
            raise AssertionError(f"view [{offset}, {offset + nbytes}) outside a lease of {self.nbytes} bytes")
        return self._space.memory.view(self.offset + offset, nbytes)

    def tensor(self) -> torch.Tensor:
        """Return the lease's memory as a uint8 tensor of shape [nbytes], without copying.

        Every call makes a tensor with a new storage, so that the views of each such tensor can be counted.
        """
        return torch.frombuffer(self.view(), dtype=torch.uint8)

    def release(self) -> None:
        self._space.give_back(self)

    def is_in(self, memory: _native.Arena) -> bool:
        """Return whether the lease is a piece of this arena."""
        return self._space.memory is memory

    def split(self, sizes: Sequence[int]) -> list[Lease]:
        """Split the lease into consecutive leases. After that, the new leases must be released in place of this lease.

        Args:
            sizes: bytes of each lease, multiples of 4 KiB; their sum is the size of this lease.
        """
        if sum(sizes) != self.nbytes or any(nbytes % PAGE_BYTES for nbytes in sizes):
            raise AssertionError(f"a lease of {self.nbytes} bytes cannot be split into {list(sizes)}")
        ends = itertools.accumulate(sizes, initial=self.offset)
        return [Lease(self._space, begin, nbytes) for begin, nbytes in zip(ends, sizes, strict=False)]

    def space(self) -> ArenaRegion:
        """Return the lease's bytes as a space, from which further leases can be taken."""
        return ArenaRegion(self._space.memory, self.offset, self.nbytes)


class ArenaRegion:
    """Bytes [offset, offset + nbytes) of the arena, from which leases are taken. Adjacent free pieces are merged.

    The default placement is first-fit.

    Invariant: leases never overlap.

    Args:
        native: the arena; None for device memory, whose leases have no views in host memory.
        offset: bytes from the start of the arena.
        nbytes: size of the space.
    """

    def __init__(self, native: _native.Arena | None, offset: int, nbytes: int) -> None:
        self._native = native
        self.nbytes = nbytes
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(offset, nbytes)] if nbytes else []  # (offset, nbytes), sorted

    @property
    def memory(self) -> _native.Arena:
        if self._native is None:
            raise AssertionError("the memory of a device has no view in host memory")
        return self._native

    def try_lease(
        self, nbytes: int, *, from_top: bool = False, tightest: bool = False, behind: int = 0
    ) -> Lease | None:
        """Return a lease of `nbytes` rounded up to 4 KiB, or None if no free piece is long enough.

        Args:
            nbytes: bytes to lease.
            from_top: whether to take the high end of the last free piece that is long enough. Long and short leases at
                different ends do not fragment each other's space.
            tightest: whether to take the shortest free piece that is long enough, so that longer pieces remain free.
            behind: offset from which the first free place is searched. If nothing is free from there on, any free place
                is taken.
        """
        nbytes = round_up(nbytes, PAGE_BYTES)
        with self._lock:
            indices = range(len(self._free) - 1, -1, -1) if from_top else range(len(self._free))
            order = sorted(indices, key=lambda at: self._free[at][1]) if tightest else indices
            for least in (behind, 0) if behind else (0,):
                for index in order:
                    offset, size = self._free[index]
                    start = offset + size - nbytes if from_top else max(offset, least)
                    if start >= offset and start + nbytes <= offset + size:
                        self._free[index : index + 1] = _without(offset, size, start, nbytes)
                        return Lease(self, start, nbytes)
        return None

    def lease(self, nbytes: int, what: str) -> Lease:
        """Return a lease; the plan must have reserved the memory for it.

        Args:
            nbytes: bytes to lease.
            what: the purpose of the lease, for the error message.

        Raises:
            PlanError: the arena is too small; the message names `what`.
        """
        lease = self.try_lease(nbytes)
        if lease is None:
            raise PlanError(f"no room in the arena for {what}: {format_bytes(nbytes)} of {format_bytes(self.nbytes)}")
        return lease

    def give_back(self, lease: Lease) -> None:
        with self._lock:
            index = bisect.bisect_left(self._free, (lease.offset, 0))
            start, end = lease.offset, lease.offset + lease.nbytes
            if (index < len(self._free) and self._free[index][0] < end) or (
                index and sum(self._free[index - 1]) > start
            ):
                raise AssertionError("a lease was released twice")
            if index < len(self._free) and self._free[index][0] == end:
                end += self._free.pop(index)[1]
            if index and sum(self._free[index - 1]) == start:
                index -= 1
                start = self._free.pop(index)[0]
            self._free.insert(index, (start, end - start))

    def free_views(self) -> list[memoryview]:
        """Return views of the pieces that are not leased at present."""
        with self._lock:
            return [self.memory.view(offset, nbytes) for offset, nbytes in self._free]

    @property
    def free_bytes(self) -> int:
        with self._lock:
            return sum(size for _, size in self._free)

    def fits(self, nbytes: int) -> bool:
        """Return whether a free piece is long enough for `nbytes`."""
        with self._lock:
            return any(size >= nbytes for _, size in self._free)


def _without(offset: int, size: int, start: int, nbytes: int) -> list[tuple[int, int]]:
    """Return the pieces (offset, size) that are left of a free piece once [start, start + nbytes) is leased."""
    pieces = [(offset, start - offset), (start + nbytes, offset + size - start - nbytes)]
    return [piece for piece in pieces if piece[1]]


class PinnedArena(ArenaRegion):
    """The arena: one mapping of exactly the planned size.

    A page occupies RAM only after its first use. On a machine without a GPU, memory that is reserved by the plan and
    not used by the run therefore costs nothing.
    """

    def __init__(self, nbytes: int, *, numa_node: int = -1, fd: int | None = None) -> None:
        """Map memory.

        Args:
            nbytes: bytes to map.
            numa_node: node that the pages should come from; -1 for any node.
            fd: file of memory that several processes share, of at least `nbytes` bytes; None: memory of this process.
        """
        nbytes = round_up(max(nbytes, PAGE_BYTES), PAGE_BYTES)
        native = _native.Arena(nbytes, numa_node=numa_node) if fd is None else _native.Arena.shared(fd, nbytes)
        super().__init__(native, 0, nbytes)
        self._touches = fd is None  # a page of shared memory belongs to the process that writes it first
        self._pinned = False
        self._unpin: list[Callable[[], object]] = []

    def give_all_back(self) -> None:
        """Return the memory to the system. Nothing may use the memory afterwards, even if references to it still
        exist."""
        self.unpin()
        self.memory.give_back()

    def unpin(self) -> None:
        """Undo `pin`. A second call does nothing."""
        while self._unpin:
            self._unpin.pop()()

    def pin(
        self,
        accelerator: Accelerator,
        pool: _native.ThreadPool | None = None,
        ends: Sequence[int] = (),
        pinned: Callable[[], None] = lambda: None,
    ) -> str:
        """Pin the pages for copies to and from the device.

        Args:
            accelerator: the device that copies.
            pool: threads that make the pages resident before they are pinned; None: the device's runtime does this, in
                one thread.
            ends: offsets at which a registration may end. No copy crosses such an offset. Some drivers refuse a
                registration of 512 GiB or more; memory is therefore registered in pieces of about 64 GiB.
            pinned: function that is called after each piece.

        Returns:
            The reason why the runtime refused, or ''. After a refusal, copies are slower, but correct.
        """
        began = time.perf_counter()
        if self._touches and pool is not None and accelerator.pins_resident:
            self.memory.touch(pool)
        begin = 0
        for end in _registrations(self.nbytes, ends):
            address = self.memory.address + begin
            refused = accelerator.pin(address, end - begin)
            if refused:
                self.unpin()
                return refused
            self._unpin.append(weakref.finalize(self, in_this_process(partial(accelerator.unpin, address))))
            pinned()
            begin = end
        self._pinned = True
        logger.info("pinned %s in %.2f s", format_bytes(self.nbytes), time.perf_counter() - began)
        return ""

    @property
    def pinned(self) -> bool:
        return self._pinned


def _registrations(nbytes: int, ends: Sequence[int]) -> list[int]:
    """Return the ends of the registrations of an arena. `ends` has the offsets at which one may end, ascending."""
    found, begin = list[int](), 0
    for end, after in itertools.pairwise([*ends, nbytes]):
        if after - begin > REGISTRATION_BYTES and end > begin:
            found.append(end)
            begin = end
    return [*found, nbytes]
