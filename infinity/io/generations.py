"""Generations. A generation is all states after the same step; its manifest names the copy of each. This module makes a
generation durable, and finds the newest one that is whole.

[Note: why no crash loses a generation]
1. A copy that a kept manifest names is never written (`Generations.destination`).
2. A manifest is written only after an fdatasync of the swap files, which begins when all data of the generation have
   been written.
3. A manifest gets its name only when it is whole: it is written to another name, fsynced and renamed; then the
   directory is fsynced.
4. Only then are older manifests removed, and only then may the next step write (Commits).
5. A resumed run fsyncs the directory before it goes on from a manifest. Before it writes anything, it removes the
   manifests that it does not go on from, and fsyncs the directory again.
A power cut may bring back a manifest that was removed, and whose copies have been written since. Such a manifest is
older than one that is whole, and the next resume removes it.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from infinity.errors import DamagedFileError, ManifestError, ResumeError, SwapIOError, SwapTimeoutError
from infinity.io import durable
from infinity.io.directory import HEADER_NAME
from infinity.io.engine import Transfer
from infinity.io.manifest import (
    SUM_BLOCK_BYTES,
    SUM_BYTES,
    ExtentRecord,
    Manifest,
    read_kept,
    require_known,
    write_manifest,
)
from infinity.io.store import Extent, SwapStore, now, wait_all
from infinity.sizes import PAGE_BYTES

logger = logging.getLogger(__name__)

Used = TypeVar("Used")


@dataclass(frozen=True)
class Damage:
    """A piece of a generation that does not hold what was written there.

    Attributes:
        extent: that the piece is of.
        step: of the generation.
        path, offset, nbytes: bytes [offset, offset + nbytes) of the file `path`.
        cause: what is wrong, in words.
        error: the failure, if the piece could not be read.
    """

    extent: Extent | ExtentRecord
    step: int
    path: str
    offset: int
    nbytes: int
    cause: str
    error: SwapIOError | None = None

    def __str__(self) -> str:
        of = self.extent
        return (
            f"{of.state} of unit '{of.unit}' (group {of.group}), generation {self.step}: {self.path}, offset "
            f"{self.offset}, {self.nbytes} bytes: {self.cause}"
        )


class Generations:
    """The generations of a store: which are kept, and which copies they name.

    Args:
        extents: of all states, in layout order.
        keep: how many generations stay. Each extent has keep + 1 copies, or one if its state never changes.
    """

    def __init__(self, store: SwapStore, extents: Sequence[Extent], keep: int) -> None:
        self._store = store
        self._extents = list(extents)
        self._index = {id(extent): index for index, extent in enumerate(self._extents)}
        self._keep = keep
        self._kept: dict[int, list[int]] = {}  # by step, oldest first: the copy of each extent
        self._given_up: list[Path] = []

    @property
    def newest(self) -> int | None:
        """The step of the newest generation; None before the first."""
        return max(self._kept, default=None)

    def destination(self, extent: Extent) -> int:
        """The copy to write new values of a state to; never one that a generation names."""
        if extent.copy not in self._named(extent):
            return extent.copy
        free = self.spare(extent)
        if free is None:
            raise AssertionError(f"no free copy for {extent.state} of unit '{extent.unit}'")
        return free

    def spare(self, extent: Extent) -> int | None:
        """A copy that no generation names and that does not hold the newest values; None if there is none."""
        taken = self._named(extent) | {extent.copy}
        return next((copy for copy in range(len(extent.offsets)) if copy not in taken), None)

    def _named(self, extent: Extent) -> set[int]:
        index = self._index[id(extent)]
        return {copies[index] for copies in self._kept.values()}

    def make(self, step: int, facts: dict[str, Any], body: dict[str, Any]) -> Path:
        """Write the manifest of the newest values as generation `step`. The values must be durable already.

        Raises:
            SwapIOError: the generation was not made; the older ones are there.
            TypeError: `body` holds a value that a document cannot hold.
        """
        file = self._store.file
        sums = [file.block_sums(extent.offset, extent.nbytes) for extent in self._extents]
        manifest = Manifest(
            run=self._store.run,
            step=step,
            created=now(),
            extents=[
                ExtentRecord(
                    unit=extent.unit,
                    group=extent.group,
                    state=extent.state,
                    slot=extent.copy,
                    offset=extent.offset,
                    nbytes=extent.nbytes,
                )
                for extent in self._extents
            ],
            sums=b"".join(sums) if self._store.checksums else None,
            facts=facts,
            body=body,
            store=self._store.record,
        )
        directory = self._store.directories[0]
        path = directory.generation_path(step)
        durable.write_file(path, write_manifest(manifest))
        self._kept.pop(step, None)
        self._kept[step] = [extent.copy for extent in self._extents]
        for old in sorted(self._kept)[: -self._keep]:
            del self._kept[old]
            try:
                durable.remove(directory.generation_path(old))
            except SwapIOError as error:  # the new generation is durable; the old manifest does no harm
                logger.warning("%s", error)
        return path

    def recover(
        self, memory: memoryview, step: int | None = None, check: Callable[[Manifest], None] = lambda _: None
    ) -> Manifest:
        """Find the newest generation that is whole, and make its values the newest values of the extents.

        Every byte of the generation is read once, and the store remembers its checksums. Newer generations that are
        damaged are reported in the log; settle() removes their manifests.

        Args:
            memory: 4 KiB-aligned, for reading.
            step: take the generation of this step instead of the newest.
            check: raises ManifestError for a manifest that cannot be used.

        Raises:
            NewerVersionError: a newer infinity wrote one of the manifests, even one that is not asked for.
            ResumeError: no generation is whole, or there is none of `step`; says what is wrong with each. Or the
                generation does not prove a header that was rebuilt. Or a swap file has a second name.
            SwapIOError: a part of a generation cannot be read, or a rebuilt header cannot be written. The extents are
                as before, and the disk as well except for headers: try again, or give `step`.
        """
        directory = self._store.directories[0]
        self._store.require_sole_names()
        # A killed run may have left its last rename in the page cache only: make it durable before going on from it.
        durable.sync_directory(directory.path)
        found = directory.generations()
        require_known(found.values())  # settle() would remove those that this run does not go on from

        def point_to(manifest: Manifest) -> tuple[Manifest, list[Extent]]:
            self._require_fitting(manifest)
            check(manifest)
            for extent, record in zip(self._extents, manifest.extents, strict=True):
                extent.turn_to(record.slot)
            return manifest, self._extents

        before = [extent.copy for extent in self._extents]
        try:
            manifest = newest_whole(self._store, memory, step, point_to, "resume")
            self._store.write_rebuilt_headers(self._extents)
        except BaseException:
            for extent, copy in zip(self._extents, before, strict=True):
                extent.turn_to(copy)
            raise
        logger.info("resuming generation %d of %s, committed %s", manifest.step, directory.path, manifest.created)
        self._keep_with(manifest, found)
        return manifest

    def _require_fitting(self, manifest: Manifest) -> None:
        """Raises ManifestError for a manifest that does not fit this store's layout."""
        path = self._store.directories[0].generation_path(manifest.step)
        if len(manifest.extents) != len(self._extents):
            raise ManifestError(path, f"names {len(manifest.extents)} extents, the model has {len(self._extents)}")
        for extent, record in zip(self._extents, manifest.extents, strict=True):
            mine, its = (extent.unit, extent.group, extent.state), (record.unit, record.group, record.state)
            if mine != its or extent.nbytes != record.nbytes:
                raise ManifestError(
                    path,
                    f"has {its[2]} of unit '{its[0]}' (group {its[1]}, {record.nbytes} bytes) where the model has "
                    f"{mine[2]} of unit '{mine[0]}' (group {mine[1]}, {extent.nbytes} bytes)",
                )
            if record.slot >= len(extent.offsets) or extent.offsets[record.slot] != record.offset:
                problem = f"places {record.state} of unit '{record.unit}' at an offset that is not its own"
                raise ManifestError(path, problem)

    def _keep_with(self, chosen: Manifest, found: Mapping[int, Path]) -> None:
        """Keep the resumed generation and older ones. Newer ones, and older ones beyond `keep`, which a crash may have
        left, are given up."""
        self._kept = {chosen.step: [extent.copy for extent in self._extents]}
        self._given_up = [path for number, path in found.items() if number > chosen.step]
        older = {number: path for number, path in found.items() if number < chosen.step}
        for number, manifest in read_kept(older, self._store.run):
            _require_readable(manifest)
            try:
                if isinstance(manifest, ManifestError):
                    raise manifest
                self._require_fitting(manifest)
                if len(self._kept) < self._keep:
                    self._kept[number] = [record.slot for record in manifest.extents]
                    continue
            except ManifestError as error:
                logger.warning("%s", error)
            self._given_up.append(found[number])  # its copies were written since, or will be
        self._kept = dict(sorted(self._kept.items()))

    def settle(self) -> None:
        """Remove the manifests that recover() gave up, durably. To be called before anything is written.

        Raises:
            SwapIOError: a manifest cannot be removed.
        """
        if not self._given_up:
            return
        for path in self._given_up:
            logger.warning("removing %s: the run goes on from generation %s", path, self.newest)
            durable.remove(path)
        durable.sync_directory(self._store.directories[0].path)
        self._given_up = []


def newest_whole(
    store: SwapStore,
    memory: memoryview,
    step: int | None,
    use: Callable[[Manifest], tuple[Used, Sequence[Extent]]],
    doing: str,
) -> Used:
    """What `use` makes of the newest generation that is whole, or of that of `step`. Every byte of it is read.

    Args:
        memory: 4 KiB-aligned, for reading.
        use: returns its result and the extents to read, each in the copy that the manifest names; raises ResumeError
            for a manifest that it cannot use.
        doing: "resume" or "export", for messages.

    Raises:
        ResumeError: there is none that is whole; says what is wrong with each.
        SwapIOError: a part of one cannot be read now. It may be whole: try again, or give `step`.
    """
    directory = store.directories[0]
    found = directory.generations()
    if step is not None and step not in found:
        there = ", ".join(map(str, found)) or "none"
        raise ResumeError(f"{directory.path} has no generation {step}; there are: {there}")
    problems: list[str] = []
    for number, manifest in read_kept(found if step is None else {step: found[step]}, store.run):
        _require_readable(manifest)
        try:
            if isinstance(manifest, ManifestError):
                raise manifest
            _require_of(store, manifest)
            _require_provable(store, manifest)
            used, extents = use(manifest)
            _require_undamaged(list(verify(store, extents, manifest, memory)))
            return used
        except ResumeError as error:
            problems.append(f"generation {number} cannot be used: {error}")
            logger.warning("%s", problems[-1])
    wrong = "; ".join(problems) or "no generation was committed before the run ended: start it anew"
    wrong = "; ".join([wrong, *store.rebuilt])
    raise ResumeError(f"nothing to {doing} in {directory.path}: {wrong}")


def _require_readable(manifest: Manifest | ManifestError) -> None:
    """Raises ResumeError for a manifest that exists and cannot be read now: the generation may be whole, and must not
    be given up."""
    if isinstance(manifest, ManifestError) and isinstance(manifest.__cause__, OSError):
        if isinstance(manifest, DamagedFileError):
            return  # the file is gone
        raise ResumeError(
            f"{manifest}. Try again; where that does not help, remove the file to go on without that generation."
        ) from manifest


def _require_of(store: SwapStore, manifest: Manifest) -> None:
    """Raises ManifestError where a manifest and the headers describe the store differently."""
    mine, its = (
        each and each.model_copy(update={"created": "", "members": []}) for each in (store.record, manifest.store)
    )
    if its is not None and its != mine:
        path = store.directories[0].generation_path(manifest.step)
        raise ManifestError(path, f"describes the store's size or stripes differently than {HEADER_NAME}")


def _require_provable(store: SwapStore, manifest: Manifest) -> None:
    """Raises ResumeError where a header was rebuilt and no checksums can show that the swap files belong to the run."""
    if store.proven or (manifest.sums is not None and store.checksums):
        return
    if manifest.sums is None:
        todo = "the generation was made without (nvme.checksums: false). Put back a copy of the header, or begin anew"
    else:
        todo = "the generation has checksums, and nvme.checksums is false: set nvme.checksums: true"
    raise ResumeError(f"a header is damaged, so only checksums can show that the swap files belong to the run; {todo}")


def _require_undamaged(damage: Sequence[Damage]) -> None:
    """Raises ResumeError that names the damage; where a part could not be read, the SwapIOError of the reading."""
    for each in damage:
        if each.error is not None:
            raise each.error
    if damage:
        more = f", and {len(damage) - 3} more" if len(damage) > 3 else ""
        raise ResumeError("; ".join(map(str, damage[:3])) + more)


def verify(store: SwapStore, extents: Sequence[Extent], manifest: Manifest, memory: memoryview) -> Iterator[Damage]:
    """Read all of a generation and yield each piece that is damaged. Without checksums only pieces that cannot be read
    are found.

    Args:
        extents: those of the manifest, each in the copy that the manifest names.
        memory: 4 KiB-aligned; several pieces are read into it at the same time.
    """
    for extent, sums, error in zip(extents, manifest.sums_by_extent(), _read_all(store, extents, memory), strict=True):
        if error is not None:
            cause = f"cannot be read: {error.cause}"
            yield Damage(extent, manifest.step, error.path, error.offset, error.nbytes, cause, error)
            continue
        found = store.file.block_sums(extent.offset, extent.nbytes)
        if sums is None or not found or found == sums:
            continue
        for at in range(0, len(sums), SUM_BYTES):
            if found[at : at + SUM_BYTES] != sums[at : at + SUM_BYTES]:
                start = at // SUM_BYTES * SUM_BLOCK_BYTES
                nbytes = min(SUM_BLOCK_BYTES, extent.nbytes - start)
                path, offset = store.file.locate(extent.offset + start)
                cause = "does not have the checksum of what was written"
                yield Damage(extent, manifest.step, path, offset, nbytes, cause)


def _read_all(store: SwapStore, extents: Sequence[Extent], memory: memoryview) -> Iterator[SwapIOError | None]:
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


def extents_of(manifest: Manifest) -> list[Extent]:
    """The extents of a manifest, each with only the copy that the manifest names."""
    return [
        Extent(record.unit, record.group, record.state, (record.offset,), record.nbytes) for record in manifest.extents
    ]
