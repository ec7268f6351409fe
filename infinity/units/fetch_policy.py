"""What a process may do to bring a unit to its slot: alone, whatever its own memory and updates allow.

Of several ranks that bring their units together each may do only what all of them do; that form stands elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from infinity.units.unit import OffloadedUnit
from infinity.units.weights import Residency


class FetchPolicy(Protocol):
    """What the room asks before units come and go.

    Attributes:
        rearranges: where no unit may go that would make room, the room may wait for updates, collect garbage, and move
            units that are in use.
        keeps_slots: an update here may leave a unit its slot. Otherwise an update on any rank voids the unit's slot.
    """

    rearranges: bool
    keeps_slots: bool

    def may_come(self, unit: OffloadedUnit) -> bool:
        """Whether a prefetch may begin."""

    def fits(self, unit: OffloadedUnit, present: Iterable[OffloadedUnit]) -> bool:
        """Whether memory may be asked for a unit's slot beside those that are present."""

    def may_evict(self, unit: OffloadedUnit, *, prefetch: bool) -> bool:
        """Whether a unit that nobody uses may go.

        Args:
            prefetch: that waits for no update, and makes room for what is needed now, not for another prefetch.
        """


class LocalFetches:
    """The policy of a process that brings its units alone (FetchPolicy)."""

    rearranges = True
    keeps_slots = True

    def may_come(self, unit: OffloadedUnit) -> bool:
        return unit.can_be_fetched()

    def fits(self, unit: OffloadedUnit, present: Iterable[OffloadedUnit]) -> bool:
        """The pool tells."""
        return True

    def may_evict(self, unit: OffloadedUnit, *, prefetch: bool) -> bool:
        if prefetch and (unit.weights.residency is Residency.FETCHING or not unit.at_rest):
            return False
        return not unit.weights.referred_to()
