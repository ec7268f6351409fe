"""Memory for speculative updates: second copies of states on NVMe, and shadows for the new values of states in RAM.
This module also plans the memory for reading states ahead, for updates that do not speculate.

If every step makes a generation, each state has a second copy anyway. If generations are not kept, second copies are
reserved for as many units as the disks have room for. The copies of the model's last units have precedence, because the
gradients of these units arrive first.

[Note: speculation in RAM]
An update whose states rest in RAM has no transfers to hide. Speculation hides the update's computation behind the
backward pass, and needs memory for everything that the update changes. This is worthwhile if another processor computes
the backward pass. If the model computes in host memory, the backward and the update use the same cores. In this case,
updates of states in RAM speculate only if the config asks for during_backward. Shadows of states in RAM get only memory
that has no other use, because keeping more states in RAM saves more time. If there is too little memory for all
shadows, units that are spread evenly over the model get shadows (`spread_out`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from infinity.plan import policy
from infinity.plan.placement import ChosenTiers, GradientPlacement, UpdateTiming
from infinity.plan.plan_input import PlanInput, UnitBytes, as_far_as
from infinity.sizes import PAGE_BYTES, format_bytes, round_up

_SHADOW_SHARE = 0.5  # share of the weights that get shadows, if the memory could also cache states
_AHEAD_SHARE = 1 / 2  # share of the states that is read ahead; the others are read while this share is updated


@dataclass(frozen=True)
class SpeculationMemory:
    """Memory that is reserved for speculative updates.

    Attributes:
        shadow_bytes: host memory for new weights, and for new states of units whose states rest in RAM.
        host_bytes: host memory in total: the shadows, and the checksums of second copies.
    """

    updates: UpdateTiming
    shadow_bytes: int = 0
    host_bytes: int = 0


def reserve(inputs: PlanInput, placed: ChosenTiers, gradients: GradientPlacement, room: int) -> SpeculationMemory:
    """Reserve the memory and the second copies that speculative updates need.

    Updates of units whose gradients spill do not speculate, because such an update must wait until the gradients were
    written to the store and read back.

    Args:
        inputs: the input of the planner.
        placed: where weights and states rest.
        gradients: where gradients wait.
        room: bytes of host memory that have no other use.
    """
    config = inputs.config
    if not policy.worth_speculating(config.overlap, wrong=0):
        return SpeculationMemory(UpdateTiming(config.overlap))
    moved = [unit for unit in _moved(inputs, placed) if unit.index in gradients.in_ram]
    if not moved:
        if not inputs.updated_on_processor and (inputs.resident or inputs.states_on_device):
            return _none("the device updates all units that are trained")
        return _none("the gradients spill to NVMe" if _moved(inputs, placed) else "the states are in RAM")
    moved = [unit for unit in moved if unit_may_speculate(unit, placed.weights.in_ram, gradients.in_ram)]
    if not moved:
        return _none("weights are in RAM together with frozen weights")
    reason, spare, checksums = "", frozenset[int](), 0
    if inputs.commit_every == 0:
        copies = {unit.index: _copy_bytes(unit, placed) for unit in reversed(moved)}
        swap = inputs.swap_bytes(placed.weights.in_ram, placed.optimizer.in_ram) + gradients.swap_bytes
        spare = as_far_as(copies.items(), _reach(inputs, swap, room))
        checksums = inputs.checksum_bytes(sum(copies[index] for index in spare))
        room -= checksums
        if len(spare) < len(moved):
            reason = f"speculative updates of all units would need {format_bytes(sum(copies.values()))} more on disk"
    elif inputs.commit_every > 1:
        reason = f"commit_every: {inputs.commit_every} leaves a free copy only in the step after each commit"
    able = [unit for unit in moved if inputs.commit_every or unit.index in spare]
    in_ram = [unit.weight for unit in able if unit.index in placed.weights.in_ram]
    shadow = min(sum(in_ram), room // PAGE_BYTES * PAGE_BYTES)
    if not able or (len(in_ram) == len(able) and shadow < min(in_ram)):
        return _none(reason or f"speculative updates need {format_bytes(min(in_ram, default=0))} more of memory.host")
    return SpeculationMemory(UpdateTiming(config.overlap, reason, spare), shadow, shadow + checksums)


def reserve_in_ram(
    inputs: PlanInput, placed: ChosenTiers, gradients: GradientPlacement, before: SpeculationMemory, room: int
) -> SpeculationMemory:
    """Reserve memory and second copies for units whose states rest in RAM ([Note: speculation in RAM]).

    Args:
        inputs: the input of the planner.
        placed: where weights and states rest.
        gradients: where gradients wait.
        before: the memory that is reserved already.
        room: bytes of host memory that have no other use.
    """
    config = inputs.config
    resting = _resting(inputs, placed, gradients)
    if not resting:
        return before
    copies = {unit.index: 0 if inputs.commit_every else _copy_bytes(unit, placed) for unit in resting}
    shadows = {unit.index: _shadow_bytes(unit, placed) for unit in resting}
    costs = [(index, shadows[index] + inputs.checksum_bytes(copies[index])) for index in shadows]
    fits = spread_out(costs, room)
    missing = {index: copies[index] for index in shadows if index in fits and copies[index]}
    spare = as_far_as(missing.items(), _reach(inputs, _swap_bytes(inputs, placed, gradients, before), room))
    able = fits - missing.keys() | spare
    reason = before.updates.reason if _moved(inputs, placed) else ""
    if len(fits) < len(resting):
        reason = f"speculative updates of all units would need {format_bytes(sum(shadows.values()) - room)} more of RAM"
    elif len(able) < len(resting):
        reason = f"speculative updates of all units would need {format_bytes(sum(copies.values()))} more on disk"
    if not able:
        return replace(before, updates=replace(before.updates, reason=reason))
    shadow = sum(shadows[index] for index in able)
    host = shadow + inputs.checksum_bytes(sum(copies[index] for index in able))
    updates = UpdateTiming(config.overlap, reason, before.updates.spare_units | spare, able)
    return SpeculationMemory(updates, before.shadow_bytes + shadow, before.host_bytes + host)


def spread_out(costs: Sequence[tuple[int, int]], room: int) -> frozenset[int]:
    """Choose as many units as fit `room` together, spread evenly over the model, and return their indices.

    Because the chosen units are spread evenly, the processor has updates to compute during the whole backward. All
    other units are updated after the step. While they are updated, the next forward finds chosen units that are ready.

    Args:
        costs: pairs (index, bytes) of units, in the order of the model or in the reverse order.
        room: bytes for the chosen units together.
    """
    total = sum(nbytes for _, nbytes in costs)
    chosen, share, due = set[int](), min(room / total, 1.0) if total else 0.0, 0.0
    for index, nbytes in costs:
        due += share * nbytes
        if nbytes <= room and due >= nbytes / 2:
            chosen.add(index)
            room, due = room - nbytes, due - nbytes
    return frozenset(chosen) | as_far_as(((index, nbytes) for index, nbytes in costs if index not in chosen), room)


def _resting(inputs: PlanInput, placed: ChosenTiers, gradients: GradientPlacement) -> list[UnitBytes]:
    """Return the units with states in RAM whose updates should speculate, in the reverse order of the model."""
    overlap, limits = inputs.config.overlap, inputs.limits
    if not (overlap == "during_backward" or (overlap == "auto" and not limits.in_place)):
        return []
    resting = [unit for unit in inputs.updated_on_processor if unit.index in placed.optimizer.in_ram]
    return [unit for unit in reversed(resting) if unit_may_speculate(unit, placed.weights.in_ram, gradients.in_ram)]


def wanted_in_ram(inputs: PlanInput, placed: ChosenTiers, gradients: GradientPlacement) -> int:
    """Return the bytes of shadows that allow all updates of states in RAM to speculate."""
    return sum(_shadow_bytes(unit, placed) for unit in _resting(inputs, placed, gradients))


def unit_may_speculate(unit: UnitBytes, weights_in_ram: Collection[int], gradients_in_ram: Collection[int]) -> bool:
    """Return policy.may_speculate for a unit in a placement."""
    return policy.may_speculate(
        trained_whole=unit.local.trained_whole,
        weights_in_ram=unit.index in weights_in_ram,
        gradients_in_ram=unit.index in gradients_in_ram,
    )


def _none(reason: str) -> SpeculationMemory:
    return SpeculationMemory(UpdateTiming("before_forward", reason))


def _copy_bytes(unit: UnitBytes, placed: ChosenTiers) -> int:
    """Return the bytes of a second copy, in the swap file, of the states that a unit's update changes."""
    state = 0 if unit.index in placed.optimizer.in_ram else unit.state
    return state + (0 if unit.index in placed.weights.in_ram else unit.trained_weight)


def _shadow_bytes(unit: UnitBytes, placed: ChosenTiers) -> int:
    """Return the bytes of the shadow of a unit whose states rest in RAM."""
    return unit.state + (unit.weight if unit.index in placed.weights.in_ram else 0)


def _swap_bytes(
    inputs: PlanInput, placed: ChosenTiers, gradients: GradientPlacement, reserved: SpeculationMemory
) -> int:
    """Return the bytes of the swap file, including the second copies that are reserved."""
    spare = sum(_copy_bytes(unit, placed) for unit in inputs.units if unit.index in reserved.updates.spare_units)
    return inputs.swap_bytes(placed.weights.in_ram, placed.optimizer.in_ram) + gradients.swap_bytes + spare


def _reach(inputs: PlanInput, swap_bytes: int, room: int) -> int:
    """Return by how many bytes a swap file can grow on the disks, with `room` bytes of RAM for its checksums."""
    free = inputs.disks.room_bytes - swap_bytes
    per_byte = inputs.checksum_bytes(1 << 30) / (1 << 30)
    return min(free, int(room / per_byte)) if per_byte else free


def shadow_wanted(inputs: PlanInput, placed: ChosenTiers) -> int:
    """Return the host memory that is reserved for shadows before states are kept in RAM; 0 if states do not need this
    memory."""
    config = inputs.config
    if not policy.worth_speculating(config.overlap, wrong=0):
        return 0
    if config.optimizer != "auto" or placed.optimizer.tier != "nvme":
        return 0
    moved = [unit for unit in _moved(inputs, placed) if unit_may_speculate(unit, placed.weights.in_ram, inputs.trained)]
    weights = [unit.weight for unit in moved if unit.index in placed.weights.in_ram]
    return round_up(max(int(sum(weights) * _SHADOW_SHARE), max(weights, default=0)), PAGE_BYTES)


def ahead_bytes(inputs: PlanInput, placed: ChosenTiers, tile_bytes: int, room: int, shadow_bytes: int) -> int:
    """Return the bytes of staging, in whole tiles, for states that are read ahead.

    Args:
        inputs: the input of the planner.
        placed: where weights and states rest.
        tile_bytes: bytes of a tile.
        room: bytes of host memory that have no other use.
        shadow_bytes: bytes of shadows, which are lent to the staging while updates do not speculate.
    """
    if inputs.config.overlap == "off":
        return 0
    wanted = int(sum(unit.state for unit in _moved(inputs, placed)) * _AHEAD_SHARE)
    wanted -= _lent_bytes(inputs, placed, tile_bytes, shadow_bytes)
    return max(min(room, wanted), 0) // tile_bytes * tile_bytes


def _lent_bytes(inputs: PlanInput, placed: ChosenTiers, tile_bytes: int, shadow_bytes: int) -> int:
    """Return the bytes of the tiles that fit the shadows.

    Shadows are lent unit by unit, so only the whole tiles of each unit count. A unit whose weights are smaller than a
    tile adds nothing to the staging.
    """
    lent = 0
    for unit in inputs.units:
        lends = unit.index in placed.weights.in_ram and unit.local.trained_whole
        if lends and unit.weight <= shadow_bytes:
            shadow_bytes -= unit.weight
            lent += unit.weight // tile_bytes * tile_bytes
    return lent


def _moved(inputs: PlanInput, placed: ChosenTiers) -> list[UnitBytes]:
    """Return the units whose states come from NVMe."""
    return [unit for unit in inputs.updated_on_processor if unit.index not in placed.optimizer.in_ram]
