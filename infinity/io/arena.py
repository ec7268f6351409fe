"""The one pinned allocation and the leases carved from it."""

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


class Lease:
    """A borrowed, 4 KiB-aligned piece of the arena. Life cycle: Space.lease() → release(), once."""

    def __init__(self, space: Space, offset: int, nbytes: int) -> None:
        self._space = space
        self.offset = offset
        self.nbytes = nbytes

    def view(self, offset: int = 0, nbytes: int | None = None) -> memoryview:
        """Bytes [offset, offset + nbytes) of the lease, writable."""
        nbytes = self.nbytes - offset if nbytes is None else nbytes
        if offset < 0 or offset + nbytes > self.nbytes:
            raise AssertionError(f"view [{offset}, {offset + nbytes}) outside a lease of {self.nbytes} bytes")
        return self._space.memory.view(self.offset + offset, nbytes)

    def tensor(self) -> torch.Tensor:
        """uint8 [nbytes], sharing the lease's memory. Every call makes a new storage, so that its views can be
        counted."""
        return torch.frombuffer(self.view(), dtype=torch.uint8)

    def release(self) -> None:
        self._space.give_back(self)

    def split(self, sizes: Sequence[int]) -> list[Lease]:
        """The lease as leases of these sizes, which lie one after the other; each is released by itself, instead of
        this one. Each size is a multiple of 4 KiB, and together they are the lease's."""
        if sum(sizes) != self.nbytes or any(nbytes % PAGE_BYTES for nbytes in sizes):
            raise AssertionError(f"a lease of {self.nbytes} bytes cannot be split into {list(sizes)}")
        ends = itertools.accumulate(sizes, initial=self.offset)
        return [Lease(self._space, begin, nbytes) for begin, nbytes in zip(ends, sizes, strict=False)]

    def space(self) -> Space:
        """A space of the lease's bytes, to cut it into leases in turn."""
        return Space(self._space.memory, self.offset, self.nbytes)


class Space:
    """Bytes [offset, offset + nbytes) of the arena, cut into leases, first-fit where nothing else is asked for; free
    neighbours merge.

    Invariant: leases never overlap.

    Args:
        native: None for memory of a device, whose leases have no views here.
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

    def try_lease(self, nbytes: int, *, from_top: bool = False, tightest: bool = False) -> Lease | None:
        """A lease of `nbytes` rounded up to 4 KiB, or None when no free piece is long enough.

        Args:
            from_top: take it from the high end, so that long and short leases do not break up each other's space.
            tightest: take it from the shortest piece that is long enough, so that long pieces stay.
        """
        nbytes = round_up(nbytes, PAGE_BYTES)
        with self._lock:
            indices = range(len(self._free) - 1, -1, -1) if from_top else range(len(self._free))
            for index in sorted(indices, key=lambda at: self._free[at][1]) if tightest else indices:
                offset, size = self._free[index]
                if size < nbytes:
                    continue
                start = offset + size - nbytes if from_top else offset
                rest = (offset, size - nbytes) if from_top else (offset + nbytes, size - nbytes)
                self._free[index : index + 1] = [rest] if rest[1] else []
                return Lease(self, start, nbytes)
        return None

    def lease(self, nbytes: int, what: str) -> Lease:
        """A lease for which the plan has counted the memory.

        Args:
            what: the lease is for, in the error's words.

        Raises:
            PlanError: the arena is too small; names `what`.
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
        """The pieces that are not leased now."""
        with self._lock:
            return [self.memory.view(offset, nbytes) for offset, nbytes in self._free]

    @property
    def free_bytes(self) -> int:
        with self._lock:
            return sum(size for _, size in self._free)

    def fits(self, nbytes: int) -> bool:
        """Whether a free piece is long enough."""
        with self._lock:
            return any(size >= nbytes for _, size in self._free)


class PinnedArena(Space):
    """One mapping of exactly the planned size. A page takes RAM when it is first used, so on a machine without a GPU
    the memory that a plan reserves and a run does not use costs nothing."""

    def __init__(self, nbytes: int, *, numa_node: int = -1) -> None:
        nbytes = round_up(max(nbytes, PAGE_BYTES), PAGE_BYTES)
        super().__init__(_native.Arena(nbytes, huge_pages=True, numa_node=numa_node), 0, nbytes)
        self._pinned = False
        self._unpin: Callable[[], object] = lambda: None

    def give_all_back(self) -> None:
        """Nobody uses the memory any more, whoever may still refer to it."""
        self._unpin()
        self.memory.give_back()

    def pin(self, accelerator: Accelerator, pool: _native.ThreadPool | None = None) -> str:
        """Pin the pages for copies. Returns '', or why the runtime refused: copies are then slower, and right.

        Args:
            pool: its threads make the pages resident first; None: the runtime does, in one thread.
        """
        began = time.perf_counter()
        if pool is not None and accelerator.pins_resident:
            self.memory.touch(pool)
        refused = accelerator.pin(self.memory.address, self.nbytes)
        if not refused:
            self._pinned = True
            unpin = in_this_process(partial(accelerator.unpin, self.memory.address))
            self._unpin = weakref.finalize(self, unpin)
            logger.info("pinned %s in %.2f s", format_bytes(self.nbytes), time.perf_counter() - began)
        return refused

    @property
    def pinned(self) -> bool:
        return self._pinned
