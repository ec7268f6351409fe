"""A directory belongs to one run; nothing is deleted that is not ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infinity.errors import ConfigError, StoreLockedError
from infinity.io.directory import LOCK_NAME, ReadDirectory, StoreDirectory, SwapDirectory, require_place
from tests.test_files import bound_socket


def test_a_second_run_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    first = SwapDirectory(tmp_path / "swap")
    with pytest.raises(StoreLockedError, match="in use by another run"):
        SwapDirectory(tmp_path / "swap")
    first.close()
    SwapDirectory(tmp_path / "swap").close()


def test_several_may_read_a_directory_but_none_while_a_run_has_it(tmp_path: Path) -> None:
    run = SwapDirectory(tmp_path)
    with pytest.raises(StoreLockedError, match=rf"in use by a run \(process {os.getpid()}\)"):
        ReadDirectory(tmp_path)
    run.close(keep=True)
    readers = [ReadDirectory(tmp_path), ReadDirectory(tmp_path)]
    for reader in readers:
        with pytest.raises(StoreLockedError, match="being read by another process"):
            SwapDirectory(tmp_path)
        reader.close()
    SwapDirectory(tmp_path).close(keep=True)


def test_a_directory_without_a_lock_file_is_read_without_one(tmp_path: Path) -> None:
    ReadDirectory(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_made_for_the_run_goes_with_it(tmp_path: Path) -> None:
    SwapDirectory(tmp_path / "swap").close()
    assert not (tmp_path / "swap").exists()


def test_a_directory_whose_parent_is_missing_is_not_made(tmp_path: Path) -> None:
    """A name is misspelled, or a disk is not mounted: its swap file would lie on another disk."""
    named = rf"there is no directory {tmp_path}/mtn/nvme, in which {tmp_path}/mtn/nvme/swap would be created"
    for refuse in (SwapDirectory, require_place):
        with pytest.raises(ConfigError, match=named):
            refuse(tmp_path / "mtn" / "nvme" / "swap")
    assert not list(tmp_path.iterdir())


def test_a_place_is_checked_without_anything_being_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_place(tmp_path / "swap")
    require_place(tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot use .*file: Not a directory"):
        require_place(tmp_path / "file")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="cannot use .*swap: Permission denied. Name a directory that you may write"):
        require_place(tmp_path / "swap")


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    directory = SwapDirectory(tmp_path / "swap")
    (tmp_path / "swap" / "mine.txt").write_text("mine")
    directory.close()
    assert [path.name for path in (tmp_path / "swap").iterdir()] == ["mine.txt"]


def test_the_directory_is_private(tmp_path: Path) -> None:
    directory = SwapDirectory(tmp_path / "swap")
    assert (tmp_path / "swap").stat().st_mode & 0o777 == 0o700
    directory.close()


def test_a_killed_run_leaves_no_lock_and_its_file_is_replaced(tmp_path: Path) -> None:
    body = (
        "import sys, time, pathlib\n"
        "from infinity.io.directory import SwapDirectory\n"
        f"d = SwapDirectory(pathlib.Path({str(tmp_path / 'swap')!r}))\n"
        "d.swap_path.write_text('old'); print('ready', flush=True); time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", body], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    directory = SwapDirectory(tmp_path / "swap")
    directory.make_room()
    assert not directory.swap_path.exists()
    directory.close()


@pytest.mark.parametrize("kind", [SwapDirectory, ReadDirectory])
def test_an_orphaned_worker_does_not_hold_the_lock(kind: type[StoreDirectory], tmp_path: Path) -> None:
    (tmp_path / "swap").mkdir()
    SwapDirectory(tmp_path / "swap").close(keep=True)
    directory = kind(tmp_path / "swap")
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    directory.close()
    SwapDirectory(tmp_path / "swap").close()
    os.write(go[1], b"x")
    os.waitpid(child, 0)


def test_a_lock_that_is_another_file_too_is_made_anew_and_the_other_file_stays(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "swap").mkdir()
    os.link(tmp_path / "precious", tmp_path / "swap" / LOCK_NAME)
    directory = SwapDirectory(tmp_path / "swap")
    assert (tmp_path / "precious").read_text() == "precious"
    assert (tmp_path / "swap" / LOCK_NAME).read_text() == f"{os.getpid()}\n"
    with pytest.raises(StoreLockedError):
        SwapDirectory(tmp_path / "swap")
    directory.close()


def symlink(path: Path) -> None:
    path.with_name("precious").write_text("precious")
    path.symlink_to("precious")


def to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("put", [symlink, to_nothing, device, os.mkfifo, bound_socket, Path.mkdir])
def test_a_lock_that_is_no_regular_file_is_refused_and_stays(put: Any, tmp_path: Path) -> None:
    put(tmp_path / LOCK_NAME)
    for kind in (SwapDirectory, ReadDirectory):
        with pytest.raises(ConfigError, match="infinity.lock is not a regular file with one name.*Remove it"):
            kind(tmp_path)
    assert os.path.lexists(tmp_path / LOCK_NAME)
    assert not (tmp_path / "nothing").exists()
    assert not (tmp_path / "precious").exists() or (tmp_path / "precious").read_text() == "precious"


def test_the_holder_is_named_only_by_a_number(tmp_path: Path) -> None:
    directory = SwapDirectory(tmp_path)
    (tmp_path / LOCK_NAME).write_text("\x1b[2Jroot")
    with pytest.raises(StoreLockedError, match="process unknown"):
        SwapDirectory(tmp_path)
    directory.close()


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "\udc80", "file/below"])
def test_a_name_that_cannot_be_a_directory_is_a_config_error(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="nvme.paths: "):
        SwapDirectory(tmp_path / name)
    with pytest.raises(ConfigError, match="it is no directory"):
        SwapDirectory(tmp_path / "file")


@pytest.mark.parametrize("made_by", ["the run", "the user"])
def test_a_directory_that_a_run_made_goes_with_its_store_whichever_process_removes_that(
    made_by: str, tmp_path: Path
) -> None:
    path = tmp_path / "swap"
    if made_by == "the user":
        path.mkdir()
    for _ in range(2):  # a run, and one that resumes it
        directory = SwapDirectory(path)
        directory.take_over()
        directory.header_path.write_text("as of a store")
        directory.close(keep=True)
    directory = SwapDirectory(path, create=False)
    directory.take_over()
    directory.close()
    assert path.exists() == (made_by == "the user")


def test_the_holder_of_a_directory_that_it_made_is_named(tmp_path: Path) -> None:
    directory = SwapDirectory(tmp_path / "swap")
    with pytest.raises(StoreLockedError, match=f"process {os.getpid()}"):
        SwapDirectory(tmp_path / "swap")
    directory.close()
