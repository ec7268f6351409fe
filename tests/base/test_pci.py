"""GPUs and links, by trees of /sys made for the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.base.pci import PcieLink, PciGpu, gpus, link, numa_node
from tests.io.test_disks import write


def put(root: Path, address: str, **files: str) -> None:
    """Put a device on the bus."""
    write(root, {f"sys/bus/pci/devices/{address}/{name}": text for name, text in files.items()})


def card(root: Path, address: str = "0000:65:00.0", *, vendor: str = "0x10de", node: str = "-1") -> None:
    """Put a GPU on the bus, by default one of NVIDIA."""
    put(root, address, vendor=vendor, **{"class": "0x030200"}, numa_node=node)


def test_gpus_are_known_by_vendor_and_class(tmp_path: Path) -> None:
    card(tmp_path, node="1")
    put(tmp_path, "0000:66:00.0", vendor="0x1002", **{"class": "0x120000"})
    put(tmp_path, "0000:67:00.0", vendor="0x10de", **{"class": "0x040300"})  # the sound of a graphics card
    put(tmp_path, "0000:68:00.0", vendor="0x8086", **{"class": "0x030000"})
    put(tmp_path, "0000:69:00.0", vendor="junk", **{"class": ""})
    assert gpus(tmp_path) == [PciGpu("0000:65:00.0", "NVIDIA", 1), PciGpu("0000:66:00.0", "AMD", None)]


@pytest.mark.parametrize(("told", "node"), [("1", 1), ("0", 0), ("-1", -1), ("", -1)])
def test_the_node_of_a_device_is_told_or_none(told: str, node: int, tmp_path: Path) -> None:
    card(tmp_path, node=told)
    assert numa_node("0000:65:00.0", tmp_path) == node
    assert numa_node("", tmp_path) == numa_node("0000:66:00.0", tmp_path) == -1


def test_a_machine_without_a_bus_has_no_gpus(tmp_path: Path) -> None:
    assert gpus(tmp_path) == []


@pytest.mark.parametrize(
    ("speed", "width", "found"),
    [
        ("16.0 GT/s PCIe", "16", PcieLink(4, 16)),
        ("8 GT/s", "8", PcieLink(3, 8)),
        ("32.0 GT/s PCIe", "16", PcieLink(5, 16)),
        ("2.5 GT/s PCIe", "1", PcieLink(1, 1)),
        ("Unknown", "16", None),
        ("Unknown speed", "0", None),
        ("16.0 GT/s PCIe", "0", None),
        ("16.0 GT/s PCIe", "255", None),
        ("17.0 GT/s PCIe", "16", None),
        ("", "", None),
    ],
)
def test_a_link_has_a_generation_and_lanes(speed: str, width: str, found: PcieLink | None, tmp_path: Path) -> None:
    put(tmp_path, "0000:65:00.0", max_link_speed=speed, max_link_width=width)
    assert link("0000:65:00.0", "max", tmp_path) == found
    assert link("0000:65:00.0", "current", tmp_path) is None


def test_a_wider_or_newer_link_is_faster() -> None:
    assert PcieLink(4, 16).rate == pytest.approx(31.5e9, rel=0.01)
    assert PcieLink(4, 8).rate < PcieLink(3, 16).rate * 1.01
    assert str(PcieLink(4, 16)) == "Gen4 ×16"
