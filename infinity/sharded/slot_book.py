"""Bookkeeping of the memory of slots on a device, for ranks that fetch their units together.

Whether a slot finds room depends on the places of the other slots. All ranks must decide this in the same way, but on
one rank views may keep the memory of a released slot. So the ranks decide by a book, which knows fetches and evictions
and no views. If views keep memory, a slot takes additional memory (device_gather_memory.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from infinity.io.arena import ArenaRegion, Lease
from infinity.plan.policy import unusual_from_top
from infinity.state.unit import Unit


class SlotBook:
    """The places of slots, as SlabSlotPool takes them.

    Args:
        slot_bytes: bytes of all slots together.
        units: the units that have slots.
    """

    def __init__(self, slot_bytes: int, units: Sequence[Unit]) -> None:
        staying = sum(unit.weight_bytes for unit in units if unit.stays)
        self._staying = ArenaRegion(None, 0, staying)
        self._slots = ArenaRegion(None, staying, slot_bytes - staying)
        self._from_top = unusual_from_top(unit.weight_bytes for unit in units if not unit.stays)
        self._taken: dict[int, Lease] = {}

    def take(self, unit: Unit, present: Collection[int]) -> bool:
        """Take a place for a slot, and return whether there was one.

        Args:
            unit: the unit of the slot.
            present: indices of the units that have slots; the places of all other units are free.
        """
        for index in self._taken.keys() - present:
            self._taken.pop(index).release()
        nbytes = unit.weight_bytes
        lease = self._staying.try_lease(nbytes) if unit.stays else None
        lease = lease or self._slots.try_lease(nbytes, from_top=self._from_top(nbytes))
        if lease is not None:
            self._taken[unit.index] = lease
        return lease is not None
