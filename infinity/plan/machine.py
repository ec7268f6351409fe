"""What this machine lets us use: memory (cgroups included) and cores."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import torch

from infinity.base.accelerator import free_bytes

_CGROUP_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_host_bytes() -> int:
    """RAM that can be taken now: the system's, or what the control group leaves, whichever is less."""
    available = int(psutil.virtual_memory().available)
    for limit_path, usage_path in _CGROUP_LIMITS:
        try:
            limit, usage = Path(limit_path).read_text().strip(), int(Path(usage_path).read_text())
        except (OSError, ValueError):
            continue
        if limit != "max":
            available = min(available, max(int(limit) - usage, 0))
    return available


def available_device_bytes(device: torch.device) -> int:
    """Free memory of a GPU; on the CPU, see available_host_bytes."""
    return available_host_bytes() if device.type == "cpu" else free_bytes(device)


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))
