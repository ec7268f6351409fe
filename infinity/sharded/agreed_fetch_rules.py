"""Fetches and evictions when every fetch is a collective.

The decisions follow from the visits only, so that all ranks begin the same fetches in the same order ([Note: gathering]
in gathered_slots.py). The progress of updates and the references to a slot may differ between ranks, so the decisions
use neither.
"""

from __future__ import annotations

from collections.abc import Iterable

from infinity.units.unit import OffloadedUnit
from infinity.units.weights import Residency


class AgreedFetchRules:
    """Fetch rules of ranks that fetch their units together (FetchRules).

    Args:
        slot_bytes: planned bytes of all slots together.
    """

    rearranges = False
    keeps_slots = False  # an update may concern only the slices of other ranks

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes

    def may_prefetch(self, unit: OffloadedUnit) -> bool:
        """Return True: the thread of the exchange waits for the unit's update."""
        return True

    def fits(self, unit: OffloadedUnit, present: Iterable[OffloadedUnit]) -> bool:
        """Return whether the bytes of the units fit into the planned bytes. The free memory has no influence."""
        taken = sum(other.full.weight_bytes for other in present)
        return taken + unit.full.weight_bytes <= self._slot_bytes

    def may_evict(self, unit: OffloadedUnit, *, prefetch: bool) -> bool:
        """Return whether the unit may be evicted. All ranks agree: they save the same parameters for backward."""
        fetching = unit.weights.residency is Residency.FETCHING
        return not (prefetch and fetching) and not unit.views.saved_by_autograd()
