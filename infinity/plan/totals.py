"""Byte formulas: what the states of a model's units take, whatever tier they are in."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from infinity.config import SwapConfig
from infinity.sizes import PAGE_BYTES
from infinity.state.dtypes import master_format, residual_itemsize
from infinity.state.unit import Unit

CHECKSUM_BYTES = 4
"""Of RAM for each page of the swap file."""


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of one unit.

    Attributes:
        weight: of all weights; `trained_weight` of those that are trained.
        state: of the optimizer: residual and moments.
        gradient_native, gradient_fp32: of the gradients, as autograd gives them and while they add up;
            `gradient_growing` in fp32 of those that are not as autograd gives them.
        resident: its weights stay on the device while the model runs.
    """

    index: int
    weight: int
    trained_weight: int
    state: int
    gradient_native: int
    gradient_fp32: int
    gradient_growing: int
    resident: bool


@dataclass(frozen=True)
class Totals:
    """Bytes of a model, unit by unit in layout order, and all together.

    Attributes:
        checksums: RAM is taken for checksums of what is on NVMe.
        slots: places a state that changes has on NVMe where generations are kept; 0 where there are none.
        passes: backward passes before a step, as far as is known.
    """

    units: Sequence[Unit]
    of_units: tuple[UnitBytes, ...]
    checksums: bool
    slots: int
    passes: int

    @cached_property
    def weight(self) -> int:
        return sum(unit.weight for unit in self.of_units)

    @cached_property
    def state(self) -> int:
        return sum(unit.state for unit in self.of_units)

    @cached_property
    def gradient_native(self) -> int:
        return sum(unit.gradient_native for unit in self.of_units)

    @cached_property
    def gradient_fp32(self) -> int:
        return sum(unit.gradient_fp32 for unit in self.of_units)

    @cached_property
    def every(self) -> frozenset[int]:
        """All units, by index."""
        return frozenset(unit.index for unit in self.of_units)

    @cached_property
    def trained(self) -> frozenset[int]:
        """The units that have optimizer states."""
        return frozenset(unit.index for unit in self.of_units if unit.state)

    @property
    def largest(self) -> Unit:
        return max(self.units, key=lambda unit: unit.weight_bytes)

    def weight_of(self, indices: Collection[int]) -> int:
        return sum(unit.weight for unit in self.of_units if unit.index in indices)

    def state_of(self, indices: Collection[int]) -> int:
        return sum(unit.state for unit in self.of_units if unit.index in indices)

    def slots_needed(self, indices: Collection[int]) -> int:
        """Device memory to use these units: two at once, one whose views autograd still holds and one being fetched,
        beside those that stay."""
        used = [unit for unit in self.of_units if unit.index in indices]
        largest = sorted((unit.weight for unit in used), reverse=True)[:2]
        needed = sum(largest) + sum(unit.weight for unit in used if unit.resident)
        return min(needed, sum(unit.weight for unit in used))

    def swap_bytes(self, weights_in_ram: Collection[int], states_in_ram: Collection[int]) -> int:
        """Of the swap file, but for gradients. With generations what changes has a slot more than stay."""
        further = sum(unit.trained_weight + unit.state for unit in self.of_units) * max(self.slots - 1, 0)
        return self.one_slot_bytes(weights_in_ram, states_in_ram) + further

    def one_slot_bytes(self, weights_in_ram: Collection[int], states_in_ram: Collection[int]) -> int:
        """Of one slot for each state that has a place in the swap file: with generations all, in RAM or not."""
        if self.slots:
            return sum(unit.weight + unit.state for unit in self.of_units)
        return sum(
            (0 if unit.index in weights_in_ram else unit.weight) + (0 if unit.index in states_in_ram else unit.state)
            for unit in self.of_units
        )

    def checksum_bytes(self, swap_bytes: int) -> int:
        """RAM for the checksums of a swap file."""
        return swap_bytes // PAGE_BYTES * CHECKSUM_BYTES if self.checksums else 0

    def cost(self, nbytes: int) -> int:
        """RAM that is taken by moving a state of `nbytes` there: where it has no place on NVMe any more, it needs no
        checksums."""
        return nbytes if self.slots else nbytes - self.checksum_bytes(nbytes)


def total(units: Sequence[Unit], config: SwapConfig, moments: int, passes: int) -> Totals:
    """Count. `moments`: how many there are for each parameter. `passes`: backward passes before a step."""
    return Totals(
        units=units,
        of_units=tuple(_count(unit, config, moments) for unit in units),
        checksums=config.nvme.checksums,
        slots=config.keep + 1 if config.commit_every else 0,
        passes=passes,
    )


def _count(unit: Unit, config: SwapConfig, moments: int) -> UnitBytes:
    groups = unit.trainable_groups
    return UnitBytes(
        index=unit.index,
        weight=unit.weight_bytes,
        trained_weight=sum(group.weight_bytes for group in groups),
        state=sum(
            moments * group.moment_bytes
            + group.state_bytes(residual_itemsize(master_format(group.dtype, config.master)))
            for group in groups
        ),
        gradient_native=sum(group.state_bytes(group.dtype.itemsize) for group in groups),
        gradient_fp32=sum(group.state_bytes(4) for group in groups),
        gradient_growing=sum(group.state_bytes(4) for group in groups if group.dtype != torch.float32),
        resident=unit.resident,
    )


def as_far_as(costs: Iterable[tuple[int, int]], room: int) -> frozenset[int]:
    """Those (index, bytes) that fit `room` together: the first first, and what does not fit is passed over."""
    chosen = set()
    for index, nbytes in costs:
        if nbytes <= room:
            chosen.add(index)
            room -= nbytes
    return frozenset(chosen)
