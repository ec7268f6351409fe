"""Policy: which unit is fetched, which is evicted, and when an update may begin. The engine calls the functions of this
module (units/, tiers/), and `infinity plan` simulates a step with the same functions (plan/slot_simulator.py,
plan/link_traffic.py).

The results depend on the trace and the budgets only. No function reads a clock or the size of the free memory, so all
ranks get the same results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from operator import itemgetter

from infinity.plan.placement import Overlap
from infinity.plan.visit_trace import VisitTrace

_WRONG_MAX = 0.3  # a wrong speculation moves the states once without use
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

    Units are counted in the order of their next use. The first unit that does not fit ends the list. A unit counts with
    the same bytes whether it is on the device, in flight, or waiting for an update that is still being computed. The
    list therefore does not depend on the progress of the updates.

    Args:
        trace: the visits of this iteration.
        nbytes: function that returns the bytes of a unit's slot.
        room: bytes of all slots together.
        there: units that have a slot and are not evicted.
        is_released: function that returns whether a unit has no slot and can be fetched; called only when the unit is
            next in the order.
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
    """Return a function that tells whether a slot of a given size is allocated from the top of the slots' host memory.

    Long slots are allocated from the top, so that long and short slots do not fragment each other's space.
    """
    long_bytes = room // 4
    return lambda nbytes: nbytes > long_bytes


def unusual_from_top(sizes: Iterable[int]) -> Callable[[int], bool]:
    """Return a function that tells whether a slot's size is unusual.

    Slots of an unusual size are allocated from the top of the slots' device memory.
    """
    counts = Counter(sizes)
    usual_bytes = max(counts, key=lambda nbytes: (counts[nbytes], nbytes), default=0)
    return lambda nbytes: nbytes != usual_bytes


# -- evictions ---------------------------------------------------------------------------------------------------------


def victims(present: Iterable[int], trace: VisitTrace, distance: int | None) -> Iterator[int]:
    """Return the units that may be evicted, the farthest next use first.

    Units with an equal next use are in the order of `present`.

    Args:
        present: units on the device, by index.
        trace: the visits of this iteration.
        distance: number of visits until the unit that needs memory is used. Only units with a later use are evicted,
            and never the unit of the last visit. None: the unit that needs memory is used now, and any unit may be
            evicted.
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
    """Return whether updates should begin before it is certain that the step applies them.

    Args:
        overlap: the setting of the swap config.
        wrong: share of the last steps with a wrong prediction, such as steps that clipped.
    """
    return overlap == "during_backward" or (overlap == "auto" and wrong <= _WRONG_MAX)


def may_speculate(*, trained_whole: bool, weights_in_ram: bool, gradients_in_ram: bool) -> bool:
    """Return whether a unit's update may speculate, given the places where the unit's states rest.

    The update must wait if the gradients spill: they are first written to the store and then read back. The update must
    also wait if weights in RAM are partly frozen: new weights get other memory than the old weights, and nothing would
    copy the frozen part to the new memory.
    """
    return gradients_in_ram and (trained_whole or not weights_in_ram)


def may_keep_slot(nbytes: int, kept: int, room: int) -> bool:
    """Return whether a speculative update may read its unit's slot; the slot is not evicted while the update reads it.

    Args:
        nbytes: bytes of the slot.
        kept: bytes of the slots that other updates read.
        room: bytes of all slots together.
    """
    return (kept + nbytes) * _SLOT_SHARE <= room
