"""Facts about the machine and what it allows this process, for the reports of the doctor and of infinity-bench.

A fact that the system does not tell is None or ''.
"""

from __future__ import annotations

import os
import platform
import resource
from dataclasses import dataclass
from pathlib import Path

import psutil

from infinity.base.control_groups import groups
from infinity.base.small_files import chosen, fields, number_in, number_of, text_of
from infinity.cli.doctor.mends import container_kind

_ROOT = Path("/")
_CAP_IPC_LOCK = 14
_CACHE_FILES = ("level", "shared_cpu_list", "size")


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


def describe_machine(root: Path = _ROOT) -> MachineFacts:
    """Args: root: of /sys and /proc, for tests."""
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
        container=bool(container_kind(root)),
        cgroup_io_max=_cgroup_io_max(root),
    )


def _cgroup_io_max(root: Path) -> str:
    """A line each, innermost first."""
    limits = [text_of(group / "io.max") for group in groups("io", root)]
    return "\n".join(dict.fromkeys(filter(None, limits)))


@dataclass(frozen=True)
class Processor:
    """The processor.

    Attributes:
        model: its name; '' where the system does not tell.
        flags: names of its features, as Linux calls them.
    """

    model: str
    flags: frozenset[str]


def processor(root: Path = _ROOT) -> Processor:
    """The processor that runs this.

    Args:
        root: of /proc, for tests.
    """
    told = dict(fields(text_of(root / "proc/cpuinfo")))
    return Processor(
        model=told.get("model name", ""),
        flags=frozenset(told.get("flags", told.get("Features", "")).split()),  # "Features" on ARM
    )


def last_cache_bytes(root: Path = _ROOT) -> int:
    """Of the largest caches that these cores have, together; 0 where the system does not say.

    Args:
        root: of /sys, for tests.
    """
    found: dict[tuple[int, str], int] = {}
    for cpu in os.sched_getaffinity(0):
        for cache in (root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index[0-9]*"):
            try:
                level, shared, size = ((cache / name).read_text().strip() for name in _CACHE_FILES)
                found[int(level), shared] = int(size.removesuffix("K")) << 10
            except (OSError, ValueError):  # a kernel, or a virtual machine, that does not tell
                continue
    last = max((level for level, _ in found), default=0)
    return sum(nbytes for (level, _), nbytes in found.items() if level == last)
