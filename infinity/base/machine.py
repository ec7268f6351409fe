"""What this machine lets us use: RAM (control groups included) and cores."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from infinity.base.control_groups import memory_limits
from infinity.base.small_files import fields, text_of

_ROOT = Path("/")
_CACHE_FILES = ("level", "shared_cpu_list", "size")


def available_host_bytes(root: Path = _ROOT) -> int:
    """RAM that can be taken now: the system's, or what the control groups leave, whichever is less.

    Args:
        root: of /sys and /proc where the groups are, for tests.
    """
    left = [max(limit - usage, 0) for limit, usage in memory_limits(root)]
    return min([int(psutil.virtual_memory().available), *left])


def budgets_in_ram(left: int) -> dict[str, str]:
    """memory.host and memory.device that fit together, where the CPU computes. Args: left: RAM that can be taken."""
    return {"host": f"{left // 2 >> 20}MiB", "device": f"{left // 4 >> 20}MiB"}


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


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


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
