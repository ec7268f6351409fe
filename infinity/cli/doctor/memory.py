"""Probes of memory: RAM and the limit of the control group, huge pages, and the limit of locked memory."""

from __future__ import annotations

import resource
from pathlib import Path

from infinity.base.small_files import chosen, fields, number_in, text_of
from infinity.cli.doctor.fixes import restarted, written
from infinity.cli.doctor.probes import ProbeFinding
from infinity.config import SwapConfig
from infinity.sizes import format_bytes

_ROOT = Path("/")
_THP = "/sys/kernel/mm/transparent_hugepage/enabled"
_LIMITS_FILE = "/etc/security/limits.d/90-infinity.conf"
_CAP_IPC_LOCK = 14


def ram(config: SwapConfig, root: Path = _ROOT) -> ProbeFinding:
    import psutil

    from infinity.base.control_groups import memory_limits
    from infinity.base.host_limits import available_host_bytes

    total, left = int(psutil.virtual_memory().total), available_host_bytes(root)
    limits = [limit for limit, _ in memory_limits(root) if limit < total]
    said = f"{format_bytes(total)}, of which {format_bytes(left)} is available now"
    said += f"; the control group allows {format_bytes(min(limits))}" if limits else ""
    wanted = config.memory.host
    if wanted is not None and wanted > left:
        return ProbeFinding(
            "missing",
            f"{said}; memory.host is {format_bytes(wanted)}: lower memory.host, or leave it out to use the available "
            "memory",
        )
    return ProbeFinding("ok", said)


def huge_pages(root: Path = _ROOT) -> ProbeFinding:
    setting = chosen(text_of(root / _THP[1:]))
    if setting in ("always", "madvise"):
        return ProbeFinding("ok", setting)
    if not setting:
        return ProbeFinding("unknown", "the kernel does not report its setting")
    return ProbeFinding("slower", f"{setting}: infinity's memory is in pages of 4 KiB", written("madvise", _THP))


def locked(config: SwapConfig, root: Path = _ROOT) -> ProbeFinding:
    """Return a row that compares the limit of locked memory with the bytes that a run registers with io_uring.

    The function imports torch.
    """
    from infinity.base.host_limits import available_host_bytes
    from infinity.plan.planner import HOST_SHARE

    wanted = config.memory.host or int(available_host_bytes(root) * HOST_SHARE)
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    said = f"a run registers up to {format_bytes(wanted)} (memory.host)"
    if soft == resource.RLIM_INFINITY:
        return ProbeFinding("ok", f"no limit; {said}")
    said = f"limit {format_bytes(soft)}; {said}"
    capabilities = number_in(dict(fields(text_of(root / "proc/self/status"))).get("CapEff", ""), 16) or 0
    if capabilities >> _CAP_IPC_LOCK & 1:
        return ProbeFinding("ok", f"{said}; this process may exceed it")
    if soft >= wanted:
        return ProbeFinding("ok", said)
    mend = restarted("--ulimit memlock=-1", root)
    if hard == resource.RLIM_INFINITY or hard >= wanted:
        mend = f"ulimit -l {'unlimited' if hard == resource.RLIM_INFINITY else hard >> 10}"
    mend = mend or f'echo "$USER - memlock unlimited" | sudo tee {_LIMITS_FILE}  # then log in again'
    return ProbeFinding("slower", f"{said}. Above the limit, transfers need more processor time", mend)
