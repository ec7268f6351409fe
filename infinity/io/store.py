"""The store: one preallocated swap file per path, striped into one range of bytes, cut into extents."""

from __future__ import annotations

import errno
import logging
import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity import _native
from infinity.errors import ConfigError, SwapIOError, SwapTimeoutError
from infinity.io.directory import SwapDirectory
from infinity.io.engine import Transfer, error_of
from infinity.io.profile import profile_of
from infinity.sizes import PAGE_BYTES, format_bytes, round_up

logger = logging.getLogger(__name__)

STRIPE_BYTES = 1 << 20
_SHARES_SUM = 32  # stripes in a cycle: shares are right to a few percent
_PROBE_BYTES = 64 << 20


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
    """The open swap file of a run, striped over its paths. What was never written reads as zeros.

    Args:
        paths: directories; at least one.
        nbytes: size, all paths together.
        checksums: check every page read against what was written.

    Raises:
        SwapIOError: a file cannot be created or a disk is too full; nothing is left behind.
        StoreLockedError, ConfigError: see SwapDirectory.
    """

    def __init__(self, paths: Sequence[Path], nbytes: int, engine: _native.IOEngine, *, checksums: bool = True) -> None:
        self.engine = engine
        self.step = 0
        self.directories: list[SwapDirectory] = []
        self._members: list[_native.File] = []
        require_paths(paths)
        try:
            for path in paths:
                self.directories.append(SwapDirectory(path))
            self._members = [_create(directory) for directory in self.directories]
            self.shares = self._measure_shares()
            self.file = self._members[0]
            if len(self._members) > 1:
                self.file = _native.File.striped(self._members, self.shares, STRIPE_BYTES)
            self._reserve(nbytes)
            if checksums:
                self.file.keep_checksums(nbytes)
        except BaseException:
            self._close_members()
            raise

    def _measure_shares(self) -> list[int]:
        """How many stripes of a cycle each path holds: in proportion to its bandwidth, measured before or now."""
        if len(self._members) == 1:
            return [1]
        rates = []
        for directory, member in zip(self.directories, self._members, strict=True):
            profile = profile_of(directory.path)
            rates.append(profile.mixed_rate if profile is not None else _probe(self.engine, member))
        shares = shares_of(rates)
        for directory, rate, share in zip(self.directories, rates, shares, strict=True):
            logger.info("%s: %.2f GB/s, %d of %d stripes", directory.path, rate / 1e9, share, sum(shares))
        return shares

    def _reserve(self, nbytes: int) -> None:
        needed: dict[int, int] = {}  # by file system: two paths may share one
        for index, directory in enumerate(self.directories):
            device = os.stat(directory.path).st_dev
            needed[device] = needed.get(device, 0) + self.file.member_bytes(index, nbytes)
            if needed[device] > directory.free_bytes:
                raise _no_room(directory, needed[device], OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        try:
            self.file.preallocate(nbytes)
        except OSError as error:
            raise _no_room(self._named(error), nbytes, error) from error

    def _named(self, error: OSError) -> SwapDirectory:
        """The directory whose file the message is about; the first where none is named."""
        for directory in self.directories:
            if str(directory.swap_path) in str(error.strerror):
                return directory
        return self.directories[0]

    @property
    def numa_node(self) -> int:
        """The node all the disks are on; -1 where they are on several, or on none."""
        nodes = {directory.numa_node for directory in self.directories}
        return nodes.pop() if len(nodes) == 1 else -1

    def read(
        self, extent: Extent, into: _native.Buffer, *, at: int = 0, io_class: _native.IOClassName = "weights"
    ) -> Transfer:
        """Start reading bytes [at, at + len(into)) of an extent.

        Args:
            into: 4 KiB-aligned memory, a multiple of 4 KiB; must not be touched until the transfer is done.

        Raises (from `Transfer.result`):
            SwapIOError: the device failed; carries path, offset, length, errno, unit and state.
            SwapCorruptionError: a page differs from what was written there.
            SwapTimeoutError: the device was given up; `into` must never be used again.
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
        """Remove the swap files and let the directories go; the engine must be idle. Idempotent."""
        self.file.close()
        self._close_members()

    def _close_members(self) -> None:
        for member in self._members:
            member.close()
        for directory in self.directories:
            directory.close()


def shares_of(rates: Sequence[float]) -> list[int]:
    """Small integers in proportion to `rates`, none zero."""
    parts = [max(round(rate / sum(rates) * _SHARES_SUM), 1) for rate in rates]
    divisor = math.gcd(*parts)
    return [part // divisor for part in parts]


def _create(directory: SwapDirectory) -> _native.File:
    try:
        file = _native.File(str(directory.swap_path), create=True, numa_node=directory.numa_node)
    except OSError as error:
        raise SwapIOError(
            "creating", path=str(directory.swap_path), errno=error.errno or 0, detail=str(error)
        ) from error
    if not file.direct:
        logger.warning(
            "%s has no direct I/O in blocks of 4 KiB: transfers go through the page cache, which takes RAM and time",
            directory.path,
        )
    return file


def _no_room(directory: SwapDirectory, nbytes: int, error: OSError) -> SwapIOError:
    doing = f"reserving {format_bytes(nbytes)} ({format_bytes(directory.free_bytes)} are free)"
    return SwapIOError(
        doing, path=str(directory.swap_path), nbytes=nbytes, errno=error.errno or 0, detail=error.strerror or str(error)
    )


def _probe(engine: _native.IOEngine, file: _native.File) -> float:
    """Bytes per second of overwriting and reading the start of a fresh file, which is empty again afterwards.

    Raises:
        SwapIOError: the device failed, or has no room for 64 MiB.
    """
    memory = _native.Arena(_PROBE_BYTES, huge_pages=False).view(0, _PROBE_BYTES)
    try:
        file.preallocate(_PROBE_BYTES)
        _finish(engine.write(file, 0, memory))  # the first write to new blocks costs more than all later ones
        began = time.perf_counter()
        _finish(engine.write(file, 0, memory))
        _finish(engine.read(file, 0, memory))
        seconds = time.perf_counter() - began
        os.truncate(file.path, 0)
    except OSError as error:
        if isinstance(error, SwapIOError):
            raise
        raise SwapIOError("measuring", path=file.path, nbytes=_PROBE_BYTES, errno=error.errno or 0) from error
    return 2 * _PROBE_BYTES / seconds


def _finish(future: _native.IOFuture) -> None:
    future.wait()
    failure = future.failure()
    if failure is not None:
        raise error_of(failure)


def wait_all(transfers: Iterable[Transfer]) -> None:
    """Wait for every transfer, then raise the first failure: the memory of none is in use any more when this
    returns, unless that failure is a SwapTimeoutError."""
    failure: SwapIOError | None = None
    for transfer in reversed(list(transfers)):  # the last first: one long wait instead of a wake-up for each
        try:
            transfer.result()
        except SwapIOError as error:
            if not isinstance(failure, SwapTimeoutError) or isinstance(error, SwapTimeoutError):
                failure = error
    if failure is not None:
        raise failure


def require_paths(paths: Sequence[Path]) -> None:
    """Raises ConfigError when two paths are the same directory."""
    seen: dict[Path, Path] = {}
    for path in paths:
        resolved = path.expanduser().resolve()
        if resolved in seen:
            raise ConfigError(f"nvme.paths: {seen[resolved]} and {path} are the same directory; name each disk once")
        seen[resolved] = path
