"""How disks are attached, by trees of /sys made for the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.cli.disk_kinds import kind_of
from tests.io.test_disks import write


@pytest.mark.parametrize(
    ("place", "files", "kind"),
    [
        ("pci0000:00/nvme/nvme0/nvme0n1", {}, "NVMe"),
        ("pci0000:00/nvme/nvme0/nvme0n1", {"device/transport": "pcie"}, "NVMe"),
        ("pci0000:00/nvme/nvme0/nvme0n1", {"device/transport": "tcp"}, "network"),
        ("virtual/nvme-subsystem/nvme-subsys0/nvme0n1", {"device/nvme0/transport": "rdma"}, "network"),
        ("pci0000:00/nvme/nvme0/nvme0n1", {"device/model": "Amazon Elastic Block Store"}, "network"),
        ("pci0000:00/nvme/nvme0/nvme0n1", {"device/model": "Amazon EC2 NVMe Instance Storage"}, "NVMe"),
        ("pci0000:00/nvme/nvme0/nvme0n1", {"device/model": "nvme_card-pd"}, "network"),
        ("pci0000:00/0000:00:02.0/virtio1/block/vda", {"queue/rotational": "1"}, "virtual"),
        ("pci0000:00/ata1/host0/block/sda", {"queue/rotational": "0"}, "SATA"),
        ("pci0000:00/ata1/host0/block/sda", {"queue/rotational": "1"}, "rotating"),
        ("pci0000:00/ata1/host0/block/sda", {"device/vendor": "ATA", "device/model": "QEMU HARDDISK"}, "virtual"),
        ("pci0000:00/usb1/1-1/host0/block/sdb", {"queue/rotational": "0"}, "USB"),
        ("pci0000:00/host0/block/sdc", {"queue/rotational": "0"}, "SCSI"),
        ("virtual/block/rbd0", {}, "network"),
        ("virtual/block/ram0", {}, "memory"),
        ("virtual/block/zram1", {}, "memory"),
        ("platform/mmc0/block/mmcblk0", {}, "card"),
        ("virtual/block/strange7", {}, ""),
    ],
)
def test_a_disk_is_known_by_its_name_and_place(place: str, files: dict[str, str], kind: str, tmp_path: Path) -> None:
    disk = tmp_path / "devices" / place
    disk.mkdir(parents=True)
    write(disk, files)
    assert kind_of("ext4", disk) == kind


@pytest.mark.parametrize(
    ("filesystem", "kind"),
    [("tmpfs", "memory"), ("nfs4", "network"), ("9p", "network"), ("fuse.sshfs", "network"), ("overlay", "")],
)
def test_a_file_system_without_a_disk_is_known_by_its_name(filesystem: str, kind: str) -> None:
    assert kind_of(filesystem, None) == kind
