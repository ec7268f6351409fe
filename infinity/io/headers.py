"""Headers of a store's members: read from disk, or rebuilt if they are damaged or missing.

[Note: what a header is rebuilt from]
A member is one of the store's directories, with its swap file. A header is rebuilt from the header of another member,
or from the newest manifest that can be read. Both contain all data of a header. If a header and the generations name
different runs, the header does not belong to this store, and is rebuilt in the same way as a damaged header. A rebuilt
header does not prove that the swap file in its directory belongs to the run. Only the bytes in the swap file can prove
this. A rebuilt header is therefore kept in memory until a complete generation has been read and all checksums were
right (Generations.recover). After this check, the header is written, if some of the generation's bytes are in the swap
file in its directory. Generations without checksums are refused. A store that is updated in place has no manifests, so
its header is never rebuilt as the header of a store that can be resumed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.errors import DamagedFileError, DirtyStoreError, NoStoreError, ResumeError
from infinity.io.directory import HEADER_NAME, SWAP_NAME, generations_in
from infinity.io.manifest import Manifest, SwapFileHeader, read_header, read_kept, require_known

_INSTEAD = "a resumed run writes it again, rebuilt from"


@dataclass(frozen=True)
class FoundHeader:
    """Header of a member, which was read or rebuilt.

    Attributes:
        header: the header.
        rebuilt: the problem of the header on disk, and the source from which the header was rebuilt; "" if the header
            was read.
    """

    header: SwapFileHeader
    rebuilt: str = ""


def header_in(path: Path) -> FoundHeader:
    """Return the header in one directory of a store. The directory need not be locked.

    Raises:
        ResumeError: there is no store.
        DamagedFileError: the header is damaged and cannot be rebuilt.
        ManifestError: the header, or the manifest from which it would be rebuilt, cannot be read or understood.
    """
    (found,) = _read_or_rebuilt([path])
    return found


def members_of(path: Path) -> list[Path]:
    """Return all directories of the store to which `path` belongs, in the store's order.

    Raises:
        ResumeError: there is no store, or the store was copied or moved. The header of a copied or moved store names
            directories that are not its parts.
        ManifestError: see header_in.
    """
    header = header_in(path).header
    named = [Path(name) for name in header.members]
    if len(named) == 1:
        return [path]
    there = named[header.member]
    if not is_there(header, path):
        raise ResumeError(
            f"{path} was {there} when the store was made: the directory was copied or moved, and its header names the "
            f"old places of the other parts. Name the present directories of all {len(named)} parts, in the order of "
            f"{', '.join(header.members)}: as arguments of `infinity checkpoint`, or as nvme.paths of the --config of "
            "a resume."
        )
    return named


def is_there(header: SwapFileHeader, path: Path) -> bool:
    """Return whether the header in `path` names `path` as the directory of its member. A copied or moved store has
    other paths."""
    return os.path.realpath(header.members[header.member]) == os.path.realpath(path)


def headers_of(paths: Sequence[Path]) -> list[FoundHeader]:
    """Return the headers of a store's members, in the order of `paths`.

    Raises:
        ResumeError: a header belongs to another run, is damaged and cannot be rebuilt, or cannot be read or understood.
            Also raised if the paths are not all directories of the store in the store's order.
        DirtyStoreError: the store was updated in place.
    """
    found = _read_or_rebuilt(paths)
    _require_one_store(paths, [each.header for each in found])
    return found


def _read_or_rebuilt(paths: Sequence[Path]) -> list[FoundHeader]:
    read = _own(paths)
    source = next((header for header in read if isinstance(header, SwapFileHeader)), None)
    found: list[FoundHeader] = []
    for index, (path, header) in enumerate(zip(paths, read, strict=True)):
        found.append(
            FoundHeader(header) if isinstance(header, SwapFileHeader) else _rebuild(path, index, header, source)
        )
        source = source or found[-1].header
    return found


def _own(paths: Sequence[Path]) -> list[SwapFileHeader | DamagedFileError]:
    """Read the headers of all members of a store. The generations of the store are in the first member's directory.

    A header that does not name the run of the generations counts as damaged.
    """
    read = [_read(path) for path in paths]
    runs = _runs_in(
        paths[0], {each.run for each in read if isinstance(each, SwapFileHeader) and each.mode == "generations"}
    )
    for index, (path, each) in enumerate(zip(paths, read, strict=True)):
        if isinstance(each, SwapFileHeader) and each.mode == "generations" and len(runs) == 1 and each.run not in runs:
            beside = "the generations beside it" if index == 0 else f"the generations in {paths[0]}"
            problem = f"belongs to run {each.run[:8]}, and {beside} belong to run {min(runs)[:8]}"
            read[index] = DamagedFileError(path / HEADER_NAME, problem)
    return read


def _runs_in(path: Path, wanted: set[str]) -> set[str]:
    """Return the runs of the generations in a directory. Reading ends when all runs in `wanted` are found."""
    runs: set[str] = set()
    for _, manifest in read_kept(generations_in(path)) if wanted else ():
        if isinstance(manifest, Manifest):
            runs.add(manifest.run)
        if wanted <= runs:
            break
    return runs


def _read(path: Path) -> SwapFileHeader | DamagedFileError:
    """Return the header of a directory, or a description of how the header is damaged.

    Raises:
        NoStoreError: the directory contains neither a header nor a swap file.
        ManifestError: the header cannot be read at present, or this version does not understand the header. Another
            attempt or another version may be able to read the header, so it must not be removed.
    """
    try:
        return read_header(path / HEADER_NAME)
    except DamagedFileError as error:
        if os.path.lexists(path / HEADER_NAME) or os.path.lexists(path / SWAP_NAME):
            return error
        raise NoStoreError(f"{path} holds no store of infinity (there is no {HEADER_NAME})") from None


def _rebuild(path: Path, member: int, damage: DamagedFileError, source: SwapFileHeader | None) -> FoundHeader:
    """Rebuild a damaged header. Raises DamagedFileError if there is no source from which the header can be rebuilt."""
    if source is not None:
        header = source.model_copy(update={"member": member})
        return FoundHeader(header, f"{damage}; {_INSTEAD} the header of another part of the store")
    require_known(generations_in(path).values())
    reason = ""  # the reason why the newest generation cannot be the source
    for number, manifest in read_kept(generations_in(path)):
        if isinstance(manifest, Manifest) and manifest.store is not None:
            header = SwapFileHeader(**dict(manifest.store), run=manifest.run, mode="generations", member=member)
            return FoundHeader(header, f"{damage}; {_INSTEAD} generation {number}")
        old = f"generation {number} was written by an older infinity, whose manifests hold no header"
        reason = reason or (old if isinstance(manifest, Manifest) else str(manifest))
    reason = reason or "its directory has no generation"
    raise DamagedFileError(path / HEADER_NAME, f"{damage.problem}; it cannot be rebuilt: {reason}")


def _require_one_store(paths: Sequence[Path], headers: Sequence[SwapFileHeader]) -> None:
    first = headers[0]
    if any(header.mode == "in place" for header in headers):
        raise DirtyStoreError(
            f"the store in {paths[0]} was updated in place, without commits: its states do not belong to one step and "
            "cannot be resumed. Start again from a saved model; with commit_every: 1 a run can be resumed."
        )
    for index, (path, header) in enumerate(zip(paths, headers, strict=True)):
        mine, its = ((each.run, each.store.model_copy(update={"created": ""})) for each in (first, header))
        if mine != its:
            raise ResumeError(f"{path} and {paths[0]} hold parts of different runs")
        if header.member != index or len(header.members) != len(paths):
            raise ResumeError(
                f"{path} is part {header.member + 1} of {len(header.members)} of its store, and nvme.paths "
                f"names it as part {index + 1} of {len(paths)}. The store was made with {header.members}."
            )
