"""What the small files of a store say: the header of each swap file, and the manifest of each generation.

Both are data from disk: parsed strictly, every field typed and bounded, before anything is done with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from infinity.errors import ManifestError
from infinity.io import document
from infinity.sizes import PAGE_BYTES

SUM_BLOCK_BYTES = 256 << 10
"""A manifest has a checksum for each so many bytes of an extent."""
SUM_BYTES = 8
_BYTES_MAX = 1 << 60

Count = Annotated[int, Field(ge=0, le=1 << 48)]
Bytes = Annotated[int, Field(ge=0, le=_BYTES_MAX, multiple_of=PAGE_BYTES)]
Name = Annotated[str, Field(max_length=4096)]


class Record(BaseModel):
    """Data from disk: every field typed, none unknown, nothing converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Header(Record):
    """What a swap file is part of.

    Attributes:
        run: of which it is; all members of a store have the same.
        mode: "generations", or "in place": then it can never be resumed.
        member: index of this one.
        members: the directories of all of them, as they were named.
        shares, stripe_bytes: how bytes are striped over them.
        nbytes: of the store, all members together.
    """

    run: Name
    mode: Literal["generations", "in place"]
    created: Name
    member: Count
    members: Annotated[list[Name], Field(min_length=1, max_length=64)]
    shares: list[Annotated[int, Field(ge=1, le=1024)]]
    stripe_bytes: Bytes
    nbytes: Bytes


class ExtentRecord(Record):
    """One state of one group of parameters, and where this generation has it."""

    unit: Name
    group: Count
    state: Name
    slot: Count
    offset: Bytes
    nbytes: Bytes


class Manifest(Record):
    """A generation: all states after the same optimizer step.

    Attributes:
        step: optimizer steps done, skipped ones included.
        extents: in the order of the store's layout.
        sums: an XXH3-64 for each 256 KiB of each extent, in their order; None without checksums.
        facts: what must be the same to use the states: their format.
        body: what the layers above keep: optimizer, schedulers, random numbers.
    """

    run: Name
    step: Count
    created: Name
    extents: list[ExtentRecord]
    sums: bytes | None
    facts: dict[str, Any]
    body: dict[str, Any]

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


def read_header(path: Path) -> Header:
    """Raises ManifestError."""
    header = validated(Header, document.read(path, "store"), path)
    if len(header.shares) != len(header.members) or header.member >= len(header.members):
        raise ManifestError(path, "names members that do not go together")
    return header


def write_header(header: Header) -> list[bytes]:
    return document.write("store", header.model_dump())


def read_manifest(path: Path) -> Manifest:
    """Raises ManifestError."""
    manifest = validated(Manifest, document.read(path, "generation"), path)
    expected = sum(sum_bytes(extent.nbytes) for extent in manifest.extents)
    if manifest.sums is not None and len(manifest.sums) != expected:
        raise ManifestError(path, f"has {len(manifest.sums)} bytes of checksums instead of {expected}")
    return manifest


def write_manifest(manifest: Manifest) -> list[bytes]:
    """Raises TypeError for what `facts` or `body` cannot hold."""
    return document.write("generation", dict(manifest) | {"extents": [dict(extent) for extent in manifest.extents]})


def validated(model: type[_Model], value: Any, source: object) -> _Model:
    """Raises ManifestError that names `source` and the field."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ManifestError(source, f"has a wrong value: {where}: {first['msg']}") from None
