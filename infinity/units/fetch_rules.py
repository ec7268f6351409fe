"""Rules for fetching and evicting units, for a process that fetches its units without other ranks.

If several ranks gather their units together, all ranks must make the same fetches and evictions. The rules for such
ranks are in sharded/multi_rank_fetch_rules.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from infinity.units.unit import OffloadedUnit
from infinity.units.weights import Residency


class FetchRules(Protocol):
    """Questions that the Fetcher asks before it fetches or evicts units.

    Attributes:
        rearranges: whether the Fetcher may take further measures when evictions do not make enough room: wait for
            updates, collect garbage, and move units that are in use.
        keeps_slots: whether a unit may keep its slot while this process updates the unit. If False, the unit loses its
            slot when any rank updates the unit.
    """

    rearranges: bool
    keeps_slots: bool

    def may_prefetch(self, unit: OffloadedUnit) -> bool:
        """Return whether a prefetch of the unit may begin."""

    def fits(self, unit: OffloadedUnit, present: Iterable[OffloadedUnit]) -> bool:
        """Return whether a slot for the unit may be requested in addition to the slots of the units that are
        present."""

    def may_evict(self, unit: OffloadedUnit, *, prefetch: bool) -> bool:
        """Return whether a unit that is not in use may be evicted.

        Args:
            unit: unit to evict.
            prefetch: whether the memory is needed for a prefetch. A prefetch does not wait for updates, and does not
                evict a unit whose fetch is in progress.
        """


class SingleProcessFetchRules:
    """Fetch rules of a process that fetches its units without other ranks (FetchRules)."""

    rearranges = True
    keeps_slots = True

    def may_prefetch(self, unit: OffloadedUnit) -> bool:
        return unit.can_be_fetched()

    def fits(self, unit: OffloadedUnit, present: Iterable[OffloadedUnit]) -> bool:
        """Return True, because the slot pool decides whether the unit fits."""
        return True

    def may_evict(self, unit: OffloadedUnit, *, prefetch: bool) -> bool:
        if prefetch and (unit.weights.residency is Residency.FETCHING or not unit.at_rest):
            return False
        return not unit.weights.referred_to()
