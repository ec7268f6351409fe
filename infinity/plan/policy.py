"""Policy: which unit is fetched, which is evicted, and when an update may begin. The engine runs these functions
(units/, tiers/), and `infinity plan` walks through a step with them (plan/slot_simulator.py, plan/link_traffic.py).

The answers follow from the trace and the budgets. No function asks a clock or the free memory, so that every rank
decides alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from operator import itemgetter

from infinity.plan.placement import Overlap
from infinity.plan.visit_trace import VisitTrace

_WRONG_MAX = 0.3  # a wrong speculation moves the states once in vain
_SLOT_SHARE = 4  # speculative updates may keep 1/4 of the memory for fetched weights from other uses

# -- fetches -----------------------------------------------------------------------------------------------------------


def to_prefetch(
    trace: VisitTrace,
    nbytes: Callable[[int], int],
    room: int,
    there: Collection[int],
    is_released: Callable[[int], bool],
) -> Iterator[tuple[int, int]]:
    """Yield (visits from now, unit) for the units to prefetch, nearest first.

    The first unit that has no room beside the units that are used before it ends the list. Each of those counts with
    its bytes, whether it is on the device, in flight, or waiting for an update that is still being computed. So the
    units that follow do not depend on how far the updates are.

    Args:
        trace: the visits of this iteration.
        nbytes: function that gives the bytes that a unit takes of the room.
        room: bytes of all slots together.
        there: units that are not evicted.
        is_released: function that is asked when the turn of a unit has come.
    """
    counted = set(there)
    room -= sum(map(nbytes, counted))
    for distance, index in enumerate(trace.upcoming()):
        if index not in counted:
            counted.add(index)
            room -= nbytes(index)
        if room < 0:
            return
        if is_released(index):
            yield distance, index


def long_from_top(room: int) -> Callable[[int], bool]:
    """Return a test for slots that come from the top of the room in host memory, by their bytes.

    These are the long ones, so that long and short slots do not break up each other's space.
    """
    long_bytes = room // 4
    return lambda nbytes: nbytes > long_bytes


def unusual_from_top(sizes: Iterable[int]) -> Callable[[int], bool]:
    """Return a test for slots that come from the top of the room on a device: those of an unusual size, in bytes."""
    counts = Counter(sizes)
    usual_bytes = max(counts, key=lambda nbytes: (counts[nbytes], nbytes), default=0)
    return lambda nbytes: nbytes != usual_bytes


# -- evictions ---------------------------------------------------------------------------------------------------------


def victims(present: Iterable[int], trace: VisitTrace, distance: int | None) -> Iterator[int]:
    """Return the units that may be evicted, the one with the farthest next use first; of equals the first in `present`.

    Args:
        present: units on the device, by index.
        trace: the visits of this iteration.
        distance: visits from now until the unit that needs room is used. Only units that are used later are evicted,
            and not the unit of the last visit. None: it is used now, and any unit may be evicted.
    """
    beyond, last = (-1, None) if distance is None else (distance, trace.last)
    later = [(use, index) for index in present if index != last and (use := trace.next_use(index)) > beyond]
    return (index for _, index in sorted(later, key=itemgetter(0), reverse=True))


# -- when an update may begin ------------------------------------------------------------------------------------------


def update_order(count: int, stays: Callable[[int], bool], trace: VisitTrace) -> list[int]:
    """Return all units by index, in the order in which the next training forward uses them.

    Units that stay on the device come first, because they are fetched when the forward begins.
    """
    return sorted(range(count), key=lambda index: (not stays(index), trace.first_use(index)))


def worth_speculating(overlap: Overlap, wrong: float) -> bool:
    """Return whether updates are to begin before the step is decided.

    Args:
        overlap: the setting of the swap config.
        wrong: share of the last steps that were decided otherwise than expected, such as steps that clipped.
    """
    return overlap == "during_backward" or (overlap == "auto" and wrong <= _WRONG_MAX)


def may_speculate(*, trained_whole: bool, weights_in_ram: bool, gradients_in_ram: bool) -> bool:
    """Return whether a unit's update may begin before the step is decided, by where the unit's states rest.

    An update whose gradients spill would wait until they have gone to the store and back. New weights in RAM get other
    memory than the old ones. If a part of the unit is frozen, nothing would copy that part there.
    """
    return gradients_in_ram and (trained_whole or not weights_in_ram)


def may_keep_slot(nbytes: int, kept: int, room: int) -> bool:
    """Return whether a speculative update may read the slot of its unit, which then is not evicted.

    Args:
        nbytes: bytes of the slot.
        kept: bytes of the slots that other updates read.
        room: bytes of all slots together.
    """
    return (kept + nbytes) * _SLOT_SHARE <= room
