"""Facts about the disk under a directory and about the machine: for the report of infinity-bench, for NUMA placement,
and for the key of a disk's profile.

A fact that the system does not tell is None or ''. The only error is a path that does not exist.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from infinity.base.control_groups import groups
from infinity.base.machine import processor
from infinity.base.small_files import chosen, fields, flag_of, number_in, number_of, text_of
from infinity.io.disk_kinds import DiskKind, kind_of
from infinity.io.endurance import Endurance, ask_drive

_ROOT = Path("/")
_CAP_IPC_LOCK = 14
_STATX_DIOALIGN = 0x2000
_AT_FDCWD = -100
_STATX_BYTES, _STATX_MASK_AT, _STATX_DIO_AT = 256, 0, 0x98  # offsets in struct statx


@dataclass(frozen=True)
class DiskFacts:
    """The disk under a directory.

    Attributes:
        device: kernel name of the whole disk ('nvme0n1'); '' where there is none.
        members: the disks below a device-mapper or md device; else the device itself.
        kind: how the first of them is attached, or that the files are elsewhere; '' where the system does not tell.
        mount_options: of the mount, then those of the file system.
        write_cache: 'write back' or 'write through'.
        discards: whether the device takes TRIM.
        max_transfer_bytes: the largest request that the kernel sends the device.
        dio_memory_align, dio_offset_align: alignment that direct I/O needs, in bytes; None where the kernel or the file
            system does not tell, 0 where direct I/O is not possible.
    """

    path: str
    mount_point: str = ""
    filesystem: str = ""
    mount_options: str = ""
    source: str = ""
    total_bytes: int = 0
    free_bytes: int = 0
    device: str = ""
    members: tuple[str, ...] = ()
    kind: DiskKind = ""
    model: str = ""
    size_bytes: int | None = None
    rotational: bool | None = None
    write_cache: str = ""
    scheduler: str = ""
    discards: bool | None = None
    logical_block_bytes: int | None = None
    physical_block_bytes: int | None = None
    max_transfer_bytes: int | None = None
    numa_node: int | None = None
    dio_memory_align: int | None = None
    dio_offset_align: int | None = None
    endurance: Endurance | None = None


@dataclass(frozen=True)
class MachineFacts:
    """The machine, and what it allows this process.

    Attributes:
        memlock_soft_bytes, memlock_hard_bytes: None = unlimited.
        can_lock_any: whether the process has CAP_IPC_LOCK, which overrides these limits.
        io_uring_disabled: the sysctl: 0 for all, 1 for privileged processes only, 2 for none; None without the sysctl.
        cgroup_io_max: I/O limits of this process' control group; '' where there are none.
    """

    kernel: str
    architecture: str
    cpu_model: str
    cores: int
    total_memory_bytes: int
    memlock_soft_bytes: int | None
    memlock_hard_bytes: int | None
    can_lock_any: bool
    numa_nodes: int
    transparent_hugepage: str
    io_uring_disabled: int | None
    container: bool
    cgroup_io_max: str


def describe_disk(path: Path, *, file: Path | None = None, endurance: bool = False, root: Path = _ROOT) -> DiskFacts:
    """The facts about the disk that holds `path`.

    Args:
        file: a regular file there, to ask for the alignment of its direct I/O.
        endurance: also ask smartctl or nvme-cli, which takes a moment and may need root.
        root: of /sys and /proc, for tests.

    Raises:
        OSError: `path` does not exist.
    """
    info = os.statvfs(path)
    mount_point, options, filesystem, source = _mount_of(path.absolute(), root)
    block = _block_device(os.stat(path).st_dev, root) or _block_device_named(source, root)
    disk = _whole_disk(block)
    members = _members(disk)
    first = members[0] if members else disk
    nodes = {_numa_node(member) for member in members}
    align = (None, None) if file is None else _dio_align(file)
    return DiskFacts(
        path=str(path),
        mount_point=mount_point,
        filesystem=filesystem,
        mount_options=options,
        source=source,
        total_bytes=info.f_blocks * info.f_frsize,
        free_bytes=info.f_bavail * info.f_frsize,
        device="" if disk is None else disk.name,
        members=tuple(member.name for member in members),
        kind=kind_of(filesystem, first),
        model="" if first is None else text_of(first / "device/model"),
        size_bytes=None if disk is None else number_of(disk / "size", 512),
        rotational=None if first is None else flag_of(first / "queue/rotational"),
        write_cache="" if first is None else text_of(first / "queue/write_cache"),
        scheduler="" if first is None else chosen(text_of(first / "queue/scheduler")),
        discards=None if first is None else flag_of(first / "queue/discard_max_bytes"),
        logical_block_bytes=None if first is None else number_of(first / "queue/logical_block_size"),
        physical_block_bytes=None if first is None else number_of(first / "queue/physical_block_size"),
        max_transfer_bytes=None if first is None else number_of(first / "queue/max_sectors_kb", 1024),
        numa_node=nodes.pop() if len(nodes) == 1 else None,
        dio_memory_align=align[0],
        dio_offset_align=align[1],
        endurance=ask_drive(first.name).endurance if endurance and first is not None else None,
    )


def disk_key(path: Path) -> str:
    """A name of the file system that holds `path`: the same for all its directories, and after a reboot."""
    facts = describe_disk(path)
    return f"{facts.filesystem}:{os.statvfs(path).f_fsid:x}:{facts.device}"


def describe_machine(root: Path = _ROOT) -> MachineFacts:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    status = dict(fields(text_of(root / "proc/self/status")))
    capabilities = number_in(status.get("CapEff", ""), 16) or 0
    return MachineFacts(
        kernel=platform.release(),
        architecture=platform.machine(),
        cpu_model=processor(root).model,
        cores=len(os.sched_getaffinity(0)),
        total_memory_bytes=int(psutil.virtual_memory().total),
        memlock_soft_bytes=None if soft == resource.RLIM_INFINITY else soft,
        memlock_hard_bytes=None if hard == resource.RLIM_INFINITY else hard,
        can_lock_any=bool(capabilities >> _CAP_IPC_LOCK & 1),
        numa_nodes=len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or 1,
        transparent_hugepage=chosen(text_of(root / "sys/kernel/mm/transparent_hugepage/enabled")),
        io_uring_disabled=number_of(root / "proc/sys/kernel/io_uring_disabled"),
        container=_in_container(root),
        cgroup_io_max=_cgroup_io_max(root),
    )


# -- mounts -----------------------------------------------------------------------------------------------------------


def _mount_of(path: Path, root: Path) -> tuple[str, str, str, str]:
    """(mount point, options, file system, source) of the innermost mount that holds `path`."""
    best = ("", "", "", "")
    real = os.path.realpath(path)
    for line in text_of(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 6 or len(kind) < 2:
            continue
        mount = _unescape(fields[4])
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best[0]):
            options = dict.fromkeys([*fields[5].split(","), *"".join(kind[2:3]).split(",")])
            best = (mount, ",".join(filter(None, options)), kind[0], _unescape(kind[1]))
    return best


def _unescape(text: str) -> str:
    """mountinfo writes blanks and the like as octal."""
    for code in ("040", "011", "012", "134"):
        text = text.replace(f"\\{code}", chr(int(code, 8)))
    return text


# -- block devices ----------------------------------------------------------------------------------------------------


def _block_device(number: int, root: Path) -> Path | None:
    path = root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    return path.resolve() if path.exists() else None


def _block_device_named(source: str, root: Path) -> Path | None:
    """The device of a file system such as btrfs, whose st_dev is not the number of a device; of several devices, the
    one that was mounted."""
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
    """The disks at the bottom of a stack of device mappers and md arrays."""
    if disk is None:
        return []
    slaves = sorted((disk / "slaves").iterdir()) if (disk / "slaves").is_dir() else []
    found: list[Path] = []
    for slave in slaves:
        for member in _members(_whole_disk(slave.resolve())):
            if member not in found:
                found.append(member)
    return found or [disk]


def _numa_node(disk: Path) -> int | None:
    """The nearest `numa_node` above the disk; -1 means that there is none.

    A namespace of multipath NVMe is below a virtual subsystem without a node; the controllers linked there have it.
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


def _dio_align(file: Path) -> tuple[int | None, int | None]:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "statx"):
        return None, None
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    if libc.statx(_AT_FDCWD, os.fsencode(file), 0, _STATX_DIOALIGN, buffer) != 0:
        return None, None
    mask = int.from_bytes(buffer.raw[_STATX_MASK_AT : _STATX_MASK_AT + 4], sys.byteorder)
    if not mask & _STATX_DIOALIGN:
        return None, None
    memory = int.from_bytes(buffer.raw[_STATX_DIO_AT : _STATX_DIO_AT + 4], sys.byteorder)
    return memory, int.from_bytes(buffer.raw[_STATX_DIO_AT + 4 : _STATX_DIO_AT + 8], sys.byteorder)


# -- the machine ------------------------------------------------------------------------------------------------------


def _in_container(root: Path) -> bool:
    if (root / ".dockerenv").exists() or (root / "run/.containerenv").exists():
        return True
    words = ("docker", "kubepods", "containerd", "libpod", "lxc")
    return any(word in text_of(root / "proc/1/cgroup") for word in words)


def _cgroup_io_max(root: Path) -> str:
    """A line each, innermost first."""
    limits = [text_of(group / "io.max") for group in groups("io", root)]
    return "\n".join(dict.fromkeys(filter(None, limits)))
