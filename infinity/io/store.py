"""The store: one preallocated swap file, cut into extents."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from infinity import _native
from infinity.errors import SwapIOError
from infinity.io.directory import SwapDirectory
from infinity.io.engine import Transfer
from infinity.sizes import PAGE_BYTES, format_bytes, round_up


@dataclass(frozen=True)
class Extent:
    """A range of the swap file that holds one state of one unit.

    Attributes:
        unit, state: what it holds.
        offsets: bytes from the start of the file, one per slot, each 4 KiB-aligned.
        nbytes: room in each slot, a multiple of 4 KiB.
        slot: the slot in use.
    """

    unit: str
    state: str
    offsets: tuple[int, ...]
    nbytes: int
    slot: int = 0

    @property
    def offset(self) -> int:
        return self.offsets[self.slot]


class ExtentMap:
    """Hands out extents before the file exists, so that its size is known and reserved at once."""

    def __init__(self) -> None:
        self.nbytes = 0

    def add(self, unit: str, state: str, nbytes: int, *, slots: int = 1) -> Extent:
        nbytes = round_up(nbytes, PAGE_BYTES)
        offsets = tuple(self.nbytes + index * nbytes for index in range(slots))
        self.nbytes += slots * nbytes
        return Extent(unit, state, offsets, nbytes)


class SwapStore:
    """The open swap file of a run. What was never written reads as zeros.

    Raises:
        SwapIOError: the file cannot be created or the disk is too full; nothing is left behind.
        StoreLockedError, ConfigError: see SwapDirectory.
    """

    def __init__(self, path: Path, nbytes: int, engine: _native.IOEngine) -> None:
        self.engine = engine
        self.directory = SwapDirectory(path)
        self.step = 0
        file_path = str(self.directory.swap_path)
        try:
            if nbytes > self.directory.free_bytes:
                raise OSError(errno.ENOSPC, "")
            self.file = _native.File(file_path, create=True)
            self.file.preallocate(nbytes)
        except OSError as error:
            free = format_bytes(self.directory.free_bytes)
            self.directory.close()
            code = error.errno or 0
            detail = f"reserving {format_bytes(nbytes)} ({free} are free)"
            raise SwapIOError(detail, path=file_path, nbytes=nbytes, errno=code, detail=str(error)) from error

    def read(
        self, extent: Extent, into: _native.Buffer, *, at: int = 0, io_class: _native.IOClassName = "weights"
    ) -> Transfer:
        """Start reading bytes [at, at + len(into)) of an extent.

        Args:
            into: 4 KiB-aligned memory, a multiple of 4 KiB; must not be touched until the transfer is done.

        Raises (from `Transfer.result`):
            SwapIOError: the device failed; carries path, offset, length, errno, unit and state.
        """
        future = self.engine.read(self.file, extent.offset + at, into, io_class)
        return Transfer(future, extent.unit, extent.state, self.step)

    def write(
        self, extent: Extent, data: _native.Buffer, *, at: int = 0, io_class: _native.IOClassName = "weights"
    ) -> Transfer:
        """Start writing; as `read`."""
        future = self.engine.write(self.file, extent.offset + at, data, io_class)
        return Transfer(future, extent.unit, extent.state, self.step)

    def close(self) -> None:
        """Remove the swap file and let the directory go; the engine must be idle. Idempotent."""
        self.file.close()
        self.directory.close()


def wait_all(transfers: Iterable[Transfer]) -> None:
    """Wait for every transfer, then raise the first failure: the memory of none is in use any more when this
    returns."""
    failure: SwapIOError | None = None
    for transfer in transfers:
        try:
            transfer.result()
        except SwapIOError as error:
            failure = failure or error
    if failure is not None:
        raise failure
