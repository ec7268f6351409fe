"""Files: private, never a link, reserved in full or not at all, and closed with their last request."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from infinity import _native
from tests.native.test_engine_requests import PAGE, engine_name, finish, noise, pages, succeed

__all__ = ["engine_name"]


def open_descriptors(path: Path) -> list[int]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(entry) == str(path):
                found.append(int(entry.name))
        except FileNotFoundError:  # the listing's own descriptor
            continue
    return found


def test_a_file_is_private_and_not_inherited(tmp_path: Path) -> None:
    path = tmp_path / "swap"
    file = _native.File(str(path), create=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (descriptor,) = open_descriptors(path)
    assert fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    assert (file.path, fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT != 0) == (str(path), file.direct)


@pytest.mark.parametrize("create", [False, True])
def test_a_symbolic_link_is_refused(tmp_path: Path, create: bool) -> None:
    (tmp_path / "target").write_bytes(b"precious")
    link = tmp_path / "link"
    link.symlink_to("target")
    with pytest.raises(OSError) as caught:  # noqa: PT011
        _native.File(str(link), create=create)
    assert (caught.value.errno, caught.value.filename) == (errno.ELOOP, str(link))
    assert (tmp_path / "target").read_bytes() == b"precious"


def test_open_errors_carry_errno_and_filename(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    with pytest.raises(FileNotFoundError) as caught:
        _native.File(missing)
    assert caught.value.filename == missing
    with pytest.raises(IsADirectoryError):
        _native.File(str(tmp_path))


def test_an_existing_file_keeps_its_bytes_when_opened_for_creation(tmp_path: Path) -> None:
    (tmp_path / "swap").write_bytes(b"kept")
    _native.File(str(tmp_path / "swap"), create=True)
    assert (tmp_path / "swap").read_bytes() == b"kept"


def test_a_closed_file_or_engine_is_refused_and_closing_again_is_nothing(tmp_path: Path) -> None:
    file, engine = _native.File(str(tmp_path / "swap"), create=True), _native.IOEngine()
    for thing in (file, engine):
        thing.close()
        thing.close()
    with pytest.raises(ValueError, match="close"):
        file.preallocate(PAGE)
    with pytest.raises(ValueError, match="close"):
        engine.read(file, 0, pages(PAGE))


def test_a_file_closed_in_mid_request_stays_open_until_its_last_byte(engine_name: str, tmp_path: Path) -> None:
    path = tmp_path / "swap"
    file = _native.File(str(path), create=True)
    engine = _native.IOEngine(engine_name, block_bytes=PAGE, queue_depth=2)
    data = noise(1 << 20)
    future = engine.write(file, 0, data)
    file.close()
    succeed(future)
    assert open_descriptors(path) == []
    assert path.read_bytes() == bytes(data)


def test_preallocation_reserves_blocks_and_keeps_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "swap"
    path.write_bytes(b"kept")
    file = _native.File(str(path))
    file.preallocate(3 << 20)
    assert path.stat().st_size == 3 << 20
    assert path.stat().st_blocks * 512 >= 3 << 20
    assert path.read_bytes()[:5] == b"kept\0"
    file.preallocate(0)
    file.preallocate(PAGE)
    assert path.stat().st_size == 3 << 20


def unmount(place: Path) -> None:
    """Also when a failed test still holds a file open: the mount goes with its last user."""
    gc.collect()
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "tiny"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "infinity-test", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting needs root")
    yield place
    unmount(place)


def test_preallocation_on_a_full_disk_gives_back_what_it_took(tiny_disk: Path) -> None:
    path = tiny_disk / "swap"
    path.write_bytes(b"x" * PAGE)
    free = os.statvfs(tiny_disk).f_bfree
    file = _native.File(str(path))
    with pytest.raises(OSError, match="preallocate") as caught:
        file.preallocate(8 << 20)
    file.close()
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert (path.stat().st_size, os.statvfs(tiny_disk).f_bfree) == (PAGE, free)


@pytest.fixture
def disk_without_fallocate(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB with direct I/O that cannot reserve blocks: ext4 without extents."""
    image, place = tmp_path / "image", tmp_path / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 20)
    features = "^extent,^64bit,^has_journal"
    for command in (["mkfs.ext4", "-q", "-O", features, str(image)], ["mount", "-o", "loop", str(image), str(place)]):
        if os.geteuid() != 0 or not shutil.which(command[0]):
            pytest.skip(f"{command[0]} as root is needed")
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip(f"{command[0]} does not work here")
    yield place
    unmount(place)


def test_preallocation_without_fallocate_reserves_all_the_same_or_gives_back(disk_without_fallocate: Path) -> None:
    path = disk_without_fallocate / "swap"
    file, engine = _native.File(str(path), create=True), _native.IOEngine("threads")
    data, back = noise(2 * PAGE), pages(2 * PAGE)
    succeed(engine.write(file, 0, data))
    file.preallocate(4 << 20)
    assert path.stat().st_blocks * 512 >= path.stat().st_size == 4 << 20
    free = os.statvfs(disk_without_fallocate).f_bfree
    with pytest.raises(OSError, match="preallocate") as caught:
        file.preallocate(64 << 20)
    assert caught.value.errno == errno.ENOSPC
    assert (path.stat().st_size, os.statvfs(disk_without_fallocate).f_bfree) == (4 << 20, free)
    (descriptor,) = open_descriptors(path)
    assert (fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT != 0) == file.direct
    succeed(engine.read(file, 0, back))
    assert back == data
    file.close()


def test_a_write_to_a_full_disk_fails_with_the_block_that_did_not_fit(engine_name: str, tiny_disk: Path) -> None:
    file = _native.File(str(tiny_disk / "swap"), create=True)
    engine = _native.IOEngine(engine_name, block_bytes=64 * 1024, queue_depth=1)
    failure = finish(engine.write(file, 0, pages(2 << 20)))
    file.close()
    assert failure is not None
    assert (failure.operation, failure.errno, failure.path) == ("write", errno.ENOSPC, str(tiny_disk / "swap"))
    assert 0 < failure.offset <= 1 << 20
