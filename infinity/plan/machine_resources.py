"""Memory and cores of this machine that infinity may use."""

from __future__ import annotations

import torch

from infinity.base.accelerator import free_bytes
from infinity.base.host_limits import available_host_bytes, usable_cores

__all__ = ["available_device_bytes", "available_host_bytes", "usable_cores"]


def available_device_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU; on the CPU, return available_host_bytes()."""
    return available_host_bytes() if device.type == "cpu" else free_bytes(device)
