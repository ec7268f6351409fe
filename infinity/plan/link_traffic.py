"""Bytes that a step is expected to move over each link, less the bytes that slots save.

plan/nvme_traffic.py counts the bytes of a step in which no slot is kept after a pass, and each weight is used once in
the forward and once in the backward. Its count is an upper bound unless some weights, such as tied weights, are used
more often. This module simulates the slots in the way that units/fetcher.py uses them. Units are prefetched as long as
there is memory, each unit into one contiguous slot. The unit with the farthest next use is evicted first. This saves
traffic in three ways:

* the last units of the forward are still on the device when the backward begins;
* the first units are still on the device when the next pass begins, unless an update made the contents of their slots
  invalid;
* a speculative update begins while its unit is still on the device, and needs no weights from the store.

Two effects of timing are not counted. With few slots, some units are evicted before their updates begin. And a unit
whose update is still being written is not evicted, so that another unit is evicted instead.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from infinity.plan.budgets import Budgets
from infinity.plan.nvme_traffic import gradient_traffic, traffic
from infinity.plan.placement import StatePlacement
from infinity.plan.plan_input import PlanInput, UnitBytes
from infinity.plan.policy import long_from_top, unusual_from_top, worth_speculating
from infinity.plan.slot_simulator import FetchCounts, SlotSimulator, in_order
from infinity.plan.speculation_memory import unit_may_speculate
from infinity.state.discover import HookedModule

_SIMULATIONS_KEPT = 256


@dataclass(frozen=True)
class UnitLoad:
    """Bytes that one unit moves in a step. All numbers are 0 for the links that the unit does not use.

    Attributes:
        resident: whether the unit is kept and updated on the device.
        updated_on_device: whether the unit is updated on the device, with weights and gradients from RAM.
        forwards, backwards: number of fetches for forward and backward passes.
        fetched: bytes that one fetch moves to the device.
        read: bytes that one fetch reads from NVMe.
        down: bytes of gradients from the device.
        spilled: bytes of gradients that are written to NVMe, and read again.
        states_read, states_written: bytes that the update reads from NVMe and writes to NVMe, without gradients.
        slot: bytes of the unit's slot.
        speculates: whether the update begins before the step is decided.
    """

    unit: UnitBytes
    resident: bool = False
    updated_on_device: bool = False
    forwards: float = 0
    backwards: float = 0
    fetched: int = 0
    read: int = 0
    down: int = 0
    spilled: int = 0
    states_read: float = 0
    states_written: int = 0
    slot: int = 0
    speculates: bool = False


@dataclass(frozen=True)
class LinkBytes:
    """Bytes that one step of one rank moves.

    Attributes:
        weights: weights read from NVMe for forward and backward.
        states: weights and optimizer states read from NVMe by updates.
        gradients: gradients that spill; this number of bytes is written, and the same number is read.
        written: weights and optimizer states that are written.
        commit_share: bytes of the states in RAM that a commit writes, divided by the number of steps between commits.
        up, down: bytes to the device, and bytes of gradients from the device; 0 if the device has no memory of its own.
        resident: bytes of states on the device that a commit copies from there, divided by the number of steps between
            commits; a part of `commit_share`.
        operands, results: weights and gradients from RAM for updates on the device, and weights to RAM.
        gathered: weights from the other ranks.
        exchanged: gradients from the other ranks, counted as one micro-batch for each pass.
        decoded: bytes of slots that encoded weights were decoded into.
        loads: bytes of each unit, in the order of the forward.
    """

    weights: int
    states: int
    gradients: int
    written: int
    commit_share: int
    up: int
    down: int
    resident: int
    operands: int
    results: int
    gathered: int
    exchanged: int
    decoded: int
    loads: tuple[UnitLoad, ...] = field(default=(), compare=False, repr=False)

    @property
    def read_bytes(self) -> int:
        """Bytes read from NVMe."""
        return self.weights + self.states + self.gradients

    @property
    def written_bytes(self) -> int:
        """Bytes written to NVMe."""
        return self.gradients + self.written + self.commit_share

    @property
    def nvme_bytes(self) -> int:
        """Bytes read from NVMe and written to it."""
        return self.read_bytes + self.written_bytes


@dataclass(frozen=True)
class UnitFetches:
    """Uses of a unit's weights in one step; mean numbers, if steps differ.

    Attributes:
        forwards, backwards: number of fetches for forward and backward passes.
        update: 1 if the unit's update must read its weights, 0 if not.
    """

    forwards: float
    backwards: float
    update: float

    @property
    def fetches(self) -> float:
        return self.forwards + self.backwards


def link_bytes(
    inputs: PlanInput,
    placement: StatePlacement,
    budgets: Budgets,
    sites: Sequence[HookedModule] = (),
    *,
    clips: bool = False,
) -> LinkBytes:
    """Count the bytes that a step moves once the run is under way.

    Args:
        inputs: the input of the planner.
        placement: where states rest.
        budgets: the memory for moving states.
        sites: the units that each module needs, in the order of the forward; empty: every unit has a module of its own.
        clips: whether gradients are clipped in most steps; if so, updates do not speculate with `overlap: auto`.
    """
    in_ram = placement.weights.in_ram
    counted = traffic(inputs, in_ram, placement.optimizer.in_ram, placement.gradients.in_ram)
    uses = unit_fetches(inputs, placement, budgets, sites, clips=clips)
    gradients = down = exchanged = 0
    weights = states = up = gathered = decoded = 0.0  # means, if steps differ
    ranks = max(inputs.limits.slice_count, 1)
    early = speculates(inputs, placement, clips=clips)
    loads = {unit.index: UnitLoad(unit, resident=True) for unit in inputs.resident}
    for unit in inputs.units:
        used = uses[unit.index]
        again = _from_copies(inputs, unit, used)
        fetches = used.fetches - again
        if unit.index not in in_ram:
            weights += fetches * unit.weight
            states += used.update * unit.trained_weight
        if unit.index not in inputs.states_on_device and unit.index not in placement.optimizer.in_ram:
            states += unit.state
        if unit.index not in placement.gradients.in_ram:
            gradients += gradient_traffic(inputs, unit)
        if inputs.limits.gathers:
            gathered += fetches * (ranks - 1) * unit.full.home_bytes / ranks
        exchanged += inputs.passes * (ranks - 1) * unit.gradient_native
        decoded += used.fetches * _decoded_bytes(unit)
        if not inputs.limits.in_place:
            up += fetches * unit.full.home_bytes + again * unit.full.weight_bytes
            down += inputs.passes * (unit.gradient_fp32 if budgets.ring.adds_up else unit.full.gradient_bytes)
        loads[unit.index] = _load(inputs, placement, unit, used, speculates=unit.index in early)
    return LinkBytes(
        weights=round(weights),
        states=round(states),
        gradients=gradients,
        written=counted.written_bytes - gradients,
        commit_share=counted.commit_share_bytes,
        up=round(up),
        down=down,
        resident=_resident_bytes(inputs),
        operands=sum(map(operands_of, inputs.updated_on_device)),
        results=sum(unit.trained_weight for unit in inputs.updated_on_device),
        gathered=round(gathered),
        exchanged=exchanged,
        decoded=round(decoded),
        loads=tuple(loads[index] for index in dict.fromkeys(in_order(list(loads), sites))),
    )


def _load(
    inputs: PlanInput, placement: StatePlacement, unit: UnitBytes, used: UnitFetches, *, speculates: bool
) -> UnitLoad:
    spills = unit.index not in placement.gradients.in_ram
    there = unit.index in inputs.states_on_device
    weights = unit.index not in placement.weights.in_ram
    states = not there and unit.index not in placement.optimizer.in_ram
    return UnitLoad(
        unit,
        updated_on_device=there,
        forwards=used.forwards,
        backwards=used.backwards,
        fetched=unit.full.home_bytes,
        read=weights * unit.weight,
        down=inputs.passes * unit.full.gradient_bytes,
        spilled=spills * gradient_traffic(inputs, unit),
        states_read=weights * used.update * unit.trained_weight + states * unit.state,
        states_written=weights * unit.trained_weight + states * unit.state,
        slot=unit.full.weight_bytes,
        speculates=speculates,
    )


def _resident_bytes(inputs: PlanInput) -> int:
    if not inputs.commit_every:
        return 0
    whole = sum(unit.trained_weight + unit.state for unit in inputs.resident)
    return (whole + sum(unit.state for unit in inputs.updated_on_device)) // inputs.commit_every


def operands_of(unit: UnitBytes) -> int:
    """Return the bytes of weights and gradients from RAM that the update of a unit on the device needs."""
    return unit.trained_weight + unit.gradient_fp32  # ranks add gradients in fp32


def _from_copies(inputs: PlanInput, unit: UnitBytes, used: UnitFetches) -> float:
    """Return how many fetches of a unit come from the copies that the ranks keep (sharded/gathered_slots.py).

    The first fetch after an update comes from the other ranks. All later fetches come from the copies.
    """
    if not inputs.secondary_bytes or unit.local.stays:
        return 0
    return max(used.fetches - 1, 0) if unit.trained_weight else used.fetches


def _decoded_bytes(unit: UnitBytes) -> int:
    return sum(group.weight_bytes for group in unit.full.groups if group.codec is not None)


def unit_fetches(
    inputs: PlanInput, placement: StatePlacement, budgets: Budgets, sites: Sequence[HookedModule], *, clips: bool
) -> dict[int, UnitFetches]:
    """Return the uses of each unit, by index.

    Steps are simulated, visit by visit, until two consecutive steps are alike.
    """
    limits = inputs.limits
    slotted = [unit for unit in inputs.units if _takes_slot(inputs, placement, unit)]
    speculating = speculates(inputs, placement, clips=clips)
    # An update makes the contents of some slots invalid: slots on a device, and slots that several ranks fill together.
    in_place = limits.in_place and not limits.gathers
    # The slot of encoded weights that rest in RAM is a copy, which an update makes invalid, too.
    copied = {unit.index for unit in slotted if unit.encoded and unit.index in placement.weights.in_ram}
    stale = speculating | copied if in_place else {unit.index for unit in slotted}
    void = {unit.index for unit in slotted if unit.trained_weight and unit.index in stale}
    visited = _visited(inputs, slotted, sites, budgets.slot_bytes, void)
    takes_slot = {unit.index for unit in slotted}
    reads_slot = in_place or (budgets.copies_bytes > 0 and not limits.gathers)
    found = {}
    for unit in inputs.units:
        counted = visited.get(unit.index, FetchCounts())
        there = (1 if unit.index in speculating else counted.at_end) if reads_slot else 0
        reads = 1 - there if unit.index in takes_slot and unit.trained_weight else 0
        found[unit.index] = UnitFetches(counted.forwards, counted.backwards, update=reads)
    return found


def _visited(
    inputs: PlanInput,
    slotted: Sequence[UnitBytes],
    sites: Sequence[HookedModule],
    slot_bytes: int,
    void: Collection[int],
) -> dict[int, FetchCounts]:
    """Return the fetches of a step, by unit.

    The update of a unit in `void` makes the contents of the unit's slot invalid.
    """
    staying = [unit for unit in slotted if unit.local.stays]
    sizes = {unit.index: unit.full.weight_bytes for unit in slotted if not unit.local.stays}
    trained = {unit.index for unit in slotted if unit.trained_weight}
    order = in_order(list(sizes), sites)
    first = next((at for at, index in enumerate(order) if index in trained), len(order))
    visits = [(index, True) for index in order] + [(index, False) for index in reversed(order[first:])]
    apart = frozenset(unit.index for unit in slotted if unit.full.routed)
    if sum(sizes.values()) <= slot_bytes:
        apart = frozenset()
    # Thousands of experts would take minutes to simulate. They follow one another, and more than the slots can hold.
    routed = {
        index: FetchCounts(inputs.passes, inputs.passes * (at >= first))
        for at, index in enumerate(order)
        if index in apart
    }
    if apart:
        slot_bytes -= 2 * max(sizes[index] for index in apart)
        sizes = {index: nbytes for index, nbytes in sizes.items() if index not in apart}
        visits = [visit for visit in visits if visit[0] not in apart]
    once = {unit.index: FetchCounts(int(unit.index in void), 0, at_end=1) for unit in staying}
    return (
        once
        | routed
        | _simulated(
            tuple(visits * inputs.passes),
            tuple(sizes.items()),
            slot_bytes,
            sum(unit.full.weight_bytes for unit in staying),
            frozenset(void),
            in_place=inputs.limits.in_place,
            divided=inputs.limits.gathers,
        )
    )


@lru_cache(maxsize=_SIMULATIONS_KEPT)
def _simulated(
    visits: tuple[tuple[int, bool], ...],
    sizes: tuple[tuple[int, int], ...],
    slot_bytes: int,
    staying_bytes: int,
    void: frozenset[int],
    *,
    in_place: bool,
    divided: bool,
) -> dict[int, FetchCounts]:
    """Return the fetches of a step, by unit. Plans that differ in other respects share the simulation.

    Args:
        visits: the visits of a step (SlotSimulator).
        sizes: each unit with the bytes of its slot.
        slot_bytes: bytes of all slots together.
        staying_bytes: bytes of the slots of units that stay.
        void: units whose slots an update makes invalid.
        in_place: whether the device has no memory of its own.
        divided: whether units are divided over ranks.
    """
    from_top = None  # whether a slot is allocated from the top of its memory (tiers/slots.py)
    if not divided:
        from_top = long_from_top(slot_bytes) if in_place else unusual_from_top(nbytes for _, nbytes in sizes)
    return SlotSimulator(visits, dict(sizes), slot_bytes - staying_bytes, from_top).steady(void)


def _takes_slot(inputs: PlanInput, placement: StatePlacement, unit: UnitBytes) -> bool:
    at_home = inputs.limits.used_at_home and unit.index in placement.weights.in_ram
    return unit.full.weight_bytes > 0 and not (at_home and not unit.encoded)


def speculates(inputs: PlanInput, placement: StatePlacement, *, clips: bool) -> frozenset[int]:
    """Return the units whose updates begin during the backward pass.

    Without `clips`, every speculative update is assumed to be right. With `clips`, all steps are assumed to clip.
    """
    updates = placement.updates
    if not worth_speculating(updates.overlap, wrong=float(clips)):
        return frozenset()
    moved = frozenset(
        unit.index
        for unit in inputs.updated_on_processor
        if unit.index not in placement.optimizer.in_ram
        and unit_may_speculate(unit, placement.weights.in_ram, placement.gradients.in_ram)
        and (placement.commit_every == 1 or unit.index in updates.spare_units)
    )
    return moved | updates.in_ram
