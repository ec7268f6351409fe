"""What updates need to speculate: of states on NVMe a second copy, of what rests in RAM a shadow for the new values.
And the memory to read ahead for updates that do not speculate.

Where every step makes a generation, each state has a second copy anyway. Where generations are not kept, second copies
are reserved as far as the disks reach, those of the model's last units first: their gradients come first.

[Note: speculation in RAM]
An update whose states rest in RAM has no transfers to hide: it hides its own computing behind the backward pass, at the
cost of memory for all that it changes. That is worth it where another processor computes the backward pass. Where the
model computes in host memory the two share the cores, so such updates speculate there only if the config asks for
during_backward. Their shadows get what nothing else wants: states on NVMe, which have more to gain, are never pushed
out of RAM by them. Where these bytes are short, the units that get them lie evenly in the model (`spread_out`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from infinity.plan import policy
from infinity.plan.placement import GradientPlacement, Placed, UpdateTiming
from infinity.plan.problem import Problem, UnitBytes, as_far_as
from infinity.sizes import PAGE_BYTES, format_bytes, round_up

_SHADOW_SHARE = 0.5  # of the weights, where states would be cached in the rest
_AHEAD_SHARE = 1 / 2  # of the states: the rest streams in while these are updated and written


@dataclass(frozen=True)
class Reserved:
    """What is reserved for updates that speculate.

    Attributes:
        shadow_bytes: host memory for new weights, and new states of units whose states rest in RAM.
        host_bytes: host memory for all this: the shadows, and the checksums of second copies.
    """

    updates: UpdateTiming
    shadow_bytes: int = 0
    host_bytes: int = 0


def reserve(problem: Problem, placed: Placed, gradients: GradientPlacement, room: int) -> Reserved:
    """Reserve what updates need to speculate. Updates of units whose gradients spill do not speculate: they would wait
    for the gradients' way to the store and back.

    Args:
        room: bytes of host memory that nothing else wants.
    """
    config = problem.config
    if not policy.worth_speculating(config.overlap, wrong=0):
        return Reserved(UpdateTiming(config.overlap))
    moved = [unit for unit in _moved(problem, placed) if unit.index in gradients.in_ram]
    if not moved:
        return _none("the gradients spill" if _moved(problem, placed) else "the states are in RAM")
    moved = [unit for unit in moved if may_speculate(unit, placed.weights.in_ram, gradients.in_ram)]
    if not moved:
        return _none("weights rest in RAM beside frozen ones")
    reason, spare, checksums = "", frozenset[int](), 0
    if problem.commit_every == 0:
        copies = {unit.index: _copy_bytes(unit, placed) for unit in reversed(moved)}
        swap = problem.swap_bytes(placed.weights.in_ram, placed.optimizer.in_ram) + gradients.swap_bytes
        spare = as_far_as(copies.items(), _reach(problem, swap, room))
        checksums = problem.checksum_bytes(sum(copies[index] for index in spare))
        room -= checksums
        if len(spare) < len(moved):
            reason = f"speculative updates of all units would need {format_bytes(sum(copies.values()))} more on disk"
    elif problem.commit_every > 1:
        reason = f"commit_every: {problem.commit_every} leaves a free copy in the step after each commit only"
    able = [unit for unit in moved if problem.commit_every or unit.index in spare]
    in_ram = [unit.weight for unit in able if unit.index in placed.weights.in_ram]
    shadow = min(sum(in_ram), room // PAGE_BYTES * PAGE_BYTES)
    if not able or (len(in_ram) == len(able) and shadow < min(in_ram)):
        return _none(reason or f"speculative updates need {format_bytes(min(in_ram, default=0))} more of memory.host")
    return Reserved(UpdateTiming(config.overlap, reason, spare), shadow, shadow + checksums)


def reserve_in_ram(
    problem: Problem, placed: Placed, gradients: GradientPlacement, before: Reserved, room: int
) -> Reserved:
    """Reserve what updates of units whose states rest in RAM need to speculate ([Note: speculation in RAM]).

    Args:
        before: what is reserved already.
        room: bytes of host memory that nothing else wants.
    """
    config = problem.config
    resting = _resting(problem, placed, gradients)
    if not resting:
        return before
    copies = {unit.index: 0 if problem.commit_every else _copy_bytes(unit, placed) for unit in resting}
    shadows = {unit.index: _shadow_bytes(unit, placed) for unit in resting}
    costs = [(index, shadows[index] + problem.checksum_bytes(copies[index])) for index in shadows]
    fits = spread_out(costs, room)
    missing = {index: copies[index] for index in shadows if index in fits and copies[index]}
    spare = as_far_as(missing.items(), _reach(problem, _swap_bytes(problem, placed, gradients, before), room))
    able = fits - missing.keys() | spare
    reason = before.updates.reason if _moved(problem, placed) else ""
    if len(fits) < len(resting):
        reason = f"speculative updates of all units would need {format_bytes(sum(shadows.values()) - room)} more of RAM"
    elif len(able) < len(resting):
        reason = f"speculative updates of all units would need {format_bytes(sum(copies.values()))} more on disk"
    if not able:
        return replace(before, updates=replace(before.updates, reason=reason))
    shadow = sum(shadows[index] for index in able)
    host = shadow + problem.checksum_bytes(sum(copies[index] for index in able))
    updates = UpdateTiming(config.overlap, reason, before.updates.spare_units | spare, able)
    return Reserved(updates, before.shadow_bytes + shadow, before.host_bytes + host)


def spread_out(costs: Sequence[tuple[int, int]], room: int) -> frozenset[int]:
    """Of (index, bytes) as many as fit `room`, spread evenly: so the processor has work during the whole backward, and
    what it updates after the step lies between units that the next forward finds ready.

    Args:
        costs: in the order of the model, or its reverse.
    """
    total = sum(nbytes for _, nbytes in costs)
    chosen, share, due = set[int](), min(room / total, 1.0) if total else 0.0, 0.0
    for index, nbytes in costs:
        due += share * nbytes
        if nbytes <= room and due >= nbytes / 2:
            chosen.add(index)
            room, due = room - nbytes, due - nbytes
    return frozenset(chosen) | as_far_as(((index, nbytes) for index, nbytes in costs if index not in chosen), room)


def _resting(problem: Problem, placed: Placed, gradients: GradientPlacement) -> list[UnitBytes]:
    """The units whose states rest in RAM and whose updates are to speculate, those of the end of the model first."""
    overlap, limits = problem.config.overlap, problem.limits
    if not (overlap == "during_backward" or (overlap == "auto" and not limits.in_place)):
        return []
    resting = [unit for unit in problem.units if unit.state and unit.index in placed.optimizer.in_ram]
    return [unit for unit in reversed(resting) if may_speculate(unit, placed.weights.in_ram, gradients.in_ram)]


def wanted_in_ram(problem: Problem, placed: Placed, gradients: GradientPlacement) -> int:
    """Bytes of shadows with which all updates of states in RAM could speculate."""
    return sum(_shadow_bytes(unit, placed) for unit in _resting(problem, placed, gradients))


def may_speculate(unit: UnitBytes, weights_in_ram: Collection[int], gradients_in_ram: Collection[int]) -> bool:
    """The policy's answer for a placement."""
    return policy.may_speculate(
        trained_whole=unit.unit.trained_whole,
        weights_in_ram=unit.index in weights_in_ram,
        gradients_in_ram=unit.index in gradients_in_ram,
    )


def _none(reason: str) -> Reserved:
    return Reserved(UpdateTiming("before_forward", reason))


def _copy_bytes(unit: UnitBytes, placed: Placed) -> int:
    """Of a second copy of what the update of a unit changes in the swap file."""
    state = 0 if unit.index in placed.optimizer.in_ram else unit.state
    return state + (0 if unit.index in placed.weights.in_ram else unit.trained_weight)


def _shadow_bytes(unit: UnitBytes, placed: Placed) -> int:
    """Of the shadow of a unit whose states rest in RAM."""
    return unit.state + (unit.weight if unit.index in placed.weights.in_ram else 0)


def _swap_bytes(problem: Problem, placed: Placed, gradients: GradientPlacement, reserved: Reserved) -> int:
    """Of the swap file, with the second copies that are reserved."""
    spare = sum(_copy_bytes(unit, placed) for unit in problem.units if unit.index in reserved.updates.spare_units)
    return problem.swap_bytes(placed.weights.in_ram, placed.optimizer.in_ram) + gradients.swap_bytes + spare


def _reach(problem: Problem, swap_bytes: int, room: int) -> int:
    """How far a swap file of `swap_bytes` can grow on the disks, with its checksums in `room` bytes of RAM."""
    free = problem.disks.room_bytes - swap_bytes
    per_byte = problem.checksum_bytes(1 << 30) / (1 << 30)
    return min(free, int(room / per_byte)) if per_byte else free


def shadow_wanted(problem: Problem, placed: Placed) -> int:
    """Host memory for shadows that comes before more states are cached there; 0 where the two do not compete."""
    config = problem.config
    if not policy.worth_speculating(config.overlap, wrong=0):
        return 0
    if config.optimizer != "auto" or placed.optimizer.tier != "nvme":
        return 0
    moved = [unit for unit in _moved(problem, placed) if may_speculate(unit, placed.weights.in_ram, problem.trained)]
    weights = [unit.weight for unit in moved if unit.index in placed.weights.in_ram]
    return round_up(max(int(sum(weights) * _SHADOW_SHARE), max(weights, default=0)), PAGE_BYTES)


def ahead_bytes(problem: Problem, placed: Placed, tile_bytes: int, room: int, shadow_bytes: int) -> int:
    """Staging, in whole tiles, for states that are read ahead.

    Args:
        room: bytes of host memory that nothing else wants.
        shadow_bytes: that are lent to the staging while updates do not speculate.
    """
    if problem.config.overlap == "off":
        return 0
    wanted = int(sum(unit.state for unit in _moved(problem, placed)) * _AHEAD_SHARE)
    wanted -= _lent_bytes(problem, placed, tile_bytes, shadow_bytes)
    return max(min(room, wanted), 0) // tile_bytes * tile_bytes


def _lent_bytes(problem: Problem, placed: Placed, tile_bytes: int, shadow_bytes: int) -> int:
    """How many bytes of tiles the shadows hold. They are lent unit by unit, so only the whole tiles of each unit count:
    nothing where its weights are smaller than one."""
    lent = 0
    for unit in problem.units:
        lends = unit.index in placed.weights.in_ram and unit.unit.trained_whole
        if lends and unit.weight <= shadow_bytes:
            shadow_bytes -= unit.weight
            lent += unit.weight // tile_bytes * tile_bytes
    return lent


def _moved(problem: Problem, placed: Placed) -> list[UnitBytes]:
    """The units whose states come from NVMe."""
    return [unit for unit in problem.units if unit.state and unit.index not in placed.optimizer.in_ram]
