"""Measurement of the copies to and from a device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from infinity.base import pci
from infinity.base.accelerator import Accelerator
from infinity.io.arena import PinnedArena

_ROOT = Path("/")
_COPIED_BYTES = 64 << 20
_COPIES = 4


@dataclass(frozen=True)
class CopyMeasurement:
    """The result of measuring copies.

    Attributes:
        refused: why memory could not be pinned; '' if the memory was pinned.
        up_rate, down_rate: bytes per second to and from the device.
        link: state of the link during the copies; None if the system does not report it.
    """

    refused: str
    up_rate: float
    down_rate: float
    link: pci.PcieLink | None


def measure(device: Accelerator, address: str, root: Path = _ROOT) -> CopyMeasurement:
    """Pin 64 MiB and copy it to and from the device a few times.

    The measurement needs 128 MiB of memory and takes much less than a second.
    """
    arena = PinnedArena(_COPIED_BYTES)
    host = torch.frombuffer(arena.memory.view(0, _COPIED_BYTES), dtype=torch.uint8)
    host.fill_(1)
    refused = arena.pin(device)
    slab, stream = device.slab(_COPIED_BYTES), device.stream()
    device.synchronize(device.copy(slab, host, on=stream))  # the first copies wake the link from its power-saving state
    rates, link = [], None
    for into, source in ((slab, host), (host, slab)):
        began = device.record(stream, timed=True)
        for _ in range(_COPIES):
            device.copy(into, source, on=stream)
        ended = device.record(stream, timed=True)
        link = pci.link(address, "current", root) if address else None
        device.synchronize(ended)
        rates.append(_COPIES * _COPIED_BYTES / max(device.seconds(began, ended), 1e-9))
    return CopyMeasurement(refused, rates[0], rates[1], link)
