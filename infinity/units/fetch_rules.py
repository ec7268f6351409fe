"""Rules for bringing units to their slots, in a process for which only its own memory and updates matter.

Ranks that gather their units together must all make the same fetches and evictions; their rules are in
sharded/agreed_fetch_rules.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from infinity.units.unit import OffloadedUnit
from infinity.units.weights import Residency


class FetchRules(Protocol):
    """Questions that the Fetcher asks before it brings or evicts units.

    Attributes:
        rearranges: whether the Fetcher may wait for updates, collect garbage and move units in use, when evicting units
            does not make enough room.
        keeps_slots: whether a unit may keep its slot while this process updates the unit; otherwise an update on any
            rank makes the slot invalid.
    """

    rearranges: bool
    keeps_slots: bool

    def may_prefetch(self, unit: OffloadedUnit) -> bool:
        """Return whether a prefetch of the unit may begin."""

    def fits(self, unit: OffloadedUnit, present: Iterable[OffloadedUnit]) -> bool:
        """Return whether a slot for the unit may be requested beside the units that are present."""

    def may_evict(self, unit: OffloadedUnit, *, prefetch: bool) -> bool:
        """Return whether a unit that is not in use may be evicted.

        Args:
            unit: unit to evict.
            prefetch: whether the room is needed for a prefetch. A prefetch waits for no update and evicts no unit that
                is still being fetched.
        """


class LocalFetchRules:
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
