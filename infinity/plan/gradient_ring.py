"""Sizes of the ring, which is device memory for gradients on their way to the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from infinity.plan.plan_input import PlanInput
from infinity.state.discover import HookedModule
from infinity.state.unit import Unit


@dataclass(frozen=True)
class RingSize:
    """One size of the ring.

    Attributes:
        nbytes: bytes of the ring; 0 if gradients need not move.
        adds_up: whether the ring adds up, in fp32, the gradients of micro-batches that go through a unit together.
    """

    nbytes: int
    adds_up: bool = False


def rings_of(inputs: PlanInput, sites: Sequence[HookedModule]) -> list[RingSize]:
    """Return the useful sizes of the ring, the smallest first.

    The sizes are:

    * the gradients of the largest unit: the smallest ring that works;
    * the gradients of the two largest units: the next unit's gradients arrive while the last unit's gradients are
      copied;
    * with vertical micro-batches, room to add up the gradients of all micro-batches (`_adding_up`).

    Args:
        inputs: the model and the budgets.
        sites: the units that each module needs; empty: every unit has a module of its own.
    """
    if inputs.limits.in_place:
        return [RingSize(0)]
    units = [unit.full for unit in inputs.units]
    two = sorted(unit.gradient_bytes for unit in units)[-2:]
    rings = [RingSize(inputs.ring_bytes_min), RingSize(sum(two))]
    if inputs.config.vertical and not inputs.limits.slice_count:  # each rank sends the gradients of each micro-batch
        rings.append(RingSize(_adding_up(units, sites), adds_up=True))
    return rings


def _adding_up(units: Sequence[Unit], sites: Sequence[HookedModule]) -> int:
    """Return the bytes of gradients in fp32 that are in the ring at once, while all micro-batches go through a unit.

    If several modules use a unit (a tied embedding, for example), the unit's gradients stay in the ring until the last
    of these modules has produced its gradients. Gradients of the units that stay on the device stay in the ring, too,
    because each module may produce a few of these gradients. The ring also needs room for the gradients of the two
    largest other units.
    """
    uses = Counter(index for site in sites for index in set(site.units))
    nbytes = {unit.index: sum(group.state_bytes(4) for group in unit.trainable_groups) for unit in units}
    kept = {unit.index for unit in units if unit.stays or uses[unit.index] > 1}
    others = sorted(nbytes[unit.index] for unit in units if unit.index not in kept)
    return sum(nbytes[index] for index in kept) + sum(others[-2:])
