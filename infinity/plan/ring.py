"""Sizes of the ring: device memory for gradients on their way to the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from infinity.plan.plan_input import PlanInput
from infinity.state.discover import HookedModule
from infinity.state.unit import Unit


@dataclass(frozen=True)
class Ring:
    """One size of the ring.

    Attributes:
        nbytes: its size; 0 if gradients need not move.
        adds_up: whether the gradients of micro-batches that go through a unit together add up in it, in fp32.
    """

    nbytes: int
    adds_up: bool = False


def rings_of(inputs: PlanInput, sites: Sequence[HookedModule]) -> list[Ring]:
    """Return the sizes that make sense, the shortest first.

    They are:

    * the gradients of the largest unit: the least that works;
    * those of the two largest units: the next unit's gradients arrive while the last unit's are copied;
    * with vertical micro-batches, room for gradients that add up (`_adding_up`).

    Args:
        inputs: the model and the budgets.
        sites: the units that each module needs; none: every unit has a module of its own.
    """
    if inputs.limits.in_place:
        return [Ring(0)]
    units = [unit.full for unit in inputs.units]
    two = sorted(unit.gradient_bytes for unit in units)[-2:]
    rings = [Ring(inputs.ring_bytes_min), Ring(sum(two))]
    if inputs.config.vertical:
        rings.append(Ring(_adding_up(units, sites), adds_up=True))
    return rings


def _adding_up(units: Sequence[Unit], sites: Sequence[HookedModule]) -> int:
    """Return the bytes of gradients in fp32 that are in the ring at once, while all micro-batches go through a unit.

    Gradients of a unit that several modules use, such as a tied embedding, stay until the last module has brought its
    own. Beside them are those of the two largest other units, and those of the units that stay on the device, of which
    each module may bring a few.
    """
    uses = Counter(index for site in sites for index in set(site.units))
    nbytes = {unit.index: sum(group.state_bytes(4) for group in unit.trainable_groups) for unit in units}
    kept = {unit.index for unit in units if unit.stays or uses[unit.index] > 1}
    others = sorted(nbytes[unit.index] for unit in units if unit.index not in kept)
    return sum(nbytes[index] for index in kept) + sum(others[-2:])
