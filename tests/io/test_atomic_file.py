"""A file is there whole or not at all; each step that makes it durable is taken, in order, and its failure raised."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from infinity.errors import SwapIOError
from infinity.io import atomic_file


def acts_of(path: Path, data: bytes) -> list[str]:
    acts: list[str] = []
    with atomic_file.observed(lambda name, *_: acts.append(name)):
        atomic_file.write_file(path, [data])
    return acts


def test_the_steps_and_their_order(tmp_path: Path) -> None:
    acts = acts_of(tmp_path / "file", b"new")
    assert [name for name in acts if name.startswith("end ")] == [
        "end create",
        "end write",
        "end fsync",
        "end rename",
        "end fsync directory",
    ]
    assert (tmp_path / "file").read_bytes() == b"new"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("call", ["open", "pwrite", "fsync", "replace"])
def test_a_failure_is_raised_and_leaves_what_was_there(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    atomic_file.write_file(tmp_path / "file", [b"old"])

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(atomic_file.os, call, fail)
    with pytest.raises(SwapIOError, match="errno 28"):
        atomic_file.write_file(tmp_path / "file", [b"new"])
    monkeypatch.undo()
    assert (tmp_path / "file").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_fsync_reaches_the_system_for_the_file_and_for_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both descriptors, each while its act is under way, the file's before it gets its name."""
    synced: list[tuple[str, bool]] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), (tmp_path / "file").exists()))
        fsync(descriptor)

    monkeypatch.setattr(atomic_file.os, "fsync", record)
    atomic_file.write_file(tmp_path / "file", [b"new"])
    assert synced == [(str(tmp_path / "file.aside"), False), (str(tmp_path), True)]


def test_a_failed_fsync_of_the_directory_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    fsync = os.fsync

    def fail_second(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(5, os.strerror(5))
        fsync(descriptor)

    monkeypatch.setattr(atomic_file.os, "fsync", fail_second)
    with pytest.raises(SwapIOError, match=r"fsync directory .*errno 5"):
        atomic_file.write_file(tmp_path / "file", [b"new"])
    assert len(calls) == 2, "a failed fsync is not tried again"


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_in_the_way_is_taken_away_and_what_it_leads_to_stays(link: Any, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("mine")
    link(tmp_path / "elsewhere", tmp_path / "file.aside")
    atomic_file.write_file(tmp_path / "file", [b"new"])
    assert (tmp_path / "file").read_bytes() == b"new"
    assert (tmp_path / "elsewhere").read_text() == "mine"
    assert (tmp_path / "elsewhere").stat().st_nlink == 1
