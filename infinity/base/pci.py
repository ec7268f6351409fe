"""GPUs and their links as /sys lists them, including GPUs for which neither a driver nor torch support is installed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from infinity.base.small_files import number_in, number_of, text_of

_ROOT = Path("/")
_VENDORS = {0x10DE: "NVIDIA", 0x1002: "AMD"}
_DISPLAY, _ACCELERATOR = 0x03, 0x12
"""PCI base classes of devices that may compute."""
_LANES_MAX = 32
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""PCIe generations, by the transfer rate of a lane in GT/s."""
_LANE_RATES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes per second of a lane in each direction, by generation; the overhead of the line code is deducted."""


@dataclass(frozen=True)
class PcieLink:
    """PCIe link of a device, in its current state or at its maximum.

    Attributes:
        generation: PCIe generation, 1 to 6; lower while the device is idle, to save power.
        lanes: 1 to 32.
    """

    generation: int
    lanes: int

    @property
    def rate(self) -> float:
        """Bytes per second in each direction, counting packet headers as data."""
        return _LANE_RATES[self.generation] * self.lanes

    def __str__(self) -> str:
        return f"Gen{self.generation} ×{self.lanes}"


@dataclass(frozen=True)
class PciGpu:
    """GPU, by its PCI address ('0000:65:00.0').

    Attributes:
        address: PCI address.
        vendor: 'NVIDIA' or 'AMD'.
        numa_node: NUMA node of the GPU; None if it has no node.
    """

    address: str
    vendor: str
    numa_node: int | None


def gpus(root: Path = _ROOT) -> list[PciGpu]:
    """Return the GPUs of vendors whose runtime infinity can use, by address."""
    place = root / "sys/bus/pci/devices"
    found = []
    for device in sorted(place.iterdir()) if place.is_dir() else []:
        vendor = _VENDORS.get(number_in(text_of(device / "vendor"), 16) or 0)
        base_class = (number_in(text_of(device / "class"), 16) or 0) >> 16
        if vendor is not None and base_class in (_DISPLAY, _ACCELERATOR):
            found.append(PciGpu(device.name, vendor, number_of(device / "numa_node")))
    return found


def numa_node(address: str, root: Path = _ROOT) -> int:
    """Return the NUMA node of a device; -1 if the device has no node, or if the system does not report the node.

    Args:
        address: PCI address; "" if it is not known.
        root: directory that contains sys/; `/` except in tests.
    """
    found = number_of(root / "sys/bus/pci/devices" / address / "numa_node") if address else None
    return -1 if found is None else found


def link(address: str, which: str, root: Path = _ROOT) -> PcieLink | None:
    """Return the link of a device; None if the system does not report the link, as in virtual machines.

    Args:
        address: PCI address.
        which: 'current' or 'max'.
        root: directory that contains sys/; `/` except in tests.
    """
    device = root / "sys/bus/pci/devices" / address
    speed = re.match(r"(\d+(?:\.\d+)?) ?GT/s", text_of(device / f"{which}_link_speed"))
    generation = None if speed is None else _GENERATIONS.get(float(speed[1]))
    lanes = number_of(device / f"{which}_link_width")
    if generation is None or lanes is None or not 0 < lanes <= _LANES_MAX:
        return None
    return PcieLink(generation, lanes)
