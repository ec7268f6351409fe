"""Which units come and go where every fetch is a collective: what follows from the visits alone, so that all ranks
begin the same fetches in the same order ([Note: gathering] in slots.py).

How far updates are, and what refers to a slot, may differ between the ranks, so neither is asked.
"""

from __future__ import annotations

from collections.abc import Iterable

from infinity.units.unit import OffloadedUnit
from infinity.units.weights import Residency


class AgreedFetches:
    """The policy of ranks that bring their units together (FetchPolicy).

    Args:
        slot_bytes: of all slots together, as planned.
    """

    rearranges = False
    keeps_slots = False  # the update may be one of other ranks' slices alone

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes

    def may_come(self, unit: OffloadedUnit) -> bool:
        """Always: the thread of the exchange waits for the unit's update."""
        return True

    def fits(self, unit: OffloadedUnit, present: Iterable[OffloadedUnit]) -> bool:
        """By the bytes of the units, whatever memory is free."""
        taken = sum(other.unit.weight_bytes for other in present)
        return taken + unit.unit.weight_bytes <= self._slot_bytes

    def may_evict(self, unit: OffloadedUnit, *, prefetch: bool) -> bool:
        """Ranks save the same parameters for backward."""
        fetching = unit.weights.residency is Residency.FETCHING
        return not (prefetch and fetching) and not unit.views.saved_by_autograd()
