"""Search for an undamaged generation. Every byte of a generation is read and compared with the checksums."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from infinity.errors import DamagedFileError, ManifestError, ResumeError, SwapIOError
from infinity.io.directory import HEADER_NAME, StoreDirectory
from infinity.io.extent_reading import read_all
from infinity.io.generation_pins import GenerationPin, digest_of, pins_text, read_pins
from infinity.io.manifest import SUM_BLOCK_BYTES, SUM_BYTES, ExtentRecord, Manifest, manifest_bytes, read_own
from infinity.io.store import Extent, SwapStore

logger = logging.getLogger(__name__)

Used = TypeVar("Used")

Name = tuple[int, str]
"""Name of a generation, the same on all ranks: the step, and the id of the ranks that made the generation
(Manifest.life)."""


def name_of(manifest: Manifest) -> Name:
    return manifest.step, manifest.life or ""


@dataclass(frozen=True)
class ResumeCandidate:
    """Generation in one rank's store from which a run may resume.

    Attributes:
        name: name of the generation.
        kept: whether the run keeps the generation; False: the generation exists only because checkpoint folders pin it.
        path: path of the generation's manifest.
    """

    name: Name
    kept: bool
    path: Path

    @property
    def step(self) -> int:
        return self.name[0]


@dataclass(frozen=True)
class GenerationDamage:
    """Damaged piece of a generation: its bytes differ from the bytes that were written, or cannot be read.

    Attributes:
        extent: the extent to which the piece belongs.
        step: step of the generation.
        path, offset, nbytes: bytes [offset, offset + nbytes) of the file `path`.
        cause: the problem, in words.
        error: the error of the read if the piece could not be read; otherwise None.
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


class _ContainsEverything:
    """Container for which `in` is always true."""

    def __contains__(self, one: object) -> bool:
        return True


@dataclass(frozen=True)
class EligibleGenerations:
    """Generations from which a run may resume; by default, all existing generations.

    Attributes:
        names: names of the generations.
        folders: checkpoint folders whose pins the resumed run keeps. It drops all other pins.
        candidate: the generation from which the run resumes; None: the newest generation, or the generation that a
            checkpoint folder names.
    """

    names: Container[Name] = _ContainsEverything()
    folders: Container[str] = _ContainsEverything()
    candidate: ResumeCandidate | None = None


ANY = EligibleGenerations()


def newest_whole(
    store: SwapStore,
    memory: memoryview,
    step: int | None,
    use: Callable[[Manifest, Path], tuple[Used, Sequence[Extent]]],
    doing: str,
    digest: str | None = None,
    only: ResumeCandidate | None = None,
) -> Used:
    """Find an undamaged generation, and return the result of `use` for it. Every byte of the generation is read.

    This is the newest undamaged generation, or the generation that `step`, `digest` or `only` names.

    Args:
        store: the store to search.
        memory: 4 KiB-aligned buffer for reading.
        step: take the generation of this step.
        use: function that is called with a manifest and its path. It returns a result and the extents to read, each
            with the copy that the manifest names. It raises ResumeError for a manifest that cannot be used.
        doing: "resume" or "export", for messages.
        digest: take the pinned generation with this digest.
        only: take this generation.

    Raises:
        ResumeError: all candidates are damaged, or there is no candidate; the message names the problem of each
            candidate.
        SwapIOError: a part of a candidate cannot be read at present. The candidate may be undamaged, so try again, or
            pass `step`.
    """
    directory = store.directories[0]
    problems: list[str] = []
    candidates = _candidates(directory, store.run, step, digest) if only is None else [(only.step, only.path)]
    for number, path in candidates:
        try:
            manifest = read_own(path, number, store.run)
            _require_of(store, manifest)
            _require_provable(store, manifest)
            used, extents = use(manifest, path)
            _require_undamaged(list(verify(store, extents, manifest, memory)))
            return used
        except ResumeError as error:
            require_readable(error)
            problems.append(f"generation {number} cannot be used: {error}")
            logger.warning("%s", problems[-1])
    wrong = "; ".join(problems) or "no generation was committed before the run ended: start it from the beginning"
    wrong = "; ".join([wrong, *store.rebuilt])
    raise ResumeError(f"nothing to {doing} in {directory.path}: {wrong}")


def _candidates(directory: StoreDirectory, run: str, step: int | None, digest: str | None) -> list[tuple[int, Path]]:
    """Return the manifests to try, each with its step.

    These are the manifests of kept generations, newest first, and then the manifests of pinned generations that are not
    newer than the newest kept generation. If a generation was requested, only its manifest is returned.

    Raises:
        ResumeError: the requested generation does not exist, or several generations match.
    """
    kept, pins, pinned = _there(directory, run)
    if digest is not None:
        if digest not in pinned:
            raise ResumeError(
                f"the generation of the checkpoint folder is not in {directory.path} any more: it was unpinned, or the "
                f"run was removed. Generations pinned there: {pins_text(pins) or 'none'}."
            )
        return [pinned[digest]]
    if step is None:
        return [*kept.items(), *_not_newer(kept, pinned)]
    found = {name: path for name, (number, path) in pinned.items() if number == step}
    if step in kept:
        try:
            found[digest_of(manifest_bytes(kept[step]))] = kept[step]
        except ManifestError:
            found = found or {"": kept[step]}  # the pinned generation of that step is probably undamaged
    if not found:
        there = ", ".join(map(str, kept)) or "none"
        there += f"; pinned: {pins_text(pins)}" if pins else ""
        raise ResumeError(f"{directory.path} has no generation {step}; it has: {there}")
    if len(found) > 1:
        raise ResumeError(
            f"{directory.path} has {len(found)} generations {step}, because a run was resumed from an earlier step and "
            f"reached step {step} again; pins: {pins_text(pins)}. Choose one with folder=, or unpin those that are not "
            "needed."
        )
    return [(step, path) for path in found.values()]


def _there(
    directory: StoreDirectory, run: str
) -> tuple[dict[int, Path], list[GenerationPin], dict[str, tuple[int, Path]]]:
    """Return the manifests, pins and pinned generations in a store.

    Returns:
        The manifests of kept generations by step, newest first; the pins; and a dict with the step and the manifest of
        each pinned generation, by digest, newest first.
    """
    pins = read_pins(directory.path, run)
    pinned = {pin.digest: (pin.step, directory.path / pin.manifest_name) for pin in pins}
    newest_first = sorted(pinned.items(), key=lambda item: -item[1][0])
    return directory.generations(), pins, {name: each for name, each in newest_first if each[1].exists()}


def _not_newer(kept: Mapping[int, Path], pinned: Mapping[str, tuple[int, Path]]) -> list[tuple[int, Path]]:
    """Return the pinned generations that are tried when no kept generation is usable.

    These generations are not newer than the newest kept generation.
    """
    newest = max(kept, default=None)
    return [each for each in pinned.values() if newest is None or each[0] <= newest]


def candidates(directory: StoreDirectory, run: str, step: int | None) -> list[ResumeCandidate]:
    """Return the generations from which a rank may resume: all generations in its store, or all generations of `step`.

    Each generation occurs only once. A generation with a damaged manifest is left out, with a warning.

    Raises:
        ResumeError: a manifest cannot be read at present.
    """
    kept, _, pinned = _there(directory, run)
    others = list(pinned.values()) if step is not None else _not_newer(kept, pinned)
    found: dict[Name, ResumeCandidate] = {}
    for is_kept, places in ((True, list(kept.items())), (False, others)):
        for number, path in places:
            if step not in (None, number):
                continue
            try:
                name = name_of(read_own(path, number, run))
                found.setdefault(name, ResumeCandidate(name, is_kept, path))
            except ManifestError as error:
                require_readable(error)
                logger.warning("%s", error)
    return list(found.values())


def common_candidates(told: Sequence[Iterable[tuple[Name, bool]]]) -> list[Name]:
    """Return the generations that all ranks have, in the order in which a run should try them.

    The generations that all ranks keep come first, and the other generations follow. In both parts the newest
    generation is first.

    Args:
        told: for each rank its generations, each with a bool: whether the rank keeps the generation.
    """
    every = [dict(each) for each in told]
    names = set.intersection(*(set(each) for each in every))
    return sorted(names, key=lambda name: (all(each[name] for each in every), name[0]), reverse=True)


def require_one(names: Sequence[Name], step: int | None, place: Path) -> None:
    """Raise ResumeError if a step was requested and the ranks have several generations of this step."""
    if step is not None and len(names) > 1:
        raise ResumeError(
            f"{place} has {len(names)} generations {step}, because a run was resumed from an earlier step and reached "
            f"step {step} again. Choose one with folder=, or unpin those that are not needed."
        )


def require_readable(error: ResumeError) -> None:
    """Raise ResumeError if `error` says that an existing manifest cannot be read at present.

    The generation of such a manifest may be undamaged, so a resumed run must not remove it.
    """
    if isinstance(error, ManifestError) and isinstance(error.__cause__, OSError):
        if isinstance(error, DamagedFileError):
            return  # the file is gone
        raise ResumeError(
            f"{error}. Try again; if that does not help, remove the file to resume without that generation."
        ) from error


def _require_of(store: SwapStore, manifest: Manifest) -> None:
    """Raise ManifestError if a manifest and the headers describe the store differently."""
    mine, its = (
        each and each.model_copy(update={"created": "", "members": []}) for each in (store.record, manifest.store)
    )
    if its is not None and its != mine:
        path = store.directories[0].generation_path(manifest.step)
        raise ManifestError(path, f"describes the store's size or stripes differently than {HEADER_NAME}")


def _require_provable(store: SwapStore, manifest: Manifest) -> None:
    """Raise ResumeError if a header was rebuilt and the generation has no checksums that could show that the swap files
    belong to the run."""
    if store.proven or (manifest.sums is not None and store.checksums):
        return
    if manifest.sums is None:
        todo = "the generation was made without checksums (nvme.checksums: false). Put back the header, or start over"
    else:
        todo = "the generation has checksums, and nvme.checksums is false: set nvme.checksums: true"
    raise ResumeError(f"a header is damaged, so only checksums can show that the swap files belong to the run; {todo}")


def _require_undamaged(damage: Sequence[GenerationDamage]) -> None:
    """If there is damage, raise a ResumeError that names it. If a part could not be read, raise its SwapIOError
    instead."""
    for each in damage:
        if each.error is not None:
            raise each.error
    if damage:
        more = f", and {len(damage) - 3} more" if len(damage) > 3 else ""
        raise ResumeError("; ".join(map(str, damage[:3])) + more)


def verify(
    store: SwapStore, extents: Sequence[Extent], manifest: Manifest, memory: memoryview
) -> Iterator[GenerationDamage]:
    """Read a generation completely, and yield each damaged piece.

    Without checksums, only pieces that cannot be read are found.

    Args:
        store: the store of the generation.
        extents: extents of the manifest, each in the copy that the manifest names.
        manifest: manifest of the generation.
        memory: 4 KiB-aligned buffer into which several pieces are read at the same time.
    """
    for extent, sums, error in zip(extents, manifest.sums_by_extent(), read_all(store, extents, memory), strict=True):
        if error is not None:
            cause = f"cannot be read: {error.cause}"
            yield GenerationDamage(extent, manifest.step, error.path, error.offset, error.nbytes, cause, error)
            continue
        found = store.file.block_sums(extent.offset, extent.nbytes)
        if sums is None or not found or found == sums:
            continue
        for at in range(0, len(sums), SUM_BYTES):
            if found[at : at + SUM_BYTES] != sums[at : at + SUM_BYTES]:
                start = at // SUM_BYTES * SUM_BLOCK_BYTES
                nbytes = min(SUM_BLOCK_BYTES, extent.nbytes - start)
                path, offset = store.file.locate(extent.offset + start)
                cause = "does not have the checksum of the data that was written"
                yield GenerationDamage(extent, manifest.step, path, offset, nbytes, cause)


def extents_of(manifest: Manifest) -> list[Extent]:
    """Return the extents of a manifest, each with only the copy that the manifest names."""
    return [
        Extent(record.unit, record.group, record.state, (record.offset,), record.nbytes) for record in manifest.extents
    ]
