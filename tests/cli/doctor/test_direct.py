"""Direct I/O, tried on this machine's disk and on file systems that refuse it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infinity import _native
from infinity.cli.doctor import direct
from infinity.cli.doctor.direct import takes_direct


def test_it_is_tried_on_a_file_that_leaves_nothing_behind(tmp_path: Path) -> None:
    """It says of this disk what a swap file there does."""
    found = takes_direct(tmp_path / "probe")
    assert list(tmp_path.iterdir()) == []
    file = _native.File(str(tmp_path / "swap"), create=True)
    assert found == file.direct
    file.close()


def test_a_swap_file_that_goes_through_the_page_cache_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = _native.File
    monkeypatch.setattr(_native, "File", lambda path: real(path, direct=False))
    assert not takes_direct(tmp_path / "probe")


@pytest.mark.parametrize("odd", ["refused", "others"])
def test_a_block_of_4_kib_that_is_refused_or_comes_back_as_another_does_not_count(
    odd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "File", lambda path: SimpleNamespace(direct=True, close=lambda: None))
    monkeypatch.setattr(direct.fcntl, "fcntl", lambda *_: 0)  # this disk may have no direct I/O
    assert takes_direct(tmp_path / "probe")

    def refuse(descriptor: int, data: Any, offset: int) -> int:
        if odd == "refused":
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, b"o" * len(data), offset)

    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", refuse)
    assert not takes_direct(tmp_path / "probe")


@pytest.mark.parametrize("call", ["pwrite", "unlink"])
def test_a_disk_that_fails_is_an_error_and_the_descriptor_is_closed(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(os.listdir("/proc/self/fd"))

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(direct.os, call, fail)
    with pytest.raises(OSError, match="Input/output error"):
        takes_direct(tmp_path / "probe")
    monkeypatch.undo()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_file_that_is_there_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "probe").write_text("mine")
    with pytest.raises(FileExistsError):
        takes_direct(tmp_path / "probe")
    assert (tmp_path / "probe").read_text() == "mine"
