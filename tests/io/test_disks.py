"""Facts about disks, read from trees made for the tests and from the machine that runs the tests."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from infinity.io.disks import DiskFacts, disk_key, disk_under


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def place(root: Path, under: Path, real: str) -> None:
    """Make `real` (below sys/devices) the block device of the file system that holds `under`."""
    number = os.stat(under).st_dev
    link = root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    link.parent.mkdir(parents=True, exist_ok=True)
    (root / real).mkdir(parents=True, exist_ok=True)
    link.symlink_to(root / real)


def nvme(root: Path, name: str, node: str = "1") -> str:
    """Make an NVMe disk below a PCI device, and return its place."""
    pci = f"sys/devices/pci0000:00/{name}-bridge"
    disk = f"{pci}/nvme/{name}/{name}n1"
    write(
        root,
        {
            f"{pci}/numa_node": node,
            f"{pci}/nvme/{name}/model": "FAST DRIVE 2TB",
            f"{disk}/queue/rotational": "0",
            f"{disk}/queue/write_cache": "write back",
            f"{disk}/queue/scheduler": "[none] mq-deadline kyber",
            f"{disk}/queue/discard_max_bytes": "2199023255040",
        },
    )
    (root / disk / "device").symlink_to(root / f"{pci}/nvme/{name}")
    return disk


def mounts(patch: pytest.MonkeyPatch, *told: tuple[Path | str, str, str, str]) -> None:
    """Have the system tell these mounts: (mount point, file system, options, source)."""
    there = [
        SimpleNamespace(mountpoint=str(point), fstype=filesystem, opts=options, device=source)
        for point, filesystem, options, source in told
    ]
    patch.setattr(psutil, "disk_partitions", lambda all: there)  # psutil's name


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir()
    return path


def test_a_partition_is_traced_to_its_drive(root: Path, tmp_path: Path) -> None:
    disk = nvme(root, "nvme0")
    write(root, {f"{disk}/nvme0n1p2/partition": "2"})
    place(root, tmp_path, f"{disk}/nvme0n1p2")
    found = disk_under(tmp_path, root)
    assert (found.device, found.members, found.numa_node) == ("nvme0n1", (root / disk,), 1)


@pytest.mark.parametrize(("nodes", "node"), [(("0", "0"), 0), (("0", "1"), None), (("-1", "-1"), None)])
def test_a_stack_of_devices_is_traced_to_its_drives(
    nodes: tuple[str, str], node: int | None, root: Path, tmp_path: Path
) -> None:
    disks = [nvme(root, f"nvme{index}", number) for index, number in enumerate(nodes)]
    stack = "sys/devices/virtual/block/dm-0"
    arrays = ["sys/devices/virtual/block/md0", "sys/devices/virtual/block/md1"]
    for place_, below in ((stack, arrays), *((array, disks) for array in arrays)):  # each drive is in both arrays
        (root / place_ / "slaves").mkdir(parents=True)
        for slave in below:
            (root / place_ / "slaves" / Path(slave).name).symlink_to(root / slave)
    place(root, tmp_path, stack)
    found = disk_under(tmp_path, root)
    assert (found.device, found.members) == ("dm-0", tuple(root / disk for disk in disks))
    assert found.numa_node == node


def test_what_the_system_does_not_tell_is_left_open(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts(monkeypatch)
    assert disk_under(tmp_path, root) == DiskFacts("", "", "", None, ())
    assert (disk_under(tmp_path, root).device, disk_under(tmp_path, root).numa_node) == ("", None)
    with pytest.raises(FileNotFoundError):
        disk_under(tmp_path / "nothing", root)


def test_the_innermost_mount_counts_and_of_two_at_one_place_the_later(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "with blank"
    inner.mkdir()
    mounts(
        monkeypatch,
        ("/", "ext4", "rw", "/dev/sda1"),
        (inner, "tmpfs", "rw", "tmpfs"),
        (inner, "xfs", "rw,noatime", "/dev/nvme0n1"),
        (f"{inner}x", "tmpfs", "rw", "tmpfs"),
    )
    (inner / "below").mkdir()
    for path in (inner, inner / "below"):
        found = disk_under(path, root)
        assert (found.filesystem, found.mount_point, found.mount_options) == ("xfs", str(inner), "rw,noatime")


def test_this_machine_is_described(tmp_path: Path) -> None:
    found = disk_under(tmp_path)
    assert found.filesystem
    assert tmp_path.is_relative_to(found.mount_point)


def test_directories_of_one_file_system_have_one_key(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert disk_key(tmp_path) == disk_key(tmp_path / "a")
    if Path("/dev/shm").is_dir():
        assert disk_key(Path("/dev/shm")) != disk_key(tmp_path)


def test_a_file_system_without_a_device_number_is_traced_by_its_source(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = nvme(root, "nvme0")
    write(root, {f"{disk}/nvme0n1p2/partition": "2"})
    mounts(monkeypatch, ("/", "btrfs", "rw,relatime", "/dev/nvme0n1p2"))
    (root / "sys/class/block").mkdir(parents=True)
    (root / "sys/class/block/nvme0n1p2").symlink_to(root / f"{disk}/nvme0n1p2")
    found = disk_under(tmp_path, root)
    assert (found.device, found.members, found.numa_node) == ("nvme0n1", (root / disk,), 1)


@pytest.mark.parametrize(
    ("told", "node"), [("0", 0), ("1", 1), ("-1", None), *((odd, None) for odd in ("junk", "²", "9" * 5000, "", "\0"))]
)
def test_a_virtual_disk_may_have_a_node_or_none(told: str, node: int | None, root: Path, tmp_path: Path) -> None:
    pci = "sys/devices/pci0000:00/0000:00:02.0"
    disk = f"{pci}/virtio1/block/vda"
    write(root, {f"{pci}/numa_node": told, f"{disk}/size": "8"})
    (root / disk / "device").symlink_to(root / f"{pci}/virtio1")
    place(root, tmp_path, disk)
    found = disk_under(tmp_path, root)
    assert (found.device, found.numa_node) == ("vda", node)


@pytest.mark.parametrize(("controllers", "node"), [(("1",), 1), (("0", "0"), 0), (("0", "1"), None)])
def test_a_multipath_drive_is_at_the_node_of_its_controllers(
    controllers: tuple[str, ...], node: int | None, root: Path, tmp_path: Path
) -> None:
    subsystem = "sys/devices/virtual/nvme-subsystem/nvme-subsys0"
    write(root, {f"{subsystem}/nvme0n1/size": "8"})
    (root / subsystem / "nvme0n1/device").symlink_to(root / subsystem)
    for index, told in enumerate(controllers):
        controller = f"sys/devices/pci0000:00/0000:0{index}:00.0/nvme/nvme{index}"
        write(root, {f"{controller}/numa_node": told})
        (root / subsystem / f"nvme{index}").symlink_to(root / controller)
    place(root, tmp_path, f"{subsystem}/nvme0n1")
    assert disk_under(tmp_path, root).numa_node == node
