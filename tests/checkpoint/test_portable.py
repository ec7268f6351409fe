"""Small files of a portable copy that are none: each is an error that names it and says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infinity.checkpoint.portable import _read_sums, _weight_map
from infinity.errors import ManifestError

pytestmark = pytest.mark.cpu_only("no model is offloaded")

LINE = "0" * 64 + "  model.safetensors\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "was truncated"),
        (LINE[:-1].encode(), "was truncated"),
        (b"\xff\n", "is damaged: 'utf-8'"),
        (b"no checksum\n", "it has the line 'no checksum'"),
        (2 * LINE.encode(), "it has the line"),
        (LINE.replace("model", "/model").encode(), "it has the line"),
        (LINE.replace("model", "../model").encode(), "it has the line"),
    ],
)
def test_checksums_that_are_none_are_named(text: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "sums").write_bytes(text)
    with pytest.raises(ManifestError, match=f"{tmp_path}/sums.*{says}"):
        _read_sums(tmp_path / "sums")


def test_checksums_come_back_and_missing_ones_are_named(tmp_path: Path) -> None:
    (tmp_path / "sums").write_text(LINE)
    assert _read_sums(tmp_path / "sums") == {"model.safetensors": "0" * 64}
    with pytest.raises(ManifestError, match="cannot be read: No such file"):
        _read_sums(tmp_path / "missing")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 500_001, "larger than the index of any model"),
        ("," * 4_000_001, "larger than the index of any model"),
        ("{", "is not valid JSON"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "weight_map"),
    ],
)
def test_an_index_that_is_none_is_named(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "index").write_text(text)
    with pytest.raises(ManifestError, match=f"{tmp_path}/index.*{says}"):
        _weight_map(tmp_path / "index")


def test_an_index_comes_back_and_a_missing_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "index").write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    assert _weight_map(tmp_path / "index") == {"a": "model.safetensors"}
    with pytest.raises(ManifestError, match="cannot be read: No such file"):
        _weight_map(tmp_path / "missing")
