"""Where gradients wait for the update: in RAM as far as it reaches, the rest on NVMe.

A gradient that spills lands in a window of host memory, is written from there, and is read by the update; a second
micro-batch reads it back into the window and adds to it. The window holds the two largest units, so that one lands
while another is written. What waits in RAM in 16 bits grows to fp32 when a second micro-batch comes: that, too, goes
through the window then, so every gradient without room for fp32 in RAM has room in the swap file. Where several passes
are expected before each step, a gradient that waits in RAM has room for fp32 at once: 16 bits would keep it out of the
swap file for the first pass only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from infinity.plan.problem import GroupBytes, Problem, UnitBytes, as_far_as


@dataclass(frozen=True)
class GradientPlacement:
    """Where gradients wait.

    Attributes:
        in_ram: indices of the units whose gradients wait in RAM.
        fp32: those in RAM have room for fp32.
        window: there is a window, and room in the swap file for every gradient that has none for fp32 in RAM.
    """

    problem: Problem
    in_ram: frozenset[int]
    fp32: bool
    window: bool

    def lease_bytes(self, unit: UnitBytes, group: GroupBytes) -> int:
        """RAM for the gradients of a group; 0 where they do not wait there."""
        if unit.index not in self.in_ram:
            return 0
        return group.gradient_fp32 if self.fp32 else group.gradient_native

    def scratch_bytes(self, unit: UnitBytes, group: GroupBytes) -> int:
        """Room in the swap file for the gradients of a group, in fp32; 0 where RAM always has room for them."""
        stays = unit.index in self.in_ram and (self.fp32 or group.group.dtype == torch.float32)
        return 0 if stays or not self.window else group.gradient_fp32

    @cached_property
    def ram_bytes(self) -> int:
        return sum(self.lease_bytes(unit, group) for unit in self.problem.units for group in unit.groups)

    @cached_property
    def _scratch(self) -> list[int]:
        """Of each unit."""
        return [sum(self.scratch_bytes(unit, group) for group in unit.groups) for unit in self.problem.units]

    @property
    def spills(self) -> bool:
        return any(self._scratch)

    @property
    def landing_bytes(self) -> int:
        """Of the window; 0 where nothing spills."""
        return sum(sorted(self._scratch, reverse=True)[:2])

    @property
    def host_bytes(self) -> int:
        """Of host memory, checksums included."""
        return self.ram_bytes + self.landing_bytes + self.problem.checksum_bytes(self.swap_bytes)

    @property
    def swap_bytes(self) -> int:
        return sum(self._scratch)


def gradient_placements(problem: Problem, room: int) -> Iterator[GradientPlacement]:
    """The placements to try, the best first.

    Args:
        room: host memory for gradients where some spill.
    """
    config = problem.config
    if config.gradients != "nvme":
        yield GradientPlacement(problem, problem.trained, fp32=True, window=False)
    if config.gradients == "nvme":
        yield _spilled(problem, frozenset())
    elif config.gradients == "auto" and config.nvme.paths and problem.trained:
        yield _spilled(problem, _as_many_as_fit(problem, room))
    if config.gradients != "nvme" and problem.passes == 1:
        yield GradientPlacement(problem, problem.trained, fp32=False, window=False)


def _as_many_as_fit(problem: Problem, room: int) -> frozenset[int]:
    """The largest units first: that makes the window smaller."""
    nothing, everything = _spilled(problem, frozenset()), _spilled(problem, problem.trained)
    trained = (unit for unit in problem.units if unit.state)
    ordered = sorted(trained, key=lambda unit: unit.gradient_native, reverse=True)
    costs = [(unit.index, sum(everything.lease_bytes(unit, group) for group in unit.groups)) for unit in ordered]
    return as_far_as(costs, room - nothing.host_bytes)


def _spilled(problem: Problem, in_ram: frozenset[int]) -> GradientPlacement:
    return GradientPlacement(problem, in_ram, fp32=problem.passes > 1, window=True)
