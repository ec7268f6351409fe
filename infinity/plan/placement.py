"""Choice of the units that keep their weights, optimizer states and gradients in RAM.

A step visits every unit once per pass, so a cache that evicts the least recently used unit would evict each unit before
its next use. The units in RAM are therefore chosen once. Whole units are chosen, in the order of the forward, because
the next forward waits first for the updates of the first units. Weights have precedence over states: a byte of weights
in RAM saves four bytes of traffic, and a byte of states saves two bytes. Gradients have precedence over both: weights
and states never take the memory in which micro-batches add up.

Gradients wait for the update in RAM, if RAM has room for them. The other gradients wait on NVMe. A gradient that spills
lands in a window of host memory, is written to NVMe from the window, and is read by the update. A second micro-batch
reads the gradient back into the window and adds to it. The window has room for the two largest units, so that one
unit's gradients land while the other unit's gradients are written.

A gradient that waits in RAM in 16 bits is converted to fp32 when a second micro-batch comes. From then on this gradient
goes through the window, too. Every gradient without room for fp32 in RAM therefore has room in the swap file. If
several passes are expected before each step, a gradient that waits in RAM has room for fp32 from the beginning: a
16-bit gradient would avoid the swap file in the first pass only.

If the caller said that a step has one pass, 16-bit gradients leave more RAM to states. Of the placements that fit, the
planner takes the placement that moves the fewest bytes. If a second pass comes nevertheless, its gradients go through
the window, which has room for one unit in this case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from infinity import _native
from infinity.plan.commit_frequency import CommitFrequency
from infinity.plan.plan_input import GroupBytes, PlanInput, UnitBytes, as_far_as
from infinity.sizes import PAGE_BYTES, round_up
from infinity.state.moments import Moment

PIECES_MIN = 4
"""Smallest number of pieces of weights that can be on their way from NVMe to the device at once."""

Overlap = Literal["auto", "during_backward", "before_forward", "off"]


@dataclass(frozen=True)
class TierSplit:
    """Tier in which the units' weights, states or gradients are between uses.

    Attributes:
        tier: device, host or nvme; nvme if only some of the units rest in RAM.
        in_ram: indices of the units that rest in host memory.
        resident: indices of the units whose weights, states or gradients rest on the device (resident_units.py).
    """

    tier: str
    in_ram: frozenset[int]
    resident: frozenset[int] = frozenset()


@dataclass(frozen=True)
class NumberFormats:
    """The number formats in which states are kept.

    Attributes:
        master: form of the master of bf16 weights.
        moments: form of exp_avg and exp_avg_sq for the parameters that allow this form.
        stored: the moments (exp_avg, exp_avg_sq) that the optimizer keeps.
        gradient_fp32: whether gradients that rest in RAM have room for fp32.
    """

    master: _native.MasterName
    moments: _native.MomentsName
    stored: tuple[Moment, ...]
    gradient_fp32: bool


@dataclass(frozen=True)
class UpdateTiming:
    """Times at which updates run.

    Attributes:
        overlap: the config's `overlap`; before_forward if no update can speculate.
        reason: reason why some updates cannot speculate although the config asks for speculation; empty if all updates
            can.
        spare_units: indices of the units whose states have a second copy for speculation only (no generations are
            kept).
        in_ram: indices of the units whose states rest in RAM and whose updates may speculate.
    """

    overlap: Overlap
    reason: str = ""
    spare_units: frozenset[int] = frozenset()
    in_ram: frozenset[int] = frozenset()


@dataclass(frozen=True)
class StatePlacement:
    """Tiers and forms of all states, and the times of updates and commits.

    Attributes:
        optimizer: where residuals and moments rest.
        activations: where the tensors that a forward keeps for its backward rest: keep (on the device), host or nvme.
        recompute: whether the backward computes each block again.
        commits: how often generations are made.
        keep: number of generations that are kept.
        pins: number of generations that checkpoint folders may pin at once.
    """

    weights: TierSplit
    optimizer: TierSplit
    gradients: TierSplit
    form: NumberFormats
    updates: UpdateTiming
    activations: Literal["keep", "host", "nvme"]
    recompute: bool
    commits: CommitFrequency
    keep: int
    pins: int

    @property
    def commit_every(self) -> int:
        """Largest number of steps between durable generations; 0: no generations, states are updated in place."""
        return self.commits.every

    @property
    def accumulates(self) -> bool:
        """Whether several backward passes may add up before a step."""
        return self.form.gradient_fp32 or self.gradients.tier == "nvme"


@dataclass(frozen=True)
class ChosenTiers:
    """Tiers of weights and states, and the memory that these need.

    Attributes:
        upload_bytes: host memory that weights are read into before they are copied to the device.
        bounce_bytes: host memory that gradients are copied to from the device before they are added to earlier
            gradients.
        host_bytes: host memory in total, including checksums.
    """

    weights: TierSplit
    optimizer: TierSplit
    upload_bytes: int
    bounce_bytes: int
    host_bytes: int


def place(inputs: PlanInput, room: int) -> ChosenTiers:
    """Choose the tiers of weights and states.

    Where the config leaves the tier open, weights and states take at most `room` bytes of host memory. This limit
    includes the states that the config itself places in RAM. Without nvme.paths, all weights and states rest in memory.
    """
    fixed = inputs.trained if inputs.config.optimizer == "host" else frozenset[int]()
    weights = _place_weights(inputs, room, fixed)
    upload, bounce = _upload_bytes(inputs, weights.in_ram), _bounce_bytes(inputs)
    transfers = upload + bounce
    optimizer = TierSplit(inputs.config.optimizer, fixed)
    if inputs.config.optimizer in ("auto", "device"):  # with `device` these units are left if the device is refused
        optimizer = _place_states(inputs, room - _host_bytes(inputs, weights, fixed) - transfers)
    host = transfers + _host_bytes(inputs, weights, optimizer.in_ram)
    return ChosenTiers(weights, optimizer, upload, bounce, host)


def _place_weights(inputs: PlanInput, room: int, states_in_ram: frozenset[int]) -> TierSplit:
    config, limits = inputs.config, inputs.limits
    none = TierSplit("nvme", frozenset())
    if config.weights != "auto":
        return none if config.weights == "nvme" else TierSplit(config.weights, inputs.every)
    if limits.sharing == "weights" and not limits.in_place:  # ranks with devices upload from one copy, if RAM has room
        return TierSplit("host", inputs.every)
    room -= _host_bytes(inputs, none, states_in_ram) + _bounce_bytes(inputs)
    if inputs.cost(inputs.weight) + _upload_bytes(inputs, inputs.every) <= room or not config.nvme.paths:
        share = limits.for_weights - inputs.resident_bytes
        there = inputs.slots + inputs.decoding_bytes + inputs.ring_bytes_min
        on_device = not (limits.in_place or limits.slice_count) and there <= share
        return TierSplit("device" if on_device else "host", inputs.every)
    room -= _upload_bytes(inputs, none.in_ram)
    return TierSplit("nvme", as_far_as(((unit.index, inputs.cost(unit.weight)) for unit in inputs.units), room))


def _place_states(inputs: PlanInput, room: int) -> TierSplit:
    if inputs.cost(inputs.state) <= room or not inputs.config.nvme.paths:
        return TierSplit("host", frozenset(unit.index for unit in inputs.updated_on_processor))
    costs = ((unit.index, inputs.cost(unit.state)) for unit in inputs.updated_on_processor)
    return TierSplit("nvme", as_far_as(costs, room))


def _upload_bytes(inputs: PlanInput, weights_in_ram: frozenset[int]) -> int:
    """Return the bytes of the memory for uploads: the largest unit on NVMe, in pieces. One piece is read while other
    pieces are copied.

    If the device has no memory of its own, return the bytes of the encoded weights of the two largest units on NVMe.
    Ranks that gather weights use two buffers in turn for any unit (sharded/gathered_slots.py): for their slices on the
    way to devices, or for the encoded weights of all ranks.
    """
    if inputs.limits.gathers:
        in_place = inputs.limits.in_place
        return 2 * max((unit.encoded if in_place else unit.weight for unit in inputs.units), default=0)
    if inputs.limits.in_place:
        return sum(sorted(unit.encoded for unit in inputs.units if unit.index not in weights_in_ram)[-2:])
    largest = max((unit.weight for unit in inputs.units if unit.index not in weights_in_ram), default=0)
    return round_up(largest, PIECES_MIN * PAGE_BYTES)


def _bounce_bytes(inputs: PlanInput) -> int:
    """Return the bytes of the largest group's gradients, which wait in host memory until they are added."""
    if inputs.limits.in_place:
        return 0
    return max((group.gradient_native for unit in inputs.units for group in unit.groups), default=0)


def _host_bytes(inputs: PlanInput, weights: TierSplit, states_in_ram: frozenset[int]) -> int:
    # weights on a device without memory of its own count for memory.device, which is RAM, too
    of_device = weights.tier == "device" and inputs.limits.in_place
    held = 0 if of_device else inputs.weight_of(weights.in_ram)
    swap = inputs.swap_bytes(weights.in_ram, states_in_ram)
    return held + inputs.state_of(states_in_ram) + inputs.checksum_bytes(swap)


# -- gradients ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GradientPlacement:
    """Memory in which gradients wait for the update.

    Attributes:
        in_ram: indices of the units whose gradients wait in RAM.
        fp32: whether gradients in RAM have room for fp32.
        window: whether there is a window. If so, every gradient without room for fp32 in RAM has room in the swap file.
    """

    inputs: PlanInput
    in_ram: frozenset[int]
    fp32: bool
    window: bool

    def lease_bytes(self, unit: UnitBytes, group: GroupBytes) -> int:
        """Return the bytes of RAM for the gradients of a group; 0 if these gradients do not wait in RAM."""
        if unit.index not in self.in_ram:
            return 0
        return group.gradient_fp32 if self.fp32 else group.gradient_native

    def scratch_bytes(self, unit: UnitBytes, group: GroupBytes) -> int:
        """Return the bytes of the swap file for a group's gradients, in fp32; 0 if RAM always has room."""
        stays = unit.index in self.in_ram and (self.fp32 or group.group.dtype == torch.float32)
        return 0 if stays or not self.window else group.gradient_fp32

    @cached_property
    def ram_bytes(self) -> int:
        return sum(self.lease_bytes(unit, group) for unit in self.inputs.units for group in unit.groups)

    @cached_property
    def _scratch(self) -> list[int]:
        """Bytes of the swap file for the gradients of each unit."""
        return [sum(self.scratch_bytes(unit, group) for group in unit.groups) for unit in self.inputs.units]

    @property
    def accumulates(self) -> bool:
        """Whether several backward passes may add up before a step."""
        return self.fp32 or self.window

    @property
    def spills(self) -> bool:
        return any(self._scratch)

    @property
    def landing_bytes(self) -> int:
        """Bytes of the window; 0 if nothing spills.

        The window has room for the two largest units. If the caller said that each step has one pass, the window is
        used only if a second pass comes nevertheless. Then the window has room for the largest unit only, and each unit
        waits until the unit before has been written.
        """
        unexpected = (
            self.inputs.known_passes == 1 and not self.inputs.config.vertical and self.in_ram == self.inputs.trained
        )
        return sum(sorted(self._scratch, reverse=True)[: 1 if unexpected else 2])

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for gradients, including checksums."""
        return self.ram_bytes + self.landing_bytes + self.inputs.checksum_bytes(self.swap_bytes)

    @property
    def swap_bytes(self) -> int:
        return sum(self._scratch)


def gradient_placements(inputs: PlanInput, room: int) -> Iterator[GradientPlacement]:
    """Yield the placements of gradients that the planner tries, the best first.

    Args:
        inputs: the input of the planner.
        room: bytes of host memory for gradients, if some gradients spill.
    """
    for each in _gradient_placements(inputs, room):
        if inputs.states_on_device <= each.in_ram:  # the device updates from RAM
            yield each


def _gradient_placements(inputs: PlanInput, room: int) -> Iterator[GradientPlacement]:
    config = inputs.config
    if config.gradients != "nvme":
        yield GradientPlacement(inputs, inputs.trained, fp32=True, window=False)
    if config.gradients == "nvme":
        yield _spilled(inputs, frozenset())
    elif config.gradients == "auto" and config.nvme.paths and inputs.trained:
        yield _spilled(inputs, _as_many_as_fit(inputs, room))
    if config.gradients != "nvme" and not inputs.adds_up:
        yield GradientPlacement(inputs, inputs.trained, fp32=False, window=False)


def _as_many_as_fit(inputs: PlanInput, room: int) -> frozenset[int]:
    """Return the units whose gradients fit RAM. The largest units are chosen first, so that the window can be
    smaller."""
    nothing, everything = _spilled(inputs, frozenset()), _spilled(inputs, inputs.trained)
    trained = (unit for unit in inputs.units if unit.state)
    ordered = sorted(
        trained, key=lambda unit: (unit.index in inputs.states_on_device, unit.gradient_native), reverse=True
    )
    costs = [(unit.index, sum(everything.lease_bytes(unit, group) for group in unit.groups)) for unit in ordered]
    return as_far_as(costs, room - nothing.host_bytes)


def _spilled(inputs: PlanInput, in_ram: frozenset[int]) -> GradientPlacement:
    return GradientPlacement(inputs, in_ram, fp32=inputs.adds_up, window=True)
