"""Where gradients wait for the update: in RAM as far as it reaches, the rest on NVMe.

A gradient that spills lands in a window of host memory, is written from there, and is read by the update; a second
micro-batch reads it back into the window and adds to it. The window holds the two largest units, so that one lands
while another is written. What waits in RAM in 16 bits grows to fp32 when a second micro-batch comes: that, too, goes
through the window then, so every gradient without room for fp32 in RAM has a place in the store. Where several passes
are expected before each step, what waits in RAM has room for fp32 at once: 16 bits would spare one pass its way only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from infinity.config import SwapConfig
from infinity.plan.totals import Totals, UnitBytes, as_far_as


@dataclass(frozen=True)
class GradientPlacement:
    """Where gradients wait.

    Attributes:
        in_ram: indices of the units whose gradients wait in RAM.
        fp32: there is room for those in RAM in fp32.
        ram_bytes: host memory for them.
        landing_bytes: of the window that the others land in; 0 where none spills.
        swap_bytes: their places in the store.
    """

    in_ram: frozenset[int]
    fp32: bool
    ram_bytes: int
    landing_bytes: int = 0
    swap_bytes: int = 0

    @property
    def spills(self) -> bool:
        return self.swap_bytes > 0

    def host_bytes(self, totals: Totals) -> int:
        """Of host memory, checksums included."""
        return self.ram_bytes + self.landing_bytes + totals.checksum_bytes(self.swap_bytes)


def gradient_placements(config: SwapConfig, totals: Totals, room: int) -> Iterator[GradientPlacement]:
    """What may be tried, the best first.

    Args:
        room: host memory for gradients where some spill.
    """
    if config.gradients != "nvme":
        yield GradientPlacement(totals.trained, True, totals.gradient_fp32)
    if config.gradients == "nvme":
        yield _spilled(totals, frozenset())
    elif config.gradients == "auto" and config.nvme.paths and totals.trained:
        yield _spilled(totals, _as_many_as_fit(totals, room))
    if config.gradients != "nvme" and totals.passes == 1:
        yield GradientPlacement(totals.trained, False, totals.gradient_native)


def _as_many_as_fit(totals: Totals, room: int) -> frozenset[int]:
    """The largest units first: the window is the smaller for it."""
    nothing = _spilled(totals, frozenset())
    trained = (unit for unit in totals.of_units if unit.state)
    ordered = sorted(trained, key=lambda unit: unit.gradient_native, reverse=True)
    costs = [(unit.index, _waiting(unit, totals)) for unit in ordered]
    return as_far_as(costs, room - nothing.host_bytes(totals))


def _waiting(unit: UnitBytes, totals: Totals) -> int:
    """RAM for the gradients of a unit that wait there while others spill."""
    return unit.gradient_fp32 if totals.passes > 1 else unit.gradient_native


def _spilled(totals: Totals, in_ram: frozenset[int]) -> GradientPlacement:
    growing = totals.passes == 1
    places = [
        unit.gradient_fp32 if unit.index not in in_ram else unit.gradient_growing if growing else 0
        for unit in totals.of_units
        if unit.state
    ]
    return GradientPlacement(
        in_ram=in_ram,
        fp32=totals.passes > 1,
        ram_bytes=sum(_waiting(unit, totals) for unit in totals.of_units if unit.index in in_ram),
        landing_bytes=sum(sorted(places, reverse=True)[:2]),
        swap_bytes=sum(places),
    )
