"""The store: one preallocated swap file per path, striped into one range of bytes, cut into extents."""

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
from infinity.io import durable
from infinity.io.directory import HEADER_NAME, SwapDirectory, require_name
from infinity.io.engine import Transfer, error_of
from infinity.io.headers import headers_of
from infinity.io.manifest import Header, StoreRecord, write_header
from infinity.io.profile import profile_of
from infinity.sizes import format_bytes

logger = logging.getLogger(__name__)

STRIPE_BYTES = 1 << 20
_SHARES_SUM = 32  # stripes in a cycle: shares are right to a few percent
_PROBE_BYTES = 64 << 20


@dataclass(eq=False)
class Extent:
    """A place in the swap file for one state of one group of a unit's parameters.

    Attributes:
        unit, group, state: what it holds; `group` is an index.
        offsets: bytes from the start of the file, one per slot, each 4 KiB-aligned.
        nbytes: room in each slot, a multiple of 4 KiB.
        slot: the slot that holds the newest values.
    """

    unit: str
    group: int
    state: str
    offsets: tuple[int, ...]
    nbytes: int
    slot: int = 0

    @property
    def offset(self) -> int:
        return self.offsets[self.slot]


Mode = Literal["in place", "generations", "resume"]


class SwapStore:
    """The open swap file of a run, striped over its paths. What was never written reads as zeros.

    Args:
        paths: directories; at least one.
        nbytes: size, all paths together.
        scratch_bytes: room behind it for what no generation has; a run that is resumed may need another.
        checksums: check every page read against what was written.
        mode: "in place" removes the files at the end; "generations" keeps them once there is a generation; "resume"
            opens those that are there.
        spare_bytes: that must be free on the first path beside it.

    Attributes:
        rebuilt: what is wrong with the headers that were rebuilt.

    Raises:
        SwapIOError: a file cannot be created or a disk is too full; nothing is left behind.
        StoreLockedError, StoreNotEmptyError, ConfigError: see SwapDirectory.
        ResumeError: what is there is not the whole store of one run, or was updated in place.
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
    ) -> None:
        self.engine = engine
        self.step = 0
        self.nbytes = nbytes
        self._file_bytes = nbytes + scratch_bytes
        self.checksums = checksums
        self._spare_bytes = spare_bytes
        self.directories: list[SwapDirectory] = []
        self._members: list[_native.File] = []
        self._mode = mode
        self._unwritten: list[Header] = []
        self.rebuilt: list[str] = []
        require_paths(paths)
        try:
            for path in paths:
                self.directories.append(SwapDirectory(path, create=mode != "resume"))
            if mode == "resume":
                self._reopen()
            else:
                self._create(mode)
            if checksums:
                self.file.keep_checksums(self._file_bytes)
        except BaseException:
            self._close_members()
            raise

    def _create(self, mode: Literal["in place", "generations"]) -> None:
        for directory in self.directories:
            directory.require_replaceable()
        for directory in reversed(self.directories):  # the first says of the others whether anything was committed
            directory.make_room()
        self._members = [_open(directory, create=True) for directory in self.directories]
        self.shares = self._measure_shares()
        self._stripe(STRIPE_BYTES)
        self._reserve()
        self.run = uuid.uuid4().hex
        self.record = StoreRecord(
            created=now(),
            members=[str(directory.path) for directory in self.directories],
            shares=self.shares,
            stripe_bytes=STRIPE_BYTES,
            nbytes=self.nbytes,
        )
        for index, directory in enumerate(self.directories):
            header = Header(**dict(self.record), run=self.run, mode=mode, member=index)
            # The directory is synced with it, so what a manifest will name is there when the manifest is.
            durable.write_file(directory.header_path, write_header(header))
            for parent in directory.new_in:
                durable.sync_directory(parent)

    def _reopen(self) -> None:
        found = headers_of([directory.path for directory in self.directories])
        self._unwritten = [each.header for each in found if each.rebuilt]
        self.rebuilt = [each.rebuilt for each in found if each.rebuilt]
        for each in found:
            if each.rebuilt:
                logger.warning("%s", each.rebuilt)
        self.record, self.run, self.shares = found[0].header.store, found[0].header.run, found[0].header.shares
        if self.record.nbytes != self.nbytes:
            raise ResumeError(
                f"{self.directories[0].path} holds a store of {format_bytes(self.record.nbytes)}, and this model, "
                f"optimizer and config need one of {format_bytes(self.nbytes)}. Resume with those it was made with, or "
                "move the run with `infinity checkpoint export` and --from-checkpoint."
            )
        for directory in self.directories:
            if not directory.swap_path.exists():
                raise ResumeError(f"{directory.swap_path} is missing: the store was not finished, or is not whole")
        self._members = [_open(directory, create=False) for directory in self.directories]
        self._stripe(self.record.stripe_bytes)
        for index, directory in enumerate(self.directories):
            directory.remove_asides()
            directory.take_over()
            expected, size = self.file.member_bytes(index, self.nbytes), directory.swap_path.stat().st_size
            if size < expected:
                raise ResumeError(f"{directory.swap_path} was cut: it has {size} of {expected} bytes")
        if self._file_bytes > self.nbytes:
            self._preallocate()

    @property
    def proven(self) -> bool:
        """Whether the headers say whose the swap files are; else only a generation that is whole does."""
        return not self._unwritten

    def write_rebuilt_headers(self, whole: Iterable[Extent]) -> None:
        """Write the headers that were rebuilt. Each needs a proof that its swap file is of this run.

        Args:
            whole: extents all of whose bytes, in the newest slot, had the checksums of a generation.

        Raises:
            ResumeError: no byte of them lies in the swap file of a header; none was written.
            SwapIOError: one cannot be written; those before it are right, and stay.
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
                f"nothing of the generation lies in {' or '.join(sorted(unproven))}, whose header ({HEADER_NAME}) is "
                "damaged or missing, so nothing shows that this file is of the run. Name the run's own directories in "
                "nvme.paths; if they are those, move the run with `infinity checkpoint export` and --from-checkpoint."
            )
        while self._unwritten:
            header = self._unwritten[0]
            path = self.directories[header.member].header_path
            durable.write_file(path, write_header(header))
            logger.info("%s was written again", path)
            del self._unwritten[0]

    def _stripe(self, stripe_bytes: int) -> None:
        self.file = self._members[0]
        if len(self._members) > 1:
            self.file = _native.File.striped(self._members, self.shares, stripe_bytes)

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

    def _reserve(self) -> None:
        needed: dict[int, int] = {}  # by file system: two paths may share one
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

    def _named(self, error: OSError) -> SwapDirectory:
        """The directory whose file the message is about; the first where none is named."""
        for directory in self.directories:
            if str(directory.swap_path) in str(error.strerror):
                return directory
        return self.directories[0]

    def is_scratch(self, path: str, offset: int) -> bool:
        """Whether a byte of one of the files lies behind what generations have."""
        for index, directory in enumerate(self.directories):
            if str(directory.swap_path) == path:
                return offset >= self.file.member_bytes(index, self.nbytes)
        return False

    @property
    def numa_node(self) -> int:
        """The node all the disks are on; -1 where they are on several, or on none."""
        nodes = {directory.numa_node for directory in self.directories}
        return nodes.pop() if len(nodes) == 1 else -1

    def read(
        self,
        extent: Extent,
        into: _native.Buffer,
        *,
        at: int = 0,
        io_class: _native.IOClassName = "weights",
        verify: bool = True,
        slot: int | None = None,
        after: Transfer | None = None,
    ) -> Transfer:
        """Start reading bytes [at, at + len(into)) of an extent's newest values.

        Args:
            into: 4 KiB-aligned memory, a multiple of 4 KiB; must not be touched until the transfer is done.
            verify: compare every page with what was written there.
            slot: read this one instead of the newest values.
            after: begin when that is done, and fail as that does.

        Raises (from `Transfer.result`):
            SwapIOError: the device failed; carries path, offset, length, errno, unit and state.
            SwapCorruptionError: a page differs from what was written there.
            SwapTimeoutError: the device was given up; `into` must never be used again.
        """
        offset = extent.offset if slot is None else extent.offsets[slot]
        first = None if after is None else after.future
        future = self.engine.read(self.file, offset + at, into, io_class, verify=verify, after=first)
        return Transfer(future, extent.unit, extent.state, self.step)

    def write(
        self,
        extent: Extent,
        data: _native.Buffer,
        *,
        at: int = 0,
        io_class: _native.IOClassName = "weights",
        slot: int | None = None,
    ) -> Transfer:
        """Start writing, into `slot` or else over the newest values; as `read`."""
        offset = extent.offset if slot is None else extent.offsets[slot]
        future = self.engine.write(self.file, offset + at, data, io_class)
        return Transfer(future, extent.unit, extent.state, self.step)

    def require_sole_names(self) -> None:
        """Before something is written to files that were there.

        Raises:
            ResumeError: one has another name, too: a copy that was made with hard links would change with it.
        """
        for directory in self.directories:
            names = directory.swap_path.stat().st_nlink
            if names > 1:
                raise ResumeError(
                    f"{directory.swap_path} has {names} names (hard links), and what is under the others would change "
                    "with this run. Make a copy of its own: `cp --reflink=auto`, then rename it to this one."
                )

    def sync(self) -> Transfer:
        """Start making what was written and completed before durable."""
        return Transfer(self.engine.sync(self.file), "", "", self.step)

    @property
    def keeps(self) -> bool:
        """Whether the files stay when the store is closed."""
        if self._mode == "in place":
            return False
        if self._mode == "resume":
            return bool(self._members)
        try:
            return bool(self.directories[0].generations())
        except SwapIOError as error:
            logger.warning("%s The files stay.", error)
            return True

    def close(self, *, discard: bool = False) -> None:
        """Let the directories go; remove the files where there is no generation to keep, or all of them to `discard`.
        The engine must be idle. Idempotent."""
        self.file.close()
        self._close_members(discard=discard)

    def _close_members(self, *, discard: bool = False) -> None:
        for member in self._members:
            member.close()
        keep = bool(self.directories) and self.keeps and not discard
        for directory in reversed(self.directories):
            directory.close(keep=keep)


def now() -> str:
    """The time, as headers and manifests have it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def shares_of(rates: Sequence[float]) -> list[int]:
    """Small integers in proportion to `rates`, none zero."""
    parts = [max(round(rate / sum(rates) * _SHARES_SUM), 1) for rate in rates]
    divisor = math.gcd(*parts)
    return [part // divisor for part in parts]


def _open(directory: SwapDirectory, *, create: bool) -> _native.File:
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
    """Raises ConfigError when two paths are the same directory, by links or mounts."""
    seen: dict[object, Path] = {}
    for path in paths:
        require_name(path)
        place = os.path.realpath(path.expanduser())
        try:
            info = os.stat(place)
            place_id: object = (info.st_dev, info.st_ino)
        except OSError:
            place_id = place  # it will be made
        if place_id in seen:
            raise ConfigError(f"nvme.paths: {seen[place_id]} and {path} are the same directory; name each disk once")
        seen[place_id] = path
