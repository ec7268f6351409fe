"""Rules by which a process brings units to their slots, when only its own memory and updates matter.

Ranks that bring their units together may each do only the fetches and evictions that all of them do. That policy is
sharded/fetch_rules.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from infinity.units.unit import OffloadedUnit
from infinity.units.weights import Residency


class FetchRules(Protocol):
    """Questions that the room asks before it brings or evicts units.

    Attributes:
        rearranges: whether the room may wait for updates, collect garbage and move units in use, when evicting units
            does not make enough room.
        keeps_slots: whether an update in this process may leave a unit its slot. Otherwise an update on any rank voids
            the unit's slot.
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
            prefetch: the room is for a prefetch, which waits for no update and evicts no unit that is still being
                fetched.
        """


class LocalFetchRules:
    """Fetch rules of a process that brings its units alone (FetchRules)."""

    rearranges = True
    keeps_slots = True

    def may_prefetch(self, unit: OffloadedUnit) -> bool:
        return unit.can_be_fetched()

    def fits(self, unit: OffloadedUnit, present: Iterable[OffloadedUnit]) -> bool:
        """Return True: the slot pool decides."""
        return True

    def may_evict(self, unit: OffloadedUnit, *, prefetch: bool) -> bool:
        if prefetch and (unit.weights.residency is Residency.FETCHING or not unit.at_rest):
            return False
        return not unit.weights.referred_to()
