"""Kinds of disks (NVMe, SATA, network…), derived from the names and attributes of a disk in /sys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, TypeAlias

from infinity.base.small_files import flag_of, text_of
from infinity.io.disks import MEMORY_FILESYSTEMS

DiskKind: TypeAlias = Literal["NVMe", "SATA", "SCSI", "USB", "rotating", "card", "virtual", "network", "memory", ""]

NETWORK_FILESYSTEMS = (
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "ceph", "afs", "gfs2", "ocfs2", "lustre", "beegfs"),
    *("gpfs", "glusterfs", "orangefs"),
)
_NAMES: tuple[tuple[str, DiskKind], ...] = (
    (r"(rbd|nbd|drbd)\d", "network"),
    (r"(vd|xvd)[a-z]", "virtual"),
    (r"(ram|zram|pmem)\d", "memory"),
    (r"mmcblk\d", "card"),
)
_NETWORK_MODELS = ("Elastic Block Store", "nvme_card-pd", "PersistentDisk", "NVMe Accelerator")
"""Parts of the model names of network volumes in clouds. These volumes look like local NVMe drives."""
_VIRTUAL_MODELS = ("QEMU", "VMware", "Virtual", "VBOX")


def kind_of(filesystem: str, disk: Path | None) -> DiskKind:
    """Return the kind of a disk; '' if the system does not report the kind.

    Args:
        filesystem: type of the file system on the disk, such as "ext4".
        disk: the disk's directory in /sys, with all links resolved; None if the file system has no block device.
    """
    if filesystem in MEMORY_FILESYSTEMS:
        return "memory"
    if filesystem in NETWORK_FILESYSTEMS or (disk is None and filesystem.startswith("fuse.")):
        return "network"
    if disk is None:
        return ""
    model = f"{text_of(disk / 'device/vendor')} {text_of(disk / 'device/model')}"
    if disk.name.startswith("nvme"):
        return "network" if _has(model, _NETWORK_MODELS) or _transports(disk / "device") - {"pcie"} else "NVMe"
    for pattern, kind in _NAMES:
        if re.match(pattern, disk.name):
            return kind
    if _has(model, _VIRTUAL_MODELS) or "/virtio" in str(disk):
        return "virtual"
    if "/usb" in str(disk):
        return "USB"
    if flag_of(disk / "queue/rotational"):
        return "rotating"
    if "/ata" in str(disk):
        return "SATA"
    return "SCSI" if disk.name.startswith("sd") else ""


def _transports(device: Path) -> set[str]:
    """Return the transports of an NVMe controller, or of all controllers of a multipath subsystem.

    Args:
        device: directory of the controller or the subsystem in /sys.

    Returns:
        An empty set if /sys names no transport for any of the controllers.
    """
    places = [device, *(device.glob("nvme[0-9]*") if device.is_dir() else [])]
    return {text for place in places if (text := text_of(place / "transport"))}


def _has(model: str, parts: tuple[str, ...]) -> bool:
    return any(part in model for part in parts)
