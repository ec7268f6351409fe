"""Resources of this machine that the process may use: RAM (control groups included) and cores."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from infinity.base.control_groups import memory_limits

_ROOT = Path("/")


def available_host_bytes(root: Path = _ROOT) -> int:
    """Return the bytes of RAM that can be allocated now, within the limits of the system and of the control groups.

    Args:
        root: directory that contains sys/ and proc/ of the groups; `/` except in tests.
    """
    left = [max(limit - usage, 0) for limit, usage in memory_limits(root)]
    return min([int(psutil.virtual_memory().available), *left])


def budgets_in_ram(left: int) -> dict[str, str]:
    """Return values of memory.host and memory.device that fit into RAM together, for a machine without a GPU.

    Args:
        left: bytes of RAM that can be allocated.
    """
    return {"host": f"{left // 2 >> 20}MiB", "device": f"{left // 4 >> 20}MiB"}


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))
