"""Small files are read whole, and nothing else is waited for or read without an end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infinity.files import read_small, require_possible


def test_a_file_up_to_the_limit_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 1024)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_small(tmp_path / "link", 1024) == b"x" * 1024
    with pytest.raises(OSError, match="larger than 0 KiB"):
        read_small(tmp_path / "file", 1023)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fifo", "not a regular file"),
        ("folder", "not a regular file"),
        ("/dev/zero", "not a regular file"),
        ("missing", "No such file"),
        ("a\0b", "no file can have this name"),
        ("\udcff\ud800", "no file can have this name"),
    ],
)
def test_what_is_no_file_is_an_os_error_with_words(name: str, words: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match=words):
        read_small(tmp_path / name, 1024)


def test_open_files_do_not_grow_when_one_is_refused(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(OSError, match="not a regular file"):
            read_small(tmp_path, 1024)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("name", ["", "  ", "\udcff", "a\0b", "n" * 256, "ü" * 128, "x/" * 3000, "~nobody.here/swap"])
def test_names_that_no_file_can_have_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name|called|UTF-8|no such user"):
        require_possible(name)


@pytest.mark.parametrize("name", [".", "/", "n" * 255, "ü" * 127, "x/" * 1000, "~", "a b\n\x1b"])
def test_other_names_are_left_to_the_file_system(name: str) -> None:
    require_possible(name)
