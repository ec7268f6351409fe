"""The bytes that a step is expected to move over each link, with what slots save.

The forecast (plan/traffic.py) is what a step moves while no slot outlives a pass, with each weight used once in each
direction: where none is used more often, as tied ones are, it is never less than what comes.
Here slots are counted as the units use them (units/room.py): units are fetched ahead as far as there is room, each into
one piece of it, and the unit with the farthest next use goes first, so that

* the last units of the forward are still there when the backward begins;
* the first units are still there when the next pass begins, unless an update made them void;
* an update that speculates begins while its unit is still there, and needs no weights from the store.

Not counted is what comes of times: where slots are few, some units make room before their updates begin, and one whose
update is still being written stays where another one would have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from infinity.plan.budgets import Budgets
from infinity.plan.placement import Placement
from infinity.plan.policy import long_from_top, unusual_from_top, worth_speculating
from infinity.plan.problem import Problem, UnitBytes
from infinity.plan.speculation import may_speculate
from infinity.plan.traffic import gradient_traffic, traffic
from infinity.plan.visits import Fetched, Walk, in_order
from infinity.state.discover import HookSite


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
        gathered: weights from the other ranks.
        exchanged: gradients from the other ranks, of one micro-batch of each pass.
        decoded: of slots, those that encoded weights were decoded to.
    """

    weights: int
    states: int
    gradients: int
    written: int
    commit_share: int
    up: int
    down: int
    gathered: int
    exchanged: int
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
    read its weights: a share of the steps, where they are not alike."""

    forwards: float
    backwards: float
    update: float

    @property
    def fetches(self) -> float:
        return self.forwards + self.backwards


def expected(
    problem: Problem,
    placement: Placement,
    budgets: Budgets,
    sites: Sequence[HookSite] = (),
    *,
    clips: bool = False,
) -> Moved:
    """Count what a step moves once the run is under way.

    Args:
        sites: which units each module needs, in the order of the forward; none: every unit has a module of its own.
        clips: gradients are clipped in most steps, so that updates do not speculate where the config leaves it open.
    """
    in_ram = placement.weights.in_ram
    counted = traffic(problem, in_ram, placement.optimizer.in_ram, placement.gradients.in_ram)
    uses = uses_of(problem, placement, budgets, sites, clips=clips)
    gradients = down = exchanged = 0
    weights = states = up = gathered = decoded = 0.0  # of steps that are not alike, the mean
    ranks = max(problem.limits.shares, 1)
    for unit in problem.units:
        used = uses[unit.index]
        again = _from_copies(problem, unit, used)
        fetches = used.fetches - again
        if unit.index not in in_ram:
            weights += fetches * unit.weight
            states += used.update * unit.trained_weight
        if unit.index not in placement.optimizer.in_ram:
            states += unit.state
        if unit.index not in placement.gradients.in_ram:
            gradients += gradient_traffic(problem, unit)
        gathered += fetches * (ranks - 1) * unit.whole.weight_bytes / ranks
        exchanged += problem.passes * (ranks - 1) * unit.gradient_native
        decoded += used.fetches * _decoded_bytes(unit)
        if not problem.limits.in_place:
            up += fetches * unit.weight + again * unit.whole.weight_bytes
            down += problem.passes * (unit.gradient_fp32 if budgets.adds_up else unit.gradient_native)
    return Moved(
        weights=round(weights),
        states=round(states),
        gradients=gradients,
        written=counted.written_bytes - gradients,
        commit_share=counted.commit_share_bytes,
        up=round(up),
        down=down,
        gathered=round(gathered),
        exchanged=exchanged,
        decoded=round(decoded),
    )


def _from_copies(problem: Problem, unit: UnitBytes, used: Uses) -> float:
    """Of a unit's fetches, how many come from the copies that the ranks keep (sharded/slots.py): all but the first
    after an update."""
    if not problem.secondary_bytes or unit.unit.stays:
        return 0
    return max(used.fetches - 1, 0) if unit.trained_weight else used.fetches


def _decoded_bytes(unit: UnitBytes) -> int:
    return sum(group.group.weight_bytes for group in unit.groups if group.group.codec is not None)


def uses_of(
    problem: Problem, placement: Placement, budgets: Budgets, sites: Sequence[HookSite], *, clips: bool
) -> dict[int, Uses]:
    """By the index of each unit: a step is visited, visit by visit, until it is like the one before."""
    limits = problem.limits
    slotted = [unit for unit in problem.units if _takes_slot(problem, placement, unit)]
    speculating = speculates(problem, placement, clips=clips)
    # In a slot that is the device's, or that several ranks fill together, an update leaves nothing that is of use.
    in_place = limits.in_place and not limits.shares
    # So it is with encoded weights in RAM, whose slot is a copy.
    copied = {unit.index for unit in slotted if unit.encoded and unit.index in placement.weights.in_ram}
    stale = speculating | copied if in_place else {unit.index for unit in slotted}
    void = {unit.index for unit in slotted if unit.trained_weight and unit.index in stale}
    visited = _visited(problem, slotted, sites, budgets.slot_bytes, void)
    reads_slot = in_place or (budgets.copies_bytes > 0 and not limits.shares)
    found = {}
    for unit in problem.units:
        counted = visited.get(unit.index, Fetched())
        there = (1 if unit.index in speculating else counted.at_end) if reads_slot else 0
        reads = 1 - there if unit in slotted and unit.trained_weight else 0
        found[unit.index] = Uses(counted.forwards, counted.backwards, update=reads)
    return found


def _visited(
    problem: Problem,
    slotted: Sequence[UnitBytes],
    sites: Sequence[HookSite],
    slot_bytes: int,
    void: Collection[int],
) -> dict[int, Fetched]:
    """The fetches of a step. Args: void: units that a step's update leaves without their weights."""
    staying = [unit for unit in slotted if unit.unit.stays]
    sizes = {unit.index: unit.whole.weight_bytes for unit in slotted if not unit.unit.stays}
    trained = {unit.index for unit in slotted if unit.trained_weight}
    room = slot_bytes - sum(unit.whole.weight_bytes for unit in staying)
    order = in_order(list(sizes), sites)
    first = next((at for at, index in enumerate(order) if index in trained), len(order))
    visits = [(index, True) for index in order] + [(index, False) for index in reversed(order[first:])]
    walk = Walk(visits * problem.passes, sizes, room, _from_top(problem, sizes.values(), slot_bytes))
    once = {unit.index: Fetched(int(unit.index in void), 0, at_end=1) for unit in staying}
    return walk.steady(void) | once


def _from_top(problem: Problem, sizes: Collection[int], slot_bytes: int) -> Callable[[int], bool] | None:
    """Which slots come from the top of the room, by their bytes (tiers/slots.py)."""
    if problem.limits.shares:
        return None
    return long_from_top(slot_bytes) if problem.limits.in_place else unusual_from_top(sizes)


def _takes_slot(problem: Problem, placement: Placement, unit: UnitBytes) -> bool:
    at_home = problem.limits.used_at_home and unit.index in placement.weights.in_ram
    return unit.whole.weight_bytes > 0 and not (at_home and not unit.encoded)


def speculates(problem: Problem, placement: Placement, *, clips: bool) -> frozenset[int]:
    """The units whose updates begin during the backward pass, while the steps decide as they are expected to, or all
    clip."""
    updates = placement.updates
    if not worth_speculating(updates.overlap, wrong=float(clips)):
        return frozenset()
    moved = frozenset(
        unit.index
        for unit in problem.units
        if unit.state
        and unit.index not in placement.optimizer.in_ram
        and may_speculate(unit, placement.weights.in_ram, placement.gradients.in_ram)
        and (placement.commit_every == 1 or unit.index in updates.spare_units)
    )
    return moved | updates.in_ram
