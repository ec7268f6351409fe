"""What the small files of a store say: the header of each swap file, and the manifest of each generation.

Both are data from disk: parsed strictly, every field typed and bounded, before anything is done with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from infinity.errors import ManifestError, NewerVersionError
from infinity.io import document
from infinity.sizes import PAGE_BYTES

SUM_BLOCK_BYTES = 256 << 10
"""A manifest has a checksum for each so many bytes of an extent."""
SUM_BYTES = 8
_BYTES_MAX = 1 << 60
_VERSION = 2
"""Of manifests. Version 1 has the extents in rows, or in columns as well; `store` may be missing in it."""

Count = Annotated[int, Field(ge=0, le=1 << 48)]
Bytes = Annotated[int, Field(ge=0, le=_BYTES_MAX, multiple_of=PAGE_BYTES)]
Name = Annotated[str, Field(max_length=4096)]


class Record(BaseModel):
    """Data from disk: every field typed, none unknown, nothing converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class StoreRecord(Record):
    """How a store lies on its disks.

    Attributes:
        created: when.
        members: the directories of all of its parts, as they were named.
        shares, stripe_bytes: how bytes are striped over them.
        nbytes: of the store, all members together.
    """

    created: Name
    members: Annotated[list[Name], Field(min_length=1, max_length=64)]
    shares: list[Annotated[int, Field(ge=1, le=1024)]]
    stripe_bytes: Annotated[int, Field(gt=0, le=_BYTES_MAX, multiple_of=PAGE_BYTES)]
    nbytes: Bytes


class Header(StoreRecord):
    """What a swap file is part of.

    Attributes:
        run: of which it is; all members of a store have the same.
        mode: "generations", or "in place": then it can never be resumed.
        member: index of this one.
    """

    run: Name
    mode: Literal["generations", "in place"]
    member: Count

    @property
    def store(self) -> StoreRecord:
        """What all members have in common."""
        return StoreRecord(**{name: getattr(self, name) for name in StoreRecord.model_fields})


class ExtentRecord(NamedTuple):
    """One state of one group of parameters, and where this generation has it."""

    unit: str
    group: int
    state: str
    slot: int
    offset: int
    nbytes: int


class _Columns(Record):
    """All extents of a manifest, field by field: there may be very many."""

    unit: list[Name]
    group: list[Count]
    state: list[Name]
    slot: list[Count]
    offset: list[Bytes]
    nbytes: list[Bytes]


def _extents(value: Any) -> list[ExtentRecord]:
    """Records of columns; also of rows, which is how the first manifests had them. Raises ValueError."""
    names = ExtentRecord._fields
    if isinstance(value, list):
        if all(isinstance(row, ExtentRecord) for row in value):
            return value
        if not all(isinstance(row, dict) and row.keys() == set(names) for row in value):
            raise ValueError(f"an extent that does not have exactly {', '.join(names)}")
        value = {name: [row[name] for row in value] for name in names}
    try:
        columns = dict(_Columns.model_validate(value))
    except ValidationError as error:
        raise ValueError(_first(error)) from None
    if len({len(column) for column in columns.values()}) != 1:
        raise ValueError("columns that are not equally long")
    return list(map(ExtentRecord, *(columns[name] for name in names)))


class Manifest(Record):
    """A generation: all states after the same optimizer step.

    Attributes:
        step: optimizer steps done, skipped ones included.
        store: what the headers of its swap files say; None in manifests written before there was such a field, and in
            portable copies.
        extents: in the order of the store's layout.
        sums: an XXH3-64 for each 256 KiB of each extent, in their order; None without checksums.
        facts: what must be the same to use the states: their format.
        body: what the layers above keep: optimizer, schedulers, random numbers.
    """

    run: Name
    step: Count
    created: Name
    extents: Annotated[list[ExtentRecord], PlainValidator(_extents)]
    sums: bytes | None
    facts: dict[str, Any]
    body: dict[str, Any]
    store: StoreRecord | None = None

    def sums_by_extent(self) -> list[bytes | None]:
        """The part of `sums` that belongs to each extent."""
        result: list[bytes | None] = []
        at = 0
        for extent in self.extents:
            nbytes = sum_bytes(extent.nbytes)
            result.append(None if self.sums is None else self.sums[at : at + nbytes])
            at += nbytes
        return result


_Model = TypeVar("_Model", bound=Record)


def sum_bytes(nbytes: int) -> int:
    """Bytes of the sums of an extent."""
    return -(-nbytes // SUM_BLOCK_BYTES) * SUM_BYTES


def require_known(found: Iterable[Path]) -> None:
    """Raises NewerVersionError for a manifest that a newer infinity wrote."""
    for path in found:
        try:
            document.check(path, "generation", _VERSION)
        except NewerVersionError:
            raise
        except ManifestError:
            continue  # whoever reads it says what is wrong with it


def read_header(path: Path) -> Header:
    """Raises ManifestError: DamagedFileError where it is missing or damaged, so that it may be rebuilt."""
    header = validated(Header, document.read(path, "store"), path)
    _require_sound(header, path)
    if header.member >= len(header.members):
        raise ManifestError(path, "names members that do not go together")
    return header


def _require_sound(store: StoreRecord, path: Path) -> None:
    if len(store.shares) != len(store.members):
        raise ManifestError(path, "names members that do not go together")


def write_header(header: Header) -> list[bytes]:
    return document.write("store", header.model_dump())


def read_manifest(path: Path) -> Manifest:
    """Raises ManifestError: NewerVersionError where a newer infinity wrote it, DamagedFileError where it is damaged."""
    manifest = validated(Manifest, document.read(path, "generation", _VERSION), path)
    expected = sum(sum_bytes(extent.nbytes) for extent in manifest.extents)
    if manifest.sums is not None and len(manifest.sums) != expected:
        raise ManifestError(path, f"has {len(manifest.sums)} bytes of checksums instead of {expected}")
    if manifest.store is not None:
        _require_sound(manifest.store, path)
    return manifest


def read_kept(found: Mapping[int, Path], run: str | None = None) -> Iterator[tuple[int, Manifest | ManifestError]]:
    """Every manifest among `found` (by step), or what is wrong with it; only of `run`, where that is given."""
    for number, path in found.items():
        try:
            manifest = read_manifest(path)
            if manifest.step != number or run not in (None, manifest.run):
                raise ManifestError(path, "belongs to another run or step")
            yield number, manifest
        except ManifestError as error:
            yield number, error


def write_manifest(manifest: Manifest) -> list[bytes]:
    """Raises TypeError for what `facts` or `body` cannot hold."""
    columns = [list(column) for column in zip(*manifest.extents, strict=True)] or [[] for _ in ExtentRecord._fields]
    plain = {
        "extents": dict(zip(ExtentRecord._fields, columns, strict=True)),
        "store": None if manifest.store is None else dict(manifest.store),
    }
    return document.write("generation", dict(manifest) | plain, _VERSION)


def validated(model: type[_Model], value: Any, source: object) -> _Model:
    """Raises ManifestError that names `source` and the field."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise ManifestError(source, f"has a wrong value: {_first(error)}") from None


def _first(error: ValidationError) -> str:
    """The first thing that is wrong, and where."""
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
