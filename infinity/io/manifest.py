"""Small files of a store: the header of each swap file, and the manifest of each generation.

Both kinds of file come from disk, so they are parsed strictly before they are used. Every field has a type and limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, PlainValidator, ValidationError

from infinity.errors import ManifestError, NewerVersionError
from infinity.io import document
from infinity.io.schema import AbsolutePath, Bytes, Count, DiskRecord, Name, first_problem, require_unique, validated
from infinity.sizes import PAGE_BYTES

SUM_BLOCK_BYTES = 256 << 10
"""Number of bytes of an extent that one checksum of a manifest covers."""
SUM_BYTES = 8
_VERSION = 2
"""Version of manifests. Version 1 stores the extents in rows or in columns, and may have no `store`."""
_EXTENTS_MAX = 1 << 20


class StoreRecord(DiskRecord):
    """Layout of a store on its disks.

    Attributes:
        created: time when the store was made.
        members: directories of all members of the store, as nvme.paths named them.
        shares, stripe_bytes: number of stripes of each member in a cycle, and bytes of a stripe.
        nbytes: size of the store, all members together.
    """

    created: Name
    members: Annotated[list[AbsolutePath], Field(min_length=1, max_length=64)]
    shares: Annotated[list[Annotated[int, Field(ge=1, le=1024)]], Field(max_length=64)]
    stripe_bytes: Annotated[int, Field(gt=0, le=1 << 40, multiple_of=PAGE_BYTES)]
    nbytes: Bytes


class SwapFileHeader(StoreRecord):
    """Header of a swap file, which says to which store and run the swap file belongs.

    Attributes:
        run: id of the run, the same for all members of a store.
        mode: "generations" for a store that can be resumed; "in place" for a store that can never be resumed.
        member: index of this member.
    """

    run: Name
    mode: Literal["generations", "in place"]
    member: Count

    @property
    def store(self) -> StoreRecord:
        """Fields that are the same in the headers of all members."""
        return StoreRecord(**{name: getattr(self, name) for name in StoreRecord.model_fields})


class ExtentRecord(NamedTuple):
    """Record of one state of one group of parameters: its size, and its place in the store in this generation.

    The fields have the names of the file format. `slot` is the index of the extent's copy.
    """

    unit: str
    group: int
    state: str
    slot: int
    offset: int
    nbytes: int


_Counts = Annotated[list[Count], Field(max_length=_EXTENTS_MAX)]
_Sizes = Annotated[list[Bytes], Field(max_length=_EXTENTS_MAX)]
_Names = Annotated[list[Name], Field(max_length=_EXTENTS_MAX)]


class _ExtentColumns(DiskRecord):
    """All extents of a manifest, with one list for each field. This form is compact, because a manifest may have very
    many extents."""

    unit: _Names
    group: _Counts
    state: _Names
    slot: _Counts
    offset: _Sizes
    nbytes: _Sizes


def _extents(value: Any) -> list[ExtentRecord]:
    """Return the records. The value has columns, or rows in manifests of version 1. Raises ValueError."""
    names = ExtentRecord._fields
    if isinstance(value, list):
        if all(isinstance(row, ExtentRecord) for row in value):
            return value
        if not all(isinstance(row, dict) and row.keys() == set(names) for row in value):
            raise ValueError(f"an extent that does not have exactly {', '.join(names)}")
        value = {name: [row[name] for row in value] for name in names}
    try:
        columns = dict(_ExtentColumns.model_validate(value))
    except ValidationError as error:
        raise ValueError(first_problem(error)) from None
    if len({len(column) for column in columns.values()}) != 1:
        raise ValueError("columns that are not equally long")
    require_unique(zip(columns["unit"], columns["group"], columns["state"], strict=True), "the extent")
    _require_apart(columns["offset"], columns["nbytes"])
    return list(map(ExtentRecord, *(columns[name] for name in names)))


def _require_apart(offsets: list[int], sizes: list[int]) -> None:
    """Raise ValueError if two extents overlap."""
    begin, nbytes = np.array(offsets, dtype=np.int64), np.array(sizes, dtype=np.int64)
    begin, nbytes = begin[nbytes > 0], nbytes[nbytes > 0]
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], (begin + nbytes)[order]
    common = np.flatnonzero(end[:-1] > begin[1:])
    if len(common):
        raise ValueError(f"two extents that overlap from offset {begin[common[0] + 1]} on")


_FACTS_MAX = 64


def _facts(value: Any) -> dict[str, Any]:
    """Check that all facts are strings, numbers, or lists of these, so that `==` can compare them. Raises
    ValueError."""
    plain = str | int | float | None
    if not isinstance(value, dict) or len(value) > _FACTS_MAX:
        raise ValueError("not a dict of a few facts")
    for key, fact in value.items():
        items = fact if isinstance(fact, list) else [fact]
        if not isinstance(key, str) or len(items) > _FACTS_MAX or not all(isinstance(item, plain) for item in items):
            raise ValueError(f"{key} is neither a string, a number, nor a list of these")
    return value


class Manifest(DiskRecord):
    """Manifest of a generation, which is all states after the same optimizer step.

    Attributes:
        run: id of the run.
        step: number of optimizer steps done, including skipped steps.
        created: time when the generation was made.
        extents: extents in the order of the store's layout.
        sums: an XXH3-64 checksum for each 256 KiB of each extent, in the order of the extents; None if the run makes no
            checksums.
        facts: facts about the format of the states. A run that uses the states must have the same facts.
        body: values that the generation has in addition to the units' states. They belong to the optimizers, the
            tracked objects and the random-number generators.
        store: the store's layout, the same as in the headers; None in manifests of older versions and in portable
            copies.
        life: id of the ranks that made the generation. All ranks have the same id from their start to their end. None
            if one process trained, and in manifests of older versions. Manifests of two ranks belong to the same
            generation if their `step` and `life` are equal.
    """

    run: Name
    step: Count
    created: Name
    extents: Annotated[list[ExtentRecord], PlainValidator(_extents)]
    sums: bytes | None
    facts: Annotated[dict[str, Any], PlainValidator(_facts)]
    body: dict[str, Any]
    store: StoreRecord | None = None
    life: Name | None = None

    def sums_by_extent(self) -> list[bytes | None]:
        """Return the part of `sums` that belongs to each extent."""
        result: list[bytes | None] = []
        at = 0
        for extent in self.extents:
            nbytes = sum_bytes(extent.nbytes)
            result.append(None if self.sums is None else self.sums[at : at + nbytes])
            at += nbytes
        return result


def sum_bytes(nbytes: int) -> int:
    """Return the number of bytes of the checksums of an extent of `nbytes`."""
    return -(-nbytes // SUM_BLOCK_BYTES) * SUM_BYTES


def require_known(found: Iterable[Path]) -> None:
    """Raise NewerVersionError if a newer infinity wrote one of these manifests."""
    for path in found:
        try:
            manifest_bytes(path)
        except NewerVersionError:
            raise
        except ManifestError:
            continue  # the error is raised later, when the manifest is read


def read_header(path: Path) -> SwapFileHeader:
    """Read a header.

    Raises ManifestError. The error is a DamagedFileError if the header is missing or damaged, and may thus be rebuilt.
    """
    header = validated(SwapFileHeader, document.read(path, "store"), path)
    _require_sound(header, path)
    if header.member >= len(header.members):
        raise ManifestError(path, f"has no member {header.member}: it names {len(header.members)}")
    return header


def _require_sound(store: StoreRecord, path: Path) -> None:
    if len(store.shares) != len(store.members) or len(set(store.members)) != len(store.members):
        raise ManifestError(path, "names a member twice, or does not have one share for each member")


def write_header(header: SwapFileHeader) -> list[bytes]:
    return document.write("store", header.model_dump())


def read_manifest(path: Path) -> Manifest:
    """Read a manifest.

    Raises:
        ManifestError: the manifest cannot be read or understood.
        NewerVersionError: a newer infinity wrote the manifest.
        DamagedFileError: the manifest is missing or damaged.
    """
    manifest = validated(Manifest, document.read(path, "generation", _VERSION), path)
    expected = sum(sum_bytes(extent.nbytes) for extent in manifest.extents)
    if manifest.sums is not None and len(manifest.sums) != expected:
        raise ManifestError(path, f"has {len(manifest.sums)} bytes of checksums instead of {expected}")
    if manifest.store is not None:
        _require_sound(manifest.store, path)
        for extent in manifest.extents:
            if extent.offset + extent.nbytes > manifest.store.nbytes:
                raise ManifestError(path, f"places {extent.state} of unit '{extent.unit}' outside the store")
    return manifest


def manifest_bytes(path: Path) -> bytes:
    """Return all bytes of a manifest.

    Raises the errors of read_manifest, except errors in the value, which is not parsed.
    """
    return document.checked_bytes(path, "generation", _VERSION)


def read_kept(found: Mapping[int, Path], run: str | None = None) -> Iterator[tuple[int, Manifest | ManifestError]]:
    """Yield the step of each manifest in `found`, with the manifest or with the error that read_own raised."""
    for number, path in found.items():
        try:
            yield number, read_own(path, number, run)
        except ManifestError as error:
            yield number, error


def read_own(path: Path, step: int, run: str | None) -> Manifest:
    """Read a manifest, and check that it describes the expected generation.

    Raises:
        ManifestError: see read_manifest; also raised if the manifest belongs to another step, or to another run than
            `run`.
    """
    manifest = read_manifest(path)
    if manifest.step != step or run not in (None, manifest.run):
        raise ManifestError(path, "belongs to another run or step")
    return manifest


def write_manifest(manifest: Manifest) -> list[bytes]:
    """Return the bytes of a manifest, in parts.

    Raises TypeError for a value in `facts` or `body` that cannot be stored.
    """
    columns = [list(column) for column in zip(*manifest.extents, strict=True)] or [[] for _ in ExtentRecord._fields]
    plain = {
        "extents": dict(zip(ExtentRecord._fields, columns, strict=True)),
        "store": None if manifest.store is None else dict(manifest.store),
    }
    value = dict(manifest) | plain
    if manifest.life is None:
        del value["life"]
    return document.write("generation", value, _VERSION)
