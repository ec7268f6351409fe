"""Store of a run. It has one preallocated swap file for each path. The files are striped into one range of bytes, which
is divided into extents."""

from __future__ import annotations

import errno
import logging
import math
import os
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from infinity import _native
from infinity.errors import ConfigError, ResumeError, SwapIOError, SwapTimeoutError
from infinity.files import require_different
from infinity.io import atomic_file
from infinity.io.directory import HEADER_NAME, ReadDirectory, StoreDirectory, SwapDirectory, require_name
from infinity.io.disk_profile import profile_of
from infinity.io.engine import BackgroundWork, Transfer
from infinity.io.headers import headers_of
from infinity.io.manifest import StoreRecord, SwapFileHeader, write_header
from infinity.sizes import format_bytes

logger = logging.getLogger(__name__)

STRIPE_BYTES = 1 << 20
_SHARES_SUM = 32  # stripes per cycle; with this number, shares are accurate to a few percent
_PROBE_BYTES = 64 << 20


@dataclass(eq=False)
class Extent:
    """Range of the swap file that contains one state of one group of a unit's parameters.

    An extent has one or more copies in the file, so that new values do not overwrite the values of a generation.

    Attributes:
        unit, group, state: the state that the extent contains; `group` is an index.
        offsets: offset of each copy in bytes from the start of the file, aligned to 4 KiB.
        nbytes: size of each copy, a multiple of 4 KiB.
        newest_copy: index of the copy with the newest values.
    """

    unit: str
    group: int
    state: str
    offsets: tuple[int, ...]
    nbytes: int
    newest_copy: int = 0

    @property
    def offset(self) -> int:
        return self.offsets[self.newest_copy]

    def turn_to(self, copy: int) -> None:
        """Make `copy` the copy with the newest values."""
        self.newest_copy = copy


Mode = Literal["in place", "generations", "resume", "read", "share"]


class SwapStore:
    """Open swap file of a run, striped over its paths. Bytes that were never written read as zeros.

    Args:
        paths: directories; at least one.
        nbytes: size of all extents, over all paths.
        engine: engine that moves the data.
        scratch_bytes: bytes after the extents for data that belong to no generation; a resumed run may have another
            number.
        checksums: whether every page that is read is compared with the checksum of the page that was written.
        mode: "in place" removes the files at the end. "generations" keeps the files if a generation exists. "resume"
            opens existing files to continue their run. "read" opens existing files and changes nothing on disk. "share"
            is the same as "read", for a reader of files that a run has open; the run must know about the reader.
        spare_bytes: bytes that must be free on the first path in addition to the swap file, for manifests.
        run: id of the run to which a new store belongs; "" to make a new id.

    Attributes:
        rebuilt: for each rebuilt header, the problem with the header on disk.

    Raises:
        SwapIOError: a file cannot be created, or a disk is too full. No file of the new store exists afterwards.
        StoreLockedError, StoreNotEmptyError, ConfigError: see SwapDirectory.
        ResumeError: the directories do not have all parts of one run's store, or the store was updated in place.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        nbytes: int,
        engine: _native.IOEngine,
        *,
        scratch_bytes: int = 0,
        checksums: bool = True,
        mode: Mode = "in place",
        spare_bytes: int = 0,
        run: str = "",
    ) -> None:
        self.engine = engine
        self.run = run
        self._of_ranks = bool(run)
        self._step = 0
        self.nbytes = nbytes
        self._file_bytes = nbytes + scratch_bytes
        self.checksums = checksums
        self._spare_bytes = spare_bytes
        self.directories: list[StoreDirectory] = []
        self._members: list[_native.File] = []
        self._mode = mode
        self._unwritten: list[SwapFileHeader] = []
        self.rebuilt: list[str] = []
        require_paths(paths)
        try:
            held: list[SwapDirectory] = []
            for path in paths:
                if mode in ("read", "share"):
                    self.directories.append(ReadDirectory(path, shared=mode == "share"))
                else:
                    held.append(SwapDirectory(path, create=mode != "resume"))
                    self.directories.append(held[-1])
            if mode == "generations" or mode == "in place":
                self._create(held, mode)
            else:
                self._reopen()
            if mode == "resume":
                for directory in held:
                    directory.remove_asides()
                    directory.take_over()
                if scratch_bytes:
                    self._preallocate()
            if checksums:
                self.file.keep_checksums(self._file_bytes)
        except BaseException:
            self._close_members()
            raise

    def _create(self, held: Sequence[SwapDirectory], mode: Literal["in place", "generations"]) -> None:
        for directory in held:
            directory.require_replaceable()
        # Only the first directory shows whether generations need the other directories, so the first directory is
        # cleared last.
        for directory in reversed(held):
            directory.make_room()
        self._members = [_open(directory, create=True) for directory in self.directories]
        shares = self._measure_shares()
        self._stripe(shares, STRIPE_BYTES)
        self._reserve()
        self.run = self.run or new_run()
        self.record = StoreRecord(
            created=now(),
            members=[str(directory.path) for directory in self.directories],
            shares=shares,
            stripe_bytes=STRIPE_BYTES,
            nbytes=self.nbytes,
        )
        for index, directory in enumerate(held):
            header = SwapFileHeader(**dict(self.record), run=self.run, mode=mode, member=index)
            # This also syncs the directory, so that the swap file's name is durable before a manifest can refer to the
            # file.
            atomic_file.write_file(directory.header_path, write_header(header))
            for parent in directory.new_in:
                atomic_file.sync_directory(parent)

    def _reopen(self) -> None:
        found = headers_of([directory.path for directory in self.directories])
        rebuilt = [each for each in found if each.rebuilt]
        self._unwritten = [each.header for each in rebuilt]
        self.rebuilt = [each.rebuilt for each in rebuilt]
        for each in rebuilt:
            logger.warning("%s", each.rebuilt)
        self.record, self.run = found[0].header.store, found[0].header.run
        if self.record.nbytes != self.nbytes:
            raise ResumeError(
                f"{self.directories[0].path} holds a store of {format_bytes(self.record.nbytes)}, and this model, "
                f"optimizer and config need one of {format_bytes(self.nbytes)}. Resume with the model, optimizer and "
                "config that it was made with, or move the run with `infinity checkpoint export` and "
                "--from-checkpoint."
            )
        for directory in self.directories:
            if not directory.swap_path.exists():
                raise ResumeError(
                    f"{directory.swap_path} is missing: the run ended while it made its store, or the file was "
                    "removed. Put the file back, or start over."
                )
        self._members = [_open(directory, create=False) for directory in self.directories]
        self._stripe(self.record.shares, self.record.stripe_bytes)
        for index, directory in enumerate(self.directories):
            expected, size = self.file.member_bytes(index, self.nbytes), directory.swap_path.stat().st_size
            if size < expected:
                raise ResumeError(
                    f"{directory.swap_path} was truncated: it has {size} of {expected} bytes. Put back a complete "
                    "copy of the file."
                )

    @property
    def proven(self) -> bool:
        """Whether the headers on disk show that all swap files belong to this run. This is so if no header was
        rebuilt."""
        return not self._unwritten

    def write_rebuilt_headers(self, whole: Iterable[Extent]) -> None:
        """Write the rebuilt headers, if it is proven that the swap file in the directory of each header belongs to this
        run.

        Args:
            whole: extents whose newest values all have the checksums of a generation; these values are the proof.

        Raises:
            ResumeError: for one of the headers, the swap file in its directory has no byte of these extents. No header
                was written.
            SwapIOError: a header cannot be written. The headers that were written before are correct and still exist.
        """
        unproven = {str(self.directories[header.member].swap_path) for header in self._unwritten}
        for extent in whole:
            if not unproven:
                break
            stripe = self.record.stripe_bytes
            first, end = extent.offset, extent.offset + extent.nbytes
            for at in (first, *range(first // stripe * stripe + stripe, end, stripe)) if extent.nbytes else ():
                unproven.discard(self.file.locate(at)[0])
        if unproven:
            raise ResumeError(
                f"the generation has no data in {' or '.join(sorted(unproven))}, whose header ({HEADER_NAME}) is "
                "damaged or missing, so nothing proves that the swap file there belongs to the run. Check that "
                "nvme.paths names the run's own directories; if it does, move the run with `infinity checkpoint "
                "export` and --from-checkpoint."
            )
        while self._unwritten:
            header = self._unwritten[0]
            path = self.directories[header.member].header_path
            atomic_file.write_file(path, write_header(header))
            logger.info("wrote the rebuilt header %s", path)
            del self._unwritten[0]

    def _stripe(self, shares: Sequence[int], stripe_bytes: int) -> None:
        self.file = self._members[0]
        if len(self._members) > 1:
            self.file = _native.File.striped(self._members, shares, stripe_bytes)

    def _measure_shares(self) -> list[int]:
        """Return the number of stripes of each path in a cycle.

        The numbers are in proportion to the bandwidth of the paths. The bandwidth comes from the disk profile, or is
        measured now.
        """
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

    def _reserve(self) -> None:
        needed: dict[int, int] = {}  # by file system, because two paths may be on the same file system
        for index, directory in enumerate(self.directories):
            device = os.stat(directory.path).st_dev
            spare = self._spare_bytes if index == 0 else 0
            needed[device] = needed.get(device, 0) + self.file.member_bytes(index, self._file_bytes) + spare
            if needed[device] > directory.free_bytes:
                raise _no_room(directory, needed[device], OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        self._preallocate()

    def _preallocate(self) -> None:
        try:
            self.file.preallocate(self._file_bytes)
        except OSError as error:
            raise _no_room(self._named(error), self._file_bytes, error) from error

    def _named(self, error: OSError) -> StoreDirectory:
        """Return the directory whose swap file an error names; if the error names no swap file, the first directory."""
        for directory in self.directories:
            if str(directory.swap_path) in str(error.strerror):
                return directory
        return self.directories[0]

    def is_scratch(self, path: str, offset: int) -> bool:
        """Return whether a byte of a swap file is after all extents, in the space for data that belong to no
        generation."""
        for index, directory in enumerate(self.directories):
            if str(directory.swap_path) == path:
                return offset >= self.file.member_bytes(index, self.nbytes)
        return False

    @property
    def numa_node(self) -> int:
        """NUMA node of all disks; -1 if the disks are on several nodes or on no node."""
        nodes = {directory.numa_node for directory in self.directories}
        return nodes.pop() if len(nodes) == 1 else -1

    def begin_step(self, step: int) -> None:
        """Set the step that the errors of later transfers will name."""
        self._step = step

    def read(
        self,
        extent: Extent,
        into: _native.Buffer,
        *,
        at: int = 0,
        io_class: _native.IOClassName = "weights",
        verify: bool = True,
        copy_index: int | None = None,
        after: Transfer | None = None,
    ) -> Transfer:
        """Start reading bytes [at, at + len(into)) of an extent's newest values.

        Args:
            extent: the extent to read.
            into: memory aligned to 4 KiB, whose size is a multiple of 4 KiB. Nothing may use it until the transfer is
                done.
            at: bytes from the start of the copy.
            io_class: priority class of the request.
            verify: whether every page is compared with the checksum of the page that was written.
            copy_index: index of the copy to read; None: the copy with the newest values.
            after: transfer that must be done before this one starts. If it fails, this transfer fails with the same
                error.

        Raises (from `Transfer.result`):
            SwapIOError: the disk failed. The error has path, offset, length, errno, unit and state.
            SwapCorruptionError: a page differs from the page that was written.
            SwapTimeoutError: the disk did not answer before the deadline; `into` must never be used again.
        """
        file, offset = self.place(extent, copy_index)
        first = None if after is None else after.future
        return self.transfer(self.engine.read(file, offset + at, into, io_class, verify=verify, after=first), extent)

    def write(
        self,
        extent: Extent,
        data: _native.Buffer,
        *,
        at: int = 0,
        io_class: _native.IOClassName = "weights",
        copy_index: int | None = None,
        after: _native.IOFuture | None = None,
    ) -> Transfer:
        """Start writing to copy `copy_index` of an extent. By default, the newest values are overwritten.

        The arguments and errors are the same as for `read`.

        Args:
            extent: the extent to write to.
            data: memory aligned to 4 KiB, whose size is a multiple of 4 KiB. Nothing may change it until the transfer
                is done.
            at: bytes from the start of the copy.
            io_class: priority class of the request.
            copy_index: index of the copy to write; None: the copy with the newest values.
            after: request that must be done before this write starts. The write writes what `data` contains at that
                time. If the request fails, the write fails with the same error.
        """
        file, offset = self.place(extent, copy_index)
        return self.transfer(self.engine.write(file, offset + at, data, io_class, after=after), extent)

    def place(self, extent: Extent, copy_index: int | None) -> tuple[_native.File, int]:
        """Return the file and the offset of a copy of an extent, for native code.

        If `copy_index` is None, this is the copy with the newest values.
        """
        return self.file, extent.offset if copy_index is None else extent.offsets[copy_index]

    def transfer(self, future: _native.IOFuture, extent: Extent) -> Transfer:
        """Wrap a request of native code as a transfer whose errors name the extent."""
        return Transfer(future, extent.unit, extent.state, self._step)

    def require_sole_names(self) -> None:
        """Check that no swap file has a second name (a hard link). Call this before a run writes to files that it did
        not create.

        Raises:
            ResumeError: a file has a second name, for example in a copy of the directory that was made with hard links.
                A write would change the file under this name, too.
        """
        for directory in self.directories:
            names = directory.swap_path.stat().st_nlink
            if names > 1:
                raise ResumeError(
                    f"{directory.swap_path} has {names} names (hard links), and this run would change the file under "
                    "the other names, too. Copy it with `cp --reflink=auto`, and rename the copy to this name."
                )

    def sync(self) -> Transfer:
        """Start to make all completed writes durable."""
        return Transfer(self.engine.sync(self.file), step=self._step)

    @property
    def keeps(self) -> bool:
        """Whether the files are kept when the store is closed."""
        if self._mode == "in place":
            return False
        if self._mode in ("resume", "read", "share"):
            return bool(self._members)
        if self._of_ranks:
            return True  # other ranks may have begun a generation; the header shows that the file is of the same run
        try:
            return bool(self.directories[0].generations())
        except SwapIOError as error:
            logger.warning("%s The files are kept.", error)
            return True

    def close(self, *, discard: bool = False) -> None:
        """Unlock the directories. Remove the files if there is no generation to keep, or if `discard` is true.

        The engine must be idle. A second call does nothing.
        """
        self.file.close()
        self._close_members(discard=discard)

    def _close_members(self, *, discard: bool = False) -> None:
        for member in self._members:
            member.close()
        keep = bool(self.directories) and self.keeps and not discard
        for directory in reversed(self.directories):
            directory.close(keep=keep)


def new_run() -> str:
    """Return a new, unique run id."""
    return uuid.uuid4().hex


def now() -> str:
    """Return the current UTC time in the format of headers and manifests."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def shares_of(rates: Sequence[float]) -> list[int]:
    """Return small integers, all above zero, in proportion to `rates`."""
    parts = [max(round(rate / sum(rates) * _SHARES_SUM), 1) for rate in rates]
    divisor = math.gcd(*parts)
    return [part // divisor for part in parts]


def _open(directory: StoreDirectory, *, create: bool) -> _native.File:
    try:
        file = _native.File(str(directory.swap_path), create=create, numa_node=directory.numa_node)
    except OSError as error:
        raise SwapIOError(
            "creating" if create else "opening",
            path=str(directory.swap_path),
            errno=error.errno or 0,
            detail=str(error),
        ) from error
    if not file.direct:
        logger.warning(
            "%s does not support direct I/O in blocks of 4 KiB: transfers go through the page cache, which costs RAM "
            "and time",
            directory.path,
        )
    return file


def _no_room(directory: StoreDirectory, nbytes: int, error: OSError) -> SwapIOError:
    doing = f"reserving {format_bytes(nbytes)} ({format_bytes(directory.free_bytes)} are free)"
    return SwapIOError(
        doing,
        path=str(directory.swap_path),
        nbytes=nbytes,
        errno=error.errno or 0,
        detail=error.strerror or str(error),
        begun=False,
    )


def _probe(engine: _native.IOEngine, file: _native.File) -> float:
    """Measure the bytes per second of overwriting and reading the start of a new file. The file is empty afterwards.

    Raises:
        SwapIOError: the disk failed, or has no room for 64 MiB.
    """
    memory = _native.Arena(_PROBE_BYTES, huge_pages=False).view(0, _PROBE_BYTES)
    try:
        file.preallocate(_PROBE_BYTES)
        Transfer(engine.write(file, 0, memory)).result()  # the first write to a block takes longer
        began = time.perf_counter()
        Transfer(engine.write(file, 0, memory)).result()
        Transfer(engine.read(file, 0, memory)).result()
        seconds = time.perf_counter() - began
        os.truncate(file.path, 0)
    except OSError as error:
        if isinstance(error, SwapIOError):
            raise
        raise SwapIOError("measuring", path=file.path, nbytes=_PROBE_BYTES, errno=error.errno or 0) from error
    return 2 * _PROBE_BYTES / seconds


def wait_all(transfers: Iterable[BackgroundWork]) -> None:
    """Wait for every transfer. If transfers have failed, raise the first failure.

    After that, no transfer uses its memory any more, unless the failure is a SwapTimeoutError.
    """
    failure: SwapIOError | None = None
    for transfer in reversed(list(transfers)):  # the last one first: one long wait in place of many
        try:
            transfer.result()
        except SwapIOError as error:
            if not isinstance(failure, SwapTimeoutError) or isinstance(error, SwapTimeoutError):
                failure = error
    if failure is not None:
        raise failure


def require_paths(paths: Sequence[Path]) -> None:
    """Check the directories of nvme.paths.

    Raises ConfigError if a path cannot name a directory, or if two paths are the same.
    """
    for path in paths:
        require_name(path)
    try:
        require_different(paths)
    except ValueError as error:
        raise ConfigError(f"nvme.paths: {error}") from None
