"""Only regular files are read, and no more of them than is wanted: nothing in a file's place hangs its reader or feeds
it without end."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from infinity import files
from infinity.errors import DamagedFileError, ManifestError, NewerVersionError
from infinity.files import require_possible
from infinity.io import document
from infinity.io.disk_profile import load_profiles, save_profile
from infinity.runtime.trace import require_writable
from tests.io.test_store import measured

Put = Callable[[Path], None]


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(path.parent)  # its name is bounded
        try:
            made.bind(path.name)
        finally:
            os.chdir(here)


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def endless(path: Path) -> None:
    """Make a file of 1 TiB without a block."""
    path.touch()
    os.truncate(path, 1 << 40)


def claimed(path: Path) -> None:
    """Make a file that is as large as its first line says."""
    line = document._header("generation", 2, 1 << 39, 1 << 39, "0" * 64)
    path.write_bytes(line)
    os.truncate(path, len(line) + (1 << 40))


def link_to_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("fifo"))
    path.symlink_to("fifo")


WRONG: list[Put] = [os.mkfifo, bound_socket, zeros, endless, claimed, link_to_fifo, Path.mkdir]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("put", WRONG)
def test_no_document_is_read_of_what_is_no_small_file(put: Put, follow: bool, tmp_path: Path) -> None:
    path = tmp_path / "file"
    put(path)
    with pytest.raises(ManifestError, match=f"{path} "):
        document.read(path, "generation", 2, follow=follow)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("put", WRONG)
def test_no_profile_is_read_of_what_is_no_small_file(
    put: Put, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path / "disks.json")
    with caplog.at_level("WARNING", "infinity"):
        assert load_profiles(tmp_path / "disks.json") == {}
    assert "is not readable" in caplog.text


def test_what_cannot_be_a_file_is_damage_and_a_link_or_a_directory_is_not(tmp_path: Path) -> None:
    for put in WRONG:
        path = tmp_path / put.__name__
        put(path)
        with pytest.raises(ManifestError) as caught:
            document.read(path, "generation", 2)
        is_damage = put not in (zeros, link_to_fifo, Path.mkdir, claimed)
        assert isinstance(caught.value, DamagedFileError) == is_damage, put


def test_a_link_is_followed_where_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert files.read_regular(tmp_path / "link", 7, follow=True) == b"content"
    with pytest.raises(OSError, match="it is a symbolic link"):
        files.read_regular(tmp_path / "link", 7)
    with pytest.raises(files.UnusableFileError, match="at most 6 B can be read"):
        files.read_regular(tmp_path / "file", 6)


def test_a_file_that_is_cut_or_grows_while_it_is_read_is_never_more_than_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    with files.opened(path) as (descriptor, nbytes):
        os.truncate(path, 40)
        assert files.read(descriptor, nbytes) == b"x" * 40
        os.truncate(path, 1 << 30)
        assert len(files.read(descriptor, nbytes)) == 100


def test_a_writer_that_waits_at_a_fifo_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "store.infinity"
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDWR)
    writer = threading.Thread(target=os.write, args=(descriptor, b"".join(document.write("store", {}))))
    writer.start()
    with pytest.raises(DamagedFileError, match="is a FIFO, not a regular file"):
        document.read(path, "store")
    writer.join()
    os.close(descriptor)


@pytest.mark.parametrize("sign", ["{}", "[]"])
def test_what_would_take_many_times_its_size_is_neither_read_nor_written(
    sign: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = [{} if sign == "{}" else [] for _ in range(50)]
    whole = b"".join(document.write("test", value))
    monkeypatch.setattr(document, "_OBJECTS_MAX", 49)
    monkeypatch.setattr(document, "_LISTS_MAX", 49)
    with pytest.raises(ManifestError, match="too large to be read: it has 5"):
        document.parse(whole, tmp_path, "test")
    with pytest.raises(TypeError, match="too large to be read again: it has 5"):
        document.write("test", value)


def test_what_contains_itself_has_no_form() -> None:
    value: list[object] = []
    value.append(value)
    with pytest.raises(TypeError, match="nested too deeply, or contains itself"):
        document.write("test", value)


def test_a_file_of_a_newer_version_is_named_as_such_whatever_its_size(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"".join(document.write("generation", {}, 3)))
    with pytest.raises(NewerVersionError):
        document.read(path, "generation", 2)


@pytest.mark.parametrize("name", ["", "  ", "\udcff", "a\0b", "n" * 256, "ü" * 128, "x/" * 3000, "~nobody.here/swap"])
def test_names_that_no_file_can_have_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name|called|UTF-8|no such user"):
        require_possible(name)


@pytest.mark.parametrize("name", [".", "/", "n" * 255, "ü" * 127, "x/" * 1000, "~", "a b\n\x1b"])
def test_other_names_are_left_to_the_file_system(name: str) -> None:
    require_possible(name)


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_what_is_written_anew_is_no_other_files_content(link: Callable[[Path, Path], None], tmp_path: Path) -> None:
    path, precious = tmp_path / "file", tmp_path / "precious"
    precious.write_text("precious")
    for name in ("file", "file.aside", f"file.{os.getpid()}.tmp"):
        link(precious, tmp_path / name)
    save_profile(tmp_path, measured(1e9, tmp_path), path)
    assert not path.is_symlink()
    require_writable(path)
    with files.replacing(path) as file:
        file.write("new")
    assert path.read_text() == "new"
    assert precious.read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 4


def test_what_could_not_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(TypeError), files.replacing(path) as file:
        file.writelines(["new", 1])  # type: ignore[list-item]
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
