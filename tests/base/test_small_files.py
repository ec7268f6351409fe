"""Files of /sys and /proc that are missing, unreadable or odd."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infinity.base.small_files import chosen, fields, flag_of, number_in, number_of, text_of


@pytest.mark.parametrize("odd", ["²", "٣x", "9" * 5000, "-1", "1.5", "", "\0", "ten"])
def test_what_is_no_number_is_none(odd: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(odd)
    assert number_of(tmp_path / "file") is None
    assert flag_of(tmp_path / "file") is None


def test_a_number_has_a_unit(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(" 3\n")
    assert number_of(tmp_path / "file", 512) == 1536
    assert flag_of(tmp_path / "file") is True
    assert number_in("0x10de", 16) == 0x10DE
    assert number_in(None) is number_in(1.5) is None


def test_what_cannot_be_read_is_empty(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff ok\n")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert text_of(tmp_path / "bytes") == "\ufffd ok"
    for name in ("missing", "fifo", "loop", ".", "a\0b", "bytes/below"):
        assert text_of(tmp_path / name) == ""


def test_settings_and_fields_are_parsed() -> None:
    assert chosen("always [madvise] never") == "madvise"
    assert chosen("none") == "none"
    assert fields("A:\t1\nnothing\nB: 2: 3") == [("A", "1"), ("nothing", ""), ("B", "2: 3")]
