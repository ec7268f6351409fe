"""Facts about the processor: its name, its instructions and its caches."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from infinity.base.small_files import fields, text_of

_ROOT = Path("/")
_CACHE_FILES = ("level", "shared_cpu_list", "size")


@dataclass(frozen=True)
class ProcessorFacts:
    """The processor.

    Attributes:
        model: name of the processor; '' if the system does not report the name.
        flags: names of the processor's features, as Linux spells them.
    """

    model: str
    flags: frozenset[str]


def processor(root: Path = _ROOT) -> ProcessorFacts:
    """Return the processor of this machine.

    Args:
        root: directory that contains /proc, for tests.
    """
    told = dict(fields(text_of(root / "proc/cpuinfo")))
    return ProcessorFacts(
        model=told.get("model name", ""),
        flags=frozenset(told.get("flags", told.get("Features", "")).split()),  # on ARM the key is "Features"
    )


def last_cache_bytes(root: Path = _ROOT) -> int:
    """Return the total size of the last-level caches of the cores that this process may use.

    Args:
        root: directory that contains /sys, for tests.

    Returns:
        0 if the system does not report the caches.
    """
    found: dict[tuple[int, str], int] = {}
    for cpu in os.sched_getaffinity(0):
        for cache in (root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index[0-9]*"):
            try:
                level, shared, size = ((cache / name).read_text().strip() for name in _CACHE_FILES)
                found[int(level), shared] = int(size.removesuffix("K")) << 10
            except (OSError, ValueError):  # this kernel or virtual machine does not report the caches
                continue
    last = max((level for level, _ in found), default=0)
    return sum(nbytes for (level, _), nbytes in found.items() if level == last)
