"""Facts about the processor: its name, its instructions, the 16-bit dtypes for which it has any, and its caches."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.base.small_files import fields, text_of

_ROOT = Path("/")
_CACHE_FILES = ("level", "shared_cpu_list", "size")
_X86 = {"bf16": ("avx512_bf16", "amx_bf16"), "fp16": ("avx512_fp16", "amx_fp16")}
_ARM: Mapping[str, Sequence[str]] = {"bf16": ("bf16",), "fp16": ()}
"""Flags of processors that have instructions for a 16-bit dtype, by dtype.

The preferred dtype comes first. On 64-bit ARM torch uses no fp16 instructions.
"""


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


def fast_flags(flags: frozenset[str]) -> Mapping[str, Sequence[str]]:
    """Return the flags of instructions for each 16-bit dtype, for a processor with these flags."""
    return _ARM if "asimd" in flags else _X86  # all 64-bit ARM processors have asimd


def slow_dtype(name: str, flags: frozenset[str]) -> str | None:
    """Return a warning if a processor with these flags has no instructions for products of matrices of a dtype.

    Args:
        name: the dtype by its name on the command line.
        flags: flags of the processor.
    """
    table = fast_flags(flags)
    if name not in table or flags.intersection(table[name]):
        return None
    why = (
        f"this processor has {none_of(table[name])}"
        if table[name]
        else "torch uses no fp16 instructions of this processor"
    )
    return f"dtype {name}: {why}, so it multiplies such matrices more slowly than fp32 matrices"


def none_of(flags: Sequence[str]) -> str:
    """Return 'no a', 'neither a nor b' or 'none of a, b, c'."""
    if len(flags) > 2:
        return f"none of {', '.join(flags)}"
    return f"neither {flags[0]} nor {flags[1]}" if len(flags) == 2 else f"no {flags[0]}"


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
