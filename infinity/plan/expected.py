"""The bytes that a step is expected to move over each link, with what slots save.

The forecast (plan/traffic.py) is what a step moves while no slot outlives a pass: it is never less than what comes.
Here slots are counted as the units use them (units/room.py): the unit with the farthest next use goes first, so that

* the last units of the forward are still there when the backward begins;
* the first units are still there when the next pass begins, unless an update made them void;
* an update that speculates begins while its unit is still there, and needs no weights from the store.

Not counted is what comes of times: where slots are few, some units make room before their updates begin, and where the
first blocks are frozen, prefetching ahead of the backward reads some of them once more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass

from infinity.plan.budgets import Budgets
from infinity.plan.placement import Placement
from infinity.plan.problem import Problem, UnitBytes
from infinity.plan.traffic import gradient_traffic, traffic

_STEPS = 3
"""Until a step is like the one before."""


@dataclass(frozen=True)
class Moved:
    """Bytes of one step; of one rank, where there are several.

    Attributes:
        weights: read from NVMe for forward and backward.
        states: weights and optimizer states read from NVMe by updates.
        gradients: that spill: as many are written as are read.
        written: weights and optimizer states.
        commit_share: what commits write of the states in RAM, shared out over the steps between them.
        up, down: to the device, and gradients from it; 0 where it has no memory of its own.
        fetched: of slots that were filled: what other ranks' slices are gathered into, too.
        decoded: of slots, those that encoded weights were decoded to.
    """

    weights: int
    states: int
    gradients: int
    written: int
    commit_share: int
    up: int
    down: int
    fetched: int
    decoded: int

    @property
    def read_bytes(self) -> int:
        """From NVMe."""
        return self.weights + self.states + self.gradients

    @property
    def written_bytes(self) -> int:
        """To NVMe."""
        return self.gradients + self.written + self.commit_share


@dataclass(frozen=True)
class Uses:
    """How often a unit is fetched in a step, for the forward and for the backward passes, and whether its update has to
    read its weights."""

    forwards: int
    backwards: int
    update: bool

    @property
    def fetches(self) -> int:
        return self.forwards + self.backwards


def expected(problem: Problem, placement: Placement, budgets: Budgets, *, clips: bool = False) -> Moved:
    """Count what a step moves once the run is under way.

    Args:
        clips: gradients are clipped in most steps, so that updates do not speculate where the config leaves it open.
    """
    in_ram = placement.weights.in_ram
    counted = traffic(problem, in_ram, placement.optimizer.in_ram, placement.gradients.in_ram)
    uses = uses_of(problem, placement, budgets, clips=clips)
    weights = states = gradients = up = down = fetched = decoded = 0
    for unit in problem.units:
        used = uses[unit.index]
        if unit.index not in in_ram:
            weights += used.fetches * unit.weight
            states += unit.trained_weight if used.update else 0
        if unit.index not in placement.optimizer.in_ram:
            states += unit.state
        if unit.index not in placement.gradients.in_ram:
            gradients += gradient_traffic(problem, unit)
        fetched += used.fetches * unit.whole.weight_bytes
        decoded += used.fetches * _decoded_bytes(unit)
        if not problem.limits.in_place:
            up += used.fetches * unit.weight
            down += problem.passes * unit.gradient_native
    return Moved(
        weights=weights,
        states=states,
        gradients=gradients,
        written=counted.written_bytes - gradients,
        commit_share=counted.commit_share_bytes,
        up=up,
        down=down,
        fetched=fetched,
        decoded=decoded,
    )


def _decoded_bytes(unit: UnitBytes) -> int:
    return sum(group.group.weight_bytes for group in unit.groups if group.group.codec is not None)


def uses_of(problem: Problem, placement: Placement, budgets: Budgets, *, clips: bool) -> dict[int, Uses]:
    """By the index of each unit: a step is visited, visit by visit, until it is like the one before."""
    limits = problem.limits
    slotted = [unit for unit in problem.units if _takes_slot(problem, placement, unit)]
    speculating = frozenset[int]() if clips and placement.updates.overlap == "auto" else speculates(problem, placement)
    # In a slot that is the device's, or that several ranks fill together, an update leaves nothing that is of use.
    in_place = limits.in_place and not limits.shares
    void = {unit.index for unit in slotted if unit.trained_weight and (unit.index in speculating or not in_place)}
    visited = _visit(problem, slotted, budgets.slot_bytes, void)
    reads_slot = in_place or (budgets.copies_bytes > 0 and not limits.shares)
    found = {}
    for unit in problem.units:
        counted = visited.get(unit.index, _Counted())
        there = reads_slot and (unit.index in speculating or counted.at_end)
        reads = unit in slotted and unit.trained_weight > 0 and not there
        found[unit.index] = Uses(counted.forwards, counted.backwards, update=reads)
    return found


@dataclass
class _Counted:
    """Fetches of a unit in one step; and whether it is there when the step's last pass is over."""

    forwards: int = 0
    backwards: int = 0
    at_end: bool = False


def _visit(problem: Problem, slotted: list[UnitBytes], slot_bytes: int, void: Collection[int]) -> dict[int, _Counted]:
    """Count the fetches of a step. Args: void: units that a step's update leaves without their weights."""
    staying = [unit for unit in slotted if unit.unit.stays]
    moving = [unit for unit in slotted if not unit.unit.stays]
    room = slot_bytes - sum(unit.whole.weight_bytes for unit in staying)
    first = next((at for at, unit in enumerate(moving) if unit.trained_weight), len(moving))
    one_pass = [(unit, True) for unit in moving] + [(unit, False) for unit in reversed(moving[first:])]
    order = one_pass * problem.passes
    uses: dict[int, list[int]] = {}
    for at, (unit, _) in enumerate(order):
        uses.setdefault(unit.index, []).append(at)
    sizes = {unit.index: unit.whole.weight_bytes for unit in moving}
    there: dict[int, None] = {}
    free = room
    counted: dict[int, _Counted] = {}

    def next_use(index: int, now: int) -> int:
        later = bisect_right(uses[index], now)
        return uses[index][later] if later < len(uses[index]) else uses[index][0] + len(order)

    for _ in range(_STEPS):
        counted = {unit.index: _Counted() for unit in moving}
        for at, (unit, forward) in enumerate(order):
            if unit.index not in there:
                while free < sizes[unit.index] and there:
                    gone = max(there, key=lambda index: next_use(index, at))
                    free += sizes[gone]
                    del there[gone]
                there[unit.index] = None
                free -= sizes[unit.index]
                counted[unit.index].forwards += forward
                counted[unit.index].backwards += not forward
        for index in there:
            counted[index].at_end = True
        for index in [each for each in there if each in void]:
            free += sizes[index]
            del there[index]
    once = {unit.index: _Counted(int(unit.index in void), 0, at_end=True) for unit in staying}
    return counted | once


def _takes_slot(problem: Problem, placement: Placement, unit: UnitBytes) -> bool:
    at_home = problem.limits.used_at_home and unit.index in placement.weights.in_ram
    return unit.whole.weight_bytes > 0 and not (at_home and not unit.encoded)


def speculates(problem: Problem, placement: Placement) -> frozenset[int]:
    """The units whose updates begin during the backward pass, while the steps decide as they are expected to."""
    updates = placement.updates
    if updates.overlap in ("off", "before_forward"):
        return frozenset()
    moved = frozenset(
        unit.index
        for unit in problem.units
        if unit.state
        and unit.index not in placement.optimizer.in_ram
        and unit.index in placement.gradients.in_ram
        and (placement.commit_every == 1 or unit.index in updates.spare_units)
    )
    return moved | updates.in_ram
