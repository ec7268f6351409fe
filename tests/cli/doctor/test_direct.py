"""Direct I/O, tried on this machine's disk and on file systems that refuse it."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from infinity.cli.doctor import direct
from infinity.cli.doctor.direct import try_direct


def test_it_is_tried_on_a_file_that_leaves_nothing_behind(tmp_path: Path) -> None:
    found = try_direct(tmp_path / "probe")
    assert list(tmp_path.iterdir()) == []
    assert set(found.blocks) <= {512, 4096, 1 << 20}
    assert found.used == (4096 in found.blocks)


def test_a_file_system_without_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def refuse(descriptor: int, command: int, argument: int = 0) -> Any:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert try_direct(tmp_path / "probe").blocks == ()


def test_blocks_that_are_too_small_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite

    def refuse(descriptor: int, data: Any, offset: int) -> int:
        if len(data) < 4096:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", refuse)
    assert 512 not in try_direct(tmp_path / "probe").blocks


@pytest.mark.parametrize("call", ["pwrite", "unlink"])
def test_a_disk_that_fails_is_an_error_and_the_descriptor_is_closed(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(os.listdir("/proc/self/fd"))

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(direct.os, call, fail)
    with pytest.raises(OSError, match="Input/output error"):
        try_direct(tmp_path / "probe")
    monkeypatch.undo()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_file_that_is_there_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "probe").write_text("mine")
    with pytest.raises(FileExistsError):
        try_direct(tmp_path / "probe")
    assert (tmp_path / "probe").read_text() == "mine"
