"""Directories and their disks: every state of every row, by trees of /sys made for the tests and a real directory."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infinity import _native
from infinity.cli.doctor import disks
from infinity.cli.doctor.disks import DiskProbes, disk
from infinity.cli.doctor.probes import ProbeFinding
from infinity.cli.doctor.subprocess_probes import look
from infinity.cli.endurance import Endurance
from infinity.io.disk_profile import DiskProfile, save_profile
from tests.io.test_disks import mounts, nvme, place, write

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir()
    return path


@pytest.fixture
def swap(tmp_path: Path) -> Path:
    path = tmp_path / "swap"
    path.mkdir()
    return path


Mounted = Callable[..., None]


@pytest.fixture(autouse=True)
def mounted(swap: Path, monkeypatch: pytest.MonkeyPatch) -> Mounted:
    """Mount a file system at the directory; until then the system tells no mounts."""
    mounts(monkeypatch)

    def mount(filesystem: str, options: str = "rw,relatime", source: str = "none") -> None:
        mounts(monkeypatch, (swap, filesystem, options, source))

    return mount


def as_user(monkeypatch: pytest.MonkeyPatch, *writable: Path) -> None:
    """Who may write to these directories only."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) in writable)


# ------------------------------------------------------------------------------------------------ directory


def test_a_directory_that_is_there_or_can_be_made_is_good(swap: Path) -> None:
    assert DiskProbes(swap).directory() == ProbeFinding("ok", "writable")
    assert DiskProbes(swap / "new").directory() == ProbeFinding("ok", "the run will create the directory")


@pytest.mark.parametrize("writable", [True, False])
def test_a_directory_whose_parent_is_not_there_is_missing_and_nothing_is_made_on_another_disk(
    writable: bool, swap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(swap / "cache"))
    as_user(monkeypatch, *([swap] if writable else []))
    looks = DiskProbes(swap / "not mounted" / "x")
    found = looks.directory()
    assert (found.state, found.mend) == ("missing", "")
    assert found.finding.startswith("there is no directory")
    assert looks.measured().mend == ""


def test_a_directory_that_only_root_may_make_is_missing_and_the_command_is_named(
    swap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_user(monkeypatch)
    found = DiskProbes(swap / "a b").directory()
    assert (found.state, found.mend) == ("missing", f"sudo install -d -o $USER '{swap / 'a b'}'")


def test_a_directory_that_may_not_be_written_to_is_missing(swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_user(monkeypatch)
    found = DiskProbes(swap).directory()
    assert (found.state, found.mend) == ("missing", f"sudo install -d -o $USER {swap}/infinity-swap")


def test_a_file_in_the_place_of_a_directory_is_missing(swap: Path) -> None:
    (swap / "file").touch()
    found = DiskProbes(swap / "file").directory()
    assert (found.state, found.mend) == ("missing", "")


# ------------------------------------------------------------------------------------------------ file system


@pytest.mark.parametrize(
    ("filesystem", "options", "state", "mend"),
    [
        ("ext4", "rw,relatime", "ok", ""),
        ("xfs", "rw,noatime", "ok", ""),
        ("btrfs", "rw,nodatacow", "ok", ""),
        ("btrfs", "rw", "slower", "chattr +C {swap}"),
        ("ext4", "rw,sync", "slower", "sudo mount -o remount,async {swap}"),
        ("overlay", "rw,lowerdir=/a,upperdir=/b", "slower", "docker run -v /a/directory/on/the/ssd:/swap …"),
        ("", "", "unknown", ""),
    ],
)
def test_a_file_system_is_judged_by_its_kind_and_options(
    filesystem: str, options: str, state: str, mend: str, root: Path, swap: Path, mounted: Mounted
) -> None:
    if filesystem:
        mounted(filesystem, options)
    if filesystem == "overlay":
        write(root, {".dockerenv": ""})
    found = DiskProbes(swap, root).filesystem()
    assert (found.state, found.mend) == (state, mend.format(swap=swap))
    assert found.finding.startswith(filesystem or "unknown")


def test_a_file_system_that_is_mounted_for_reading_is_missing(
    root: Path, swap: Path, monkeypatch: pytest.MonkeyPatch, mounted: Mounted
) -> None:
    mounted("ext4", "ro")
    looks = DiskProbes(swap, root)
    monkeypatch.setattr(DiskProbes, "_is_read_only", True)
    assert looks.filesystem() == ProbeFinding(
        "missing", "ext4, mounted ro: the file system is read-only", f"sudo mount -o remount,rw {swap}"
    )


def test_options_that_name_servers_and_users_are_not_shown(root: Path, swap: Path, mounted: Mounted) -> None:
    mounted("cifs", "rw,username=anna,addr=10.0.0.1,password=secret", "//server/share")
    said = DiskProbes(swap, root).filesystem().finding
    assert "rw" in said
    for secret in ("anna", "10.0.0.1", "secret", "server"):
        assert secret not in said


# ------------------------------------------------------------------------------------------------ device


@pytest.mark.parametrize(
    ("below", "name", "files", "state", "said"),
    [
        ("pci0000:00/nvme/nvme0", "nvme0n1", {"device/model": "FAST"}, "ok", "nvme0n1 FAST: NVMe"),
        ("pci0000:00/nvme/nvme0", "nvme0n1", {"device/transport": "tcp"}, "slower", "a network disk"),
        ("pci0000:00/virtio1/block", "vda", {}, "ok", "a virtual disk"),
        ("pci0000:00/ata1/block", "sda", {}, "slower", "SATA"),
        ("pci0000:00/ata1/block", "sda", {"queue/rotational": "1"}, "slower", "a rotating disk"),
        ("pci0000:00/usb1/block", "sdb", {}, "slower", "on USB"),
        ("platform/mmc0/block", "mmcblk0", {}, "slower", "a memory card"),
        ("virtual/block", "zram0", {}, "missing", "this is RAM"),
        ("virtual/block", "strange", {}, "unknown", "does not report its kind"),
    ],
)
def test_a_device_is_judged_by_its_kind(
    below: str, name: str, files: dict[str, str], state: str, said: str, root: Path, swap: Path
) -> None:
    real = f"sys/devices/{below}/{name}"
    place(root, swap, real)
    write(root / real, files)
    found = DiskProbes(swap, root).device()
    assert (found.state, said in found.finding) == (state, True), found


@pytest.mark.parametrize(
    ("filesystem", "state", "said"),
    [
        ("nfs4", "slower", "nfs4: a network disk"),
        ("fuse.sshfs", "slower", "fuse.sshfs: a network disk"),
        ("tmpfs", "missing", "tmpfs: this is RAM"),
    ],
)
def test_a_file_system_without_a_device_is_judged_by_its_kind(
    filesystem: str, state: str, said: str, root: Path, swap: Path, mounted: Mounted
) -> None:
    mounted(filesystem)
    found = DiskProbes(swap, root).device()
    assert (found.state, found.finding.startswith(said)) == (state, True), found


def test_a_device_that_the_system_does_not_tell_is_unknown(root: Path, swap: Path) -> None:
    assert DiskProbes(swap, root).device().state == "unknown"


@pytest.mark.parametrize(
    ("free", "state"), [(200 * GIB, "ok"), (20 * GIB, "slower"), (0, "missing"), (4095, "missing")]
)
def test_a_full_disk_is_slower_and_then_missing(
    free: int, state: str, root: Path, swap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = SimpleNamespace(f_blocks=1000 * GIB, f_frsize=1, f_bavail=free, f_bfree=free, f_flag=0)
    looks = DiskProbes(swap, root)
    monkeypatch.setattr(os, "statvfs", lambda path: info)
    assert looks.free().state == state


def test_a_scheduler_that_works_for_nothing_is_slower(root: Path, swap: Path) -> None:
    real = nvme(root, "nvme0")
    write(root, {f"{real}/queue/scheduler": "none [bfq]"})
    place(root, swap, real)
    looks = DiskProbes(swap, root)
    found = looks.scheduler()
    assert (found.state, found.mend) == ("slower", "echo none | sudo tee /sys/block/nvme0n1/queue/scheduler")


def test_a_scheduler_that_is_fine_or_not_told_is_no_fault(root: Path, swap: Path) -> None:
    assert DiskProbes(swap, root).scheduler().state == "ok"
    place(root, swap, nvme(root, "nvme0"))
    assert DiskProbes(swap, root).scheduler() == ProbeFinding("ok", "none")


# ------------------------------------------------------------------------------------------------ direct I/O


@pytest.mark.parametrize("works", [True, False])
def test_direct_io_is_that_of_a_swap_file_and_nothing_is_left(
    works: bool, swap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = _native.File
    there: list[_native.File] = []

    def file(path: str, *, create: bool) -> Any:
        there.append(real(path, create=create, direct=False))
        return SimpleNamespace(direct=works, close=there[0].close)

    monkeypatch.setattr(_native, "File", file)
    got = DiskProbes(swap).direct()
    assert (got.state, got.finding.split(" ")[0]) == (("ok", "works") if works else ("slower", "does"))
    assert len(there) == 1
    assert list(swap.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_direct_io_in_a_directory_that_is_not_ours_is_unknown(
    number: int, swap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "File", refuse(number))
    assert DiskProbes(swap).direct().state == "unknown"


def test_a_disk_that_fails_is_an_unknown_row(swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "File", refuse(errno.EIO))
    (row,) = [row for row in look([disk(swap)]) if row.what == "direct I/O"]
    assert (row.state, row.finding) == ("unknown", "OSError: [Errno 5] Input/output error")


def refuse(number: int) -> Callable[..., None]:
    def file(path: str, *, create: bool) -> None:
        raise OSError(number, os.strerror(number))

    return file


# ------------------------------------------------------------------------------------------------ measured


def test_a_disk_that_was_not_measured_names_the_command(swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(swap / "cache"))
    found = DiskProbes(swap).measured()
    assert (found.state, found.mend) == ("unknown", f"infinity-bench --path {swap}")
    new = swap / "new"
    assert DiskProbes(new).measured().mend == f"mkdir {new} && infinity-bench --path {new}"
    as_user(monkeypatch)
    assert DiskProbes(swap).measured().mend == ""


def test_a_disk_that_was_measured_says_its_rates(swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(swap / "cache"))
    save_profile(
        swap,
        DiskProfile(
            read_rate=3e9,
            overwrite_rate=2e9,
            mixed_rate=2.5e9,
            block_bytes=1 << 20,
            in_flight_bytes=32 << 20,
            engine="io_uring",
            path=str(swap),
            measured="2026-11-21",
        ),
    )
    assert DiskProbes(swap / "new").measured() == ProbeFinding(
        "ok", "3.00 GB/s reading, 2.00 overwriting, 2.50 both, measured 2026-11-21"
    )


# ------------------------------------------------------------------------------------------------ wear


@pytest.fixture
def asked(root: Path, swap: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that asks the only NVMe disk for its wear, given the drive's answer and the user."""
    place(root, swap, nvme(root, "nvme0"))

    def wear(told: Endurance | None, user: int = 0, program: str | None = "/usr/sbin/smartctl") -> Any:
        monkeypatch.setattr(disks, "endurance_of", lambda device: told)
        monkeypatch.setattr(disks, "smartctl", lambda: program)
        monkeypatch.setattr(os, "geteuid", lambda: user)
        return DiskProbes(swap, root).wear()

    return wear


@pytest.mark.parametrize(("percent", "state"), [(3, "ok"), (89, "ok"), (90, "slower"), (255, "slower")])
def test_a_worn_drive_is_slower(percent: int, state: str, asked: Any) -> None:
    found = asked(Endurance(5 * 10**12, percent, None))
    assert found.state == state
    assert found.finding.startswith(f"{percent} % used, 5.0 TB written")


@pytest.mark.parametrize(
    ("program", "user", "mend"),
    [
        (None, 1000, "sudo apt-get install smartmontools"),
        ("/usr/sbin/smartctl", 1000, "sudo smartctl -a /dev/nvme0n1"),
        ("/usr/sbin/smartctl", 0, ""),
    ],
)
def test_wear_that_is_not_told_is_unknown_and_the_command_is_named(
    program: str | None, user: int, mend: str, asked: Any
) -> None:
    found = asked(None, user, program)
    assert (found.state, found.mend) == ("unknown", mend)


def test_a_virtual_disk_tells_no_wear(root: Path, swap: Path) -> None:
    place(root, swap, "sys/devices/pci0000:00/virtio1/block/vda")
    assert DiskProbes(swap, root).wear() == ProbeFinding("ok", "not checked for virtual disks")


def test_all_rows_are_there_and_nothing_is_left(swap: Path) -> None:
    rows = look([disk(swap)])
    assert [row.what for row in rows] == [probe.what for probe in disk(swap).probes]
    assert list(swap.iterdir()) == []
