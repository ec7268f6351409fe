"""Reading many extents one after the other, with the queue full whatever their sizes."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence

from infinity.errors import SwapIOError, SwapTimeoutError
from infinity.io.engine import Transfer
from infinity.io.store import Extent, SwapStore, wait_all
from infinity.sizes import PAGE_BYTES


def read_all(store: SwapStore, extents: Sequence[Extent], memory: memoryview) -> Iterator[SwapIOError | None]:
    """Read extents of any size one after the other, with as much in flight as `memory` holds, and have the store
    remember the checksums of what was read. Yields for each extent its first failure, or None.

    Raises:
        SwapTimeoutError: the device was given up; the memory is lost.
    """
    ring = _Ring(memory)
    longest = max(len(memory) // _PIECES // PAGE_BYTES * PAGE_BYTES, PAGE_BYTES)
    pieces = (
        (extent, at, min(longest, extent.nbytes - at))
        for extent in extents
        for at in range(0, max(extent.nbytes, 1), longest)
    )
    reading: deque[tuple[Extent, int, memoryview, Transfer | None]] = deque()
    failure: SwapIOError | None = None
    following = next(pieces, None)
    try:
        while reading or following is not None:
            if following is not None and (view := ring.take(following[2])) is not None:
                extent, at, nbytes = following
                started = store.read(extent, view, at=at, io_class="states", verify=False) if nbytes else None
                reading.append((extent, at, view, started))
                following = next(pieces, None)
                continue
            extent, at, view, transfer = reading[0]  # stays in `reading` until it is done, in case of an interrupt
            try:
                if transfer is not None:
                    transfer.result()
                    if store.checksums:
                        store.file.remember(extent.offset + at, view)
            except SwapTimeoutError:
                raise
            except SwapIOError as error:
                failure = failure or error
            reading.popleft()
            ring.give_back()
            if at + len(view) == extent.nbytes:
                yield failure
                failure = None
    finally:  # a caller that stops in the middle may use the memory for something else
        with contextlib.suppress(SwapIOError):
            wait_all(transfer for *_, transfer in reading if transfer is not None)


_PIECES = 8
"""The least number of reads in flight of an extent that is larger than the memory."""


class _Ring:
    """Memory whose pieces are given back in the order in which they were taken."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._taken: deque[tuple[int, int]] = deque()

    def take(self, nbytes: int) -> memoryview | None:
        """A piece of `nbytes`; None while there is no room for it."""
        begin, limit = 0, len(self._memory)
        if self._taken:
            oldest, begin = self._taken[0][0], self._taken[-1][1]
            if begin <= oldest:
                limit = oldest
            elif begin + nbytes > limit:
                begin, limit = 0, oldest
        if begin + nbytes > limit:
            return None
        self._taken.append((begin, begin + nbytes))
        return self._memory[begin : begin + nbytes]

    def give_back(self) -> None:
        """Give back the oldest piece."""
        self._taken.popleft()
