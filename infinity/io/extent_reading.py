"""Reads of extents: a part of one extent, or many extents one after the other with many reads in flight."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from infinity import _native
from infinity.errors import SwapIOError, SwapTimeoutError
from infinity.io.engine import Transfer
from infinity.io.store import Extent, SwapStore, wait_all
from infinity.sizes import PAGE_BYTES, round_up


def read_part(store: SwapStore, extent: Extent, begin: int, nbytes: int) -> torch.Tensor:
    """Return bytes [begin, begin + nbytes) of an extent as a uint8 tensor. Raises SwapIOError."""
    start = begin // PAGE_BYTES * PAGE_BYTES
    end = max(round_up(begin + nbytes, PAGE_BYTES), start + PAGE_BYTES)
    memory = _native.Arena(end - start, huge_pages=False).view(0, end - start)
    wait_all([store.read(extent, memory, at=start, io_class="states")])
    return torch.frombuffer(memory, dtype=torch.uint8)[begin - start : begin - start + nbytes]


_PIECES = 32
"""Maximum number of reads in flight. Each read uses a piece of the memory, so there are fewer if the memory has fewer
pages."""


def read_all(store: SwapStore, extents: Sequence[Extent], memory: memoryview) -> Iterator[SwapIOError | None]:
    """Read extents of any size, one after the other. The store remembers the checksums of the bytes that were read.

    Yields one result for each extent: the first failure of a read, or None.

    Raises:
        SwapTimeoutError: the disk did not answer before the deadline; the memory must never be used again.
    """
    longest = max(len(memory) // _PIECES // PAGE_BYTES * PAGE_BYTES, PAGE_BYTES)
    free = deque(memory[at : at + longest] for at in range(0, len(memory) - longest + 1, longest))
    pieces = (
        (extent, at, min(longest, extent.nbytes - at))
        for extent in extents
        for at in range(0, max(extent.nbytes, 1), longest)
    )
    reading: deque[tuple[Extent, int, int, memoryview, Transfer | None]] = deque()
    failure: SwapIOError | None = None
    following = next(pieces, None)
    try:
        while reading or following is not None:
            if following is not None and free:
                extent, at, nbytes = following
                view = free.popleft()
                started = store.read(extent, view[:nbytes], at=at, io_class="states", verify=False) if nbytes else None
                reading.append((extent, at, nbytes, view, started))
                following = next(pieces, None)
                continue
            extent, at, nbytes, view, transfer = reading[0]  # in `reading` until done, for the `finally` below
            try:
                if transfer is not None:
                    transfer.result()
                    if store.checksums:
                        store.file.remember(extent.offset + at, view[:nbytes])
            except SwapTimeoutError:
                raise
            except SwapIOError as error:
                failure = failure or error
            reading.popleft()
            free.append(view)
            if at + nbytes == extent.nbytes:
                yield failure
                failure = None
    finally:  # a caller that stops early may use the memory for something else
        with contextlib.suppress(SwapIOError):
            wait_all(transfer for *_, transfer in reading if transfer is not None)
