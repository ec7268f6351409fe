"""Manifests come back as they were written, in the form of today and in the first one; anything else is a
ManifestError that names the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infinity.errors import ManifestError, NewerVersionError
from infinity.io import document
from infinity.io.manifest import (
    ExtentRecord,
    Manifest,
    StoreRecord,
    SwapFileHeader,
    read_header,
    read_kept,
    read_manifest,
    write_header,
    write_manifest,
)

STORE = StoreRecord(created="then", members=["/a", "/b"], shares=[1, 3], stripe_bytes=4096, nbytes=1 << 20)
EXTENTS = [ExtentRecord(f"unit{index}", index % 2, "weight", 0, index * 8192, 8192) for index in range(5)]
MANIFEST = Manifest(
    run="r", step=3, created="now", extents=EXTENTS, sums=bytes(range(40)), facts={"a": 1}, body={"b": (2, b"c")},
    store=STORE,
)  # fmt: skip


def plain() -> dict[str, Any]:
    """Return the manifest as a document contains it."""
    columns = {name: [getattr(extent, name) for extent in EXTENTS] for name in ExtentRecord._fields}
    value = dict(MANIFEST) | {"extents": columns, "store": dict(STORE)}
    del value["life"]  # of one process
    return value


def rows() -> list[dict[str, Any]]:
    return [extent._asdict() for extent in EXTENTS]


def written(value: dict[str, Any], directory: Path, version: int = 2) -> Path:
    path = directory / "manifest"
    path.write_bytes(b"".join(document.write("generation", value, version)))
    return path


def test_a_manifest_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "manifest"
    of_ranks = MANIFEST.model_copy(update={"life": "a"})
    for manifest in (MANIFEST, MANIFEST.model_copy(update={"extents": [], "sums": None, "store": None}), of_ranks):
        path.write_bytes(b"".join(write_manifest(manifest)))
        assert read_manifest(path) == manifest
    assert b"".join(write_manifest(MANIFEST)) == written(plain(), tmp_path).read_bytes()


@pytest.mark.parametrize("extents", [rows(), plain()["extents"]], ids=["rows", "columns"])
def test_manifests_of_version_1_are_read_as_well(extents: Any, tmp_path: Path) -> None:
    value = plain() | {"extents": extents}
    assert read_manifest(written(value, tmp_path, 1)) == MANIFEST
    del value["store"]
    assert read_manifest(written(value, tmp_path, 1)) == MANIFEST.model_copy(update={"store": None})


def test_a_manifest_of_a_newer_version_is_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(NewerVersionError, match=f"{tmp_path}/manifest was written by a newer infinity"):
        read_manifest(written(plain() | {"more": 1}, tmp_path, 3))


WRONG = [
    ("unit", 7), ("unit", "x" * 5000), ("group", -1), ("group", True), ("group", 1.0), ("group", "1"),
    ("state", None), ("slot", 1 << 49), ("offset", 100), ("offset", -4096), ("nbytes", 1 << 61), ("nbytes", 4097),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), WRONG, ids=[f"{field}={str(value)[:9]}" for field, value in WRONG])
def test_a_wrong_value_in_an_extent_is_named_in_both_forms(field: str, value: Any, tmp_path: Path) -> None:
    columns, listed = plain(), rows()
    columns["extents"][field][2] = listed[2][field] = value
    for manifest in (columns, plain() | {"extents": listed}):
        with pytest.raises(ManifestError, match=rf"{tmp_path}/manifest has a wrong value: extents.*{field}\.2"):
            read_manifest(written(manifest, tmp_path))


@pytest.mark.parametrize(
    "extents",
    [
        None,
        7,
        [1],
        [rows()[0] | {"more": 1}],
        [{"unit": "u"}],
        {"unit": []},
        plain()["extents"] | {"more": []},
        plain()["extents"] | {"slot": [0]},
        plain()["extents"] | {"slot": (0,) * 5},
        plain()["extents"] | {"slot": "00000"},
        plain()["extents"] | {name: [] for name in ExtentRecord._fields},
    ],
)
def test_extents_in_no_known_form_are_refused(extents: Any, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="has a wrong value: extents|bytes of checksums"):
        read_manifest(written(plain() | {"extents": extents}, tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        {"sums": b"x"},
        {"step": -1},
        {"step": "3"},
        {"run": None},
        {"more": 1},
        {"facts": []},
        {"store": dict(STORE) | {"shares": [1]}},
        {"store": dict(STORE) | {"shares": [0, 1]}},
        {"store": dict(STORE) | {"members": []}},
        {"store": dict(STORE) | {"stripe_bytes": 1000}},
        {"store": dict(STORE) | {"stripe_bytes": 0}},
        {"store": dict(STORE) | {"run": "r"}},
    ],
    ids=str,
)
def test_other_wrong_values_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=str(tmp_path)):
        read_manifest(written(plain() | change, tmp_path))


def changed(**columns: list[Any]) -> dict[str, Any]:
    return plain() | {"extents": plain()["extents"] | columns}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (changed(unit=["unit0"] * 5, group=[0] * 5), "the extent .'unit0', 0, 'weight'. twice"),
        (changed(offset=[0, 4096, 16384, 24576, 32768]), "two extents that overlap from offset 4096 on"),
        (changed(offset=[0] * 5), "two extents that overlap from offset 0 on"),
        (changed(offset=[0, 8192, 16384, 24576, 1 << 40]), "places weight of unit 'unit4' outside the store"),
        (changed(offset=[0, 8192, 16384, 24576, 1 << 61]), "extents.*less than or equal to"),
        (plain() | {"facts": {"a": {"b": 1}}}, "facts: a is neither"),
        (plain() | {"facts": {"a": [bytes(3)]}}, "facts: a is neither"),
        (plain() | {"store": dict(STORE) | {"members": ["/a", "/a"]}}, "names a member twice"),
        (plain() | {"store": dict(STORE) | {"members": ["/a", "b"]}}, "'b' is not an absolute path"),
        (plain() | {"store": dict(STORE) | {"members": ["/a", "/\0"]}}, "is not an absolute path"),
        (plain() | {"store": dict(STORE) | {"stripe_bytes": 1 << 50}}, "stripe_bytes"),
        (plain() | {"store": dict(STORE) | {"\x1b[2J": 1}}, r"store\.\\x1b\[2J: Extra inputs"),
    ],
)
def test_what_cannot_be_of_a_store_is_named(value: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=f"{tmp_path}/manifest .*{message}"):
        read_manifest(written(value, tmp_path))


def test_extents_without_a_byte_may_lie_anywhere(tmp_path: Path) -> None:
    value = changed(nbytes=[0] * 5, offset=[0] * 5) | {"sums": b""}
    assert [extent.nbytes for extent in read_manifest(written(value, tmp_path)).extents] == [0] * 5


def test_a_header_names_a_member_that_there_is(tmp_path: Path) -> None:
    path = tmp_path / "header"
    for member in (0, 1, 2):
        header = SwapFileHeader(**dict(STORE), run="r", mode="generations", member=member)
        path.write_bytes(b"".join(write_header(header)))
        if member < 2:
            assert read_header(path) == header
        else:
            with pytest.raises(ManifestError, match="has no member 2: it names 2"):
                read_header(path)


def test_a_manifest_of_another_run_or_step_is_an_error_and_not_kept(tmp_path: Path) -> None:
    path = written(plain(), tmp_path)
    assert list(read_kept({3: path})) == list(read_kept({3: path}, "r")) == [(3, MANIFEST)]
    for found in (read_kept({3: path}, "other"), read_kept({4: path})):
        ((_, error),) = found
        assert "belongs to another run or step" in str(error)
