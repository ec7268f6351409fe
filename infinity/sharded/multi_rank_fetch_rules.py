"""Rules for fetches and evictions of ranks for which every fetch is a collective.

All ranks must begin the same fetches in the same order ([Note: gathering] in gathered_slots.py). The decisions
therefore depend only on the order in which the units were used, which is the same on all ranks. They do not depend on
the progress of updates or on the references to a slot, which may differ between ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

from infinity.units.unit import OffloadedUnit
from infinity.units.weights import Residency


class MultiRankFetchRules:
    """Fetch rules of ranks that fetch their units together (FetchRules).

    Args:
        slot_bytes: the plan's bytes for all slots together.
    """

    rearranges = False
    keeps_slots = False  # an update may change only the slices of other ranks

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes

    def may_prefetch(self, unit: OffloadedUnit) -> bool:
        """Return True, because the thread of the collectives waits for the unit's update."""
        return True

    def fits(self, unit: OffloadedUnit, present: Iterable[OffloadedUnit]) -> bool:
        """Return whether the bytes of the units fit into the planned bytes. The result does not depend on the free
        memory."""
        taken = sum(other.full.weight_bytes for other in present)
        return taken + unit.full.weight_bytes <= self._slot_bytes

    def may_evict(self, unit: OffloadedUnit, *, prefetch: bool) -> bool:
        """Return whether the unit may be evicted. The result is the same on all ranks, because they save the same
        parameters for the backward."""
        fetching = unit.weights.residency is Residency.FETCHING
        return not (prefetch and fetching) and not unit.views.saved_by_autograd()
