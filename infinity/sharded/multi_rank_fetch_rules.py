"""Rules for fetches and evictions of ranks for which every fetch is a collective.

All ranks must begin the same fetches in the same order ([Note: gathering] in gathered_slots.py). The decisions
therefore depend only on the order in which the units were used, which is the same on all ranks. They do not depend on
the progress of updates or on the references to a slot, which may differ between ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

from infinity.sharded.slot_book import SlotBook
from infinity.units.unit import OffloadedUnit
from infinity.units.weights import Residency


class MultiRankFetchRules:
    """Fetch rules of ranks that fetch their units together (FetchRules).

    Args:
        slot_bytes: the plan's bytes for all slots together.
        book: places of the slots on a device; None: slots in host memory, which take additional memory if the free
            memory is in pieces.
    """

    rearranges = False
    keeps_slots = False  # an update may change only the slices of other ranks

    def __init__(self, slot_bytes: int, book: SlotBook | None = None) -> None:
        self._slot_bytes = slot_bytes
        self._book = book

    def may_prefetch(self, unit: OffloadedUnit) -> bool:
        """Return True, because the thread of the collectives waits for the unit's update."""
        return True

    def fits(self, unit: OffloadedUnit, present: Iterable[OffloadedUnit]) -> bool:
        """Return whether the bytes of the units fit into the planned bytes, in one piece or because no eviction would
        make a larger piece. The result does not depend on the free memory."""
        there = list(present)
        if sum(other.full.weight_bytes for other in there) + unit.full.weight_bytes > self._slot_bytes:
            return False
        if self._book is None or self._book.take(unit.full, {other.index for other in there}):
            return True
        return not any(self._may_go(other) for other in there)

    def _may_go(self, unit: OffloadedUnit) -> bool:
        return not unit.weights.in_use and not unit.full.stays and self.may_evict(unit, prefetch=False)

    def may_evict(self, unit: OffloadedUnit, *, prefetch: bool) -> bool:
        """Return whether the unit may be evicted. The result is the same on all ranks, because they save the same
        parameters for the backward."""
        fetching = unit.weights.residency is Residency.FETCHING
        return not (prefetch and fetching) and not unit.views.saved_by_autograd()
