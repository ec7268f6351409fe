"""Facts about the disk under a directory, for the reports of the doctor and of infinity-bench.

A fact that the system does not tell is None or ''. The only error is a path that does not exist.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from infinity.base.small_files import chosen, flag_of, text_of
from infinity.cli.disk_kinds import DiskKind, kind_of
from infinity.io.disks import disk_under

_ROOT = Path("/")


@dataclass(frozen=True)
class DiskFacts:
    """The disk under a directory.

    Attributes:
        device: kernel name of the whole disk ('nvme0n1'); '' where there is none.
        members: the disks below a device-mapper or md device; else the device itself.
        kind: how the first of them is attached, or that the files are elsewhere; '' where the system does not tell.
        write_cache: 'write back' or 'write through'.
        discards: whether the device takes TRIM.
    """

    path: str
    mount_point: str
    filesystem: str
    mount_options: str
    total_bytes: int
    free_bytes: int
    device: str
    members: tuple[str, ...]
    kind: DiskKind
    model: str
    write_cache: str
    scheduler: str
    discards: bool | None
    numa_node: int | None


def describe_disk(path: Path, root: Path = _ROOT) -> DiskFacts:
    """The facts about the disk that holds `path`.

    Args:
        root: of /sys, for tests.

    Raises:
        OSError: `path` does not exist.
    """
    disk, room = disk_under(path, root), shutil.disk_usage(path)
    first = disk.members[0] if disk.members else None
    return DiskFacts(
        path=str(path),
        mount_point=disk.mount_point,
        filesystem=disk.filesystem,
        mount_options=disk.mount_options,
        total_bytes=room.total,
        free_bytes=room.free,
        device=disk.device,
        members=tuple(member.name for member in disk.members),
        kind=kind_of(disk.filesystem, first),
        model="" if first is None else text_of(first / "device/model"),
        write_cache="" if first is None else text_of(first / "queue/write_cache"),
        scheduler="" if first is None else chosen(text_of(first / "queue/scheduler")),
        discards=None if first is None else flag_of(first / "queue/discard_max_bytes"),
        numa_node=disk.numa_node,
    )
