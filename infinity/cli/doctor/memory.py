"""RAM, what a control group leaves of it, swap and huge pages."""

from __future__ import annotations

from pathlib import Path

from infinity.cli.doctor.mends import written
from infinity.cli.doctor.rows import Found, Probes
from infinity.config import SwapConfig
from infinity.sizes import format_bytes

_ROOT = Path("/")
_THP = "/sys/kernel/mm/transparent_hugepage/enabled"


def memory(config: SwapConfig, root: Path = _ROOT) -> Probes:
    rows = {"RAM": lambda: ram(config, root), "swap": swap, "huge pages": lambda: huge_pages(root)}
    return Probes.of("memory", rows)


def ram(config: SwapConfig, root: Path = _ROOT) -> Found:
    import psutil

    from infinity.base.control_groups import memory_limits
    from infinity.base.machine import available_host_bytes

    total, left = int(psutil.virtual_memory().total), available_host_bytes(root)
    limits = [limit for limit, _ in memory_limits(root) if limit < total]
    said = f"{format_bytes(total)}, of which {format_bytes(left)} can be taken now"
    said += f"; the control group allows {format_bytes(min(limits))}" if limits else ""
    wanted = config.memory.host
    if wanted is not None and wanted > left:
        return Found(
            "missing",
            f"{said}; memory.host is {format_bytes(wanted)}: lower it, or leave it out, which takes what there is",
        )
    return Found("ok", said)


def swap() -> Found:
    import psutil

    found = psutil.swap_memory()
    if not found.total:
        return Found("ok", "none")
    return Found("ok", f"{format_bytes(found.total)}, of which {format_bytes(found.used)} are used")


def huge_pages(root: Path = _ROOT) -> Found:
    from infinity.cli.machine_facts import describe_machine

    setting = describe_machine(root).transparent_hugepage
    if setting in ("always", "madvise"):
        return Found("ok", setting)
    if not setting:
        return Found("unknown", "the kernel does not say")
    return Found("slower", f"{setting}: infinity's memory is in pages of 4 KiB", written("madvise", _THP))
