"""The disk on which a directory is: the mount that contains the directory, the devices below the mount, and their NUMA
node.

A fact that the system does not provide is None or '', and is no error. A path that does not exist is an error.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from infinity.base.small_files import number_in, text_of

MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")
_ROOT = Path("/")


@dataclass(frozen=True)
class DiskFacts:
    """Facts about the disk on which a directory is. A device is represented by its directory in /sys, with all links
    resolved.

    Attributes:
        mount_point, filesystem, mount_options: facts about the innermost mount that contains the directory.
        block: the disk itself, never a partition of it; None if the file system has no block device.
        members: the disks below a device-mapper or md device; otherwise only `block`.
    """

    mount_point: str
    filesystem: str
    mount_options: str
    block: Path | None
    members: tuple[Path, ...]

    @property
    def device(self) -> str:
        """Kernel name of the disk ('nvme0n1'); '' if there is none."""
        return "" if self.block is None else self.block.name

    @property
    def numa_node(self) -> int | None:
        """NUMA node of all members; None if the members are on several nodes, or on no node."""
        nodes = {_numa_node(member) for member in self.members}
        return nodes.pop() if len(nodes) == 1 else None


def disk_under(path: Path, root: Path = _ROOT) -> DiskFacts:
    """Return the disk that holds `path`.

    Args:
        path: a path that exists.
        root: directory that contains sys/; `/` except in tests.

    Raises:
        OSError: `path` does not exist.
    """
    number, real = os.stat(path).st_dev, Path(os.path.realpath(path))
    holding = [each for each in psutil.disk_partitions(all=True) if real.is_relative_to(each.mountpoint)]
    # If several mounts have the same path, the last one hides the others.
    mount = max(reversed(holding), key=lambda each: len(each.mountpoint), default=None)
    source = "" if mount is None else mount.device
    block = _whole_disk(_block_device(number, root) or _block_device_named(source, root))
    members = tuple(_members(block))
    if mount is None:
        return DiskFacts("", "", "", block, members)
    return DiskFacts(mount.mountpoint, mount.fstype, mount.opts, block, members)


def disk_key(path: Path) -> str:
    """Return a name of the file system that contains `path`.

    The name is the same for all directories of the file system, and after a reboot.
    """
    disk = disk_under(path)
    return f"{disk.filesystem}:{os.statvfs(path).f_fsid:x}:{disk.device}"


def _block_device(number: int, root: Path) -> Path | None:
    path = root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    return path.resolve() if path.exists() else None


def _block_device_named(source: str, root: Path) -> Path | None:
    """Return the block device of a file system such as btrfs, for which st_dev is not a device number.

    If the file system has several devices, return the device that was mounted.
    """
    if not source.startswith("/dev/"):
        return None
    names = (Path(source).name, Path(os.path.realpath(source)).name)  # /dev/mapper/x is a link to /dev/dm-0
    places = (root / "sys/class/block" / name for name in names)
    return next((place.resolve() for place in places if place.exists()), None)


def _whole_disk(block: Path | None) -> Path | None:
    if block is None:
        return None
    return block.parent if (block / "partition").exists() else block


def _members(disk: Path | None) -> list[Path]:
    """Return the physical disks at the bottom of a stack of device-mapper and md devices."""
    if disk is None:
        return []
    slaves = sorted((disk / "slaves").iterdir()) if (disk / "slaves").is_dir() else []
    found = [member for slave in slaves for member in _members(_whole_disk(slave.resolve()))]
    return list(dict.fromkeys(found)) or [disk]


def _numa_node(disk: Path) -> int | None:
    """Return the `numa_node` of the disk, or of its nearest parent in /sys that has one; None if there is none.

    A namespace of multipath NVMe is below a virtual subsystem, which has no node. The subsystem links to controllers,
    which have nodes.
    """
    real = (disk / "device").resolve() if (disk / "device").exists() else disk
    if real.name.startswith("nvme-subsys"):
        nodes = {_nearest_node(link.resolve()) for link in real.glob("nvme[0-9]*") if link.is_symlink()}
        return nodes.pop() if len(nodes) == 1 else None
    return _nearest_node(real)


def _nearest_node(place: Path) -> int | None:
    for above in (place, *place.parents):
        if (above / "numa_node").exists():
            node = number_in(text_of(above / "numa_node"))
            return None if node is None or node < 0 else node
        if above.name in ("devices", ""):
            break
    return None
