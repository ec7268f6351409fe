"""Who comes, who goes, and when an update may begin: the engine runs these functions (units/, tiers/), and `infinity
plan` walks through a step with them (plan/visits.py, plan/expected.py).

They follow from the trace and the budgets. No clock and no free memory is asked, so that every rank decides alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from operator import itemgetter

from infinity.plan.placement import Overlap
from infinity.plan.trace import Trace

_WRONG_MAX = 0.3  # a wrong speculation moves the states once for nothing
_SLOT_SHARE = 4  # of the memory for fetched weights, what speculative updates may keep from being used for others: 1/4

# -- who comes ---------------------------------------------------------------------------------------------------------


def to_prefetch(
    trace: Trace, nbytes: Callable[[int], int], room: int, there: Collection[int], is_released: Callable[[int], bool]
) -> Iterator[tuple[int, int]]:
    """(visits from now, unit) of the units to fetch ahead, nearest first, up to the first that has no room beside the
    units that are used before it.

    Each of those has its room, be it on the device, on its way, or wanted by a unit whose update is still computed. So
    which units follow does not depend on how far the updates are.

    Args:
        nbytes: what a unit takes of the room.
        there: units that do not make room.
        is_released: is asked when the turn of a unit has come.
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
    """Which slots, by their bytes, come from the top of the room in host memory: those that are long, so that long and
    short ones do not break up each other's space."""
    long_bytes = room // 4
    return lambda nbytes: nbytes > long_bytes


def unusual_from_top(sizes: Iterable[int]) -> Callable[[int], bool]:
    """Which slots, by their bytes, come from the top of the room on a device: those of another size than most have."""
    counts = Counter(sizes)
    usual_bytes = max(counts, key=lambda nbytes: (counts[nbytes], nbytes), default=0)
    return lambda nbytes: nbytes != usual_bytes


# -- who goes ----------------------------------------------------------------------------------------------------------


def victims(present: Iterable[int], trace: Trace, distance: int | None) -> Iterator[int]:
    """Units that may make room, the one with the farthest next use first; of equals the first in `present`.

    Args:
        present: units on the device, by index.
        distance: visits from now until the unit that needs room is used; only units that are used later make room, and
            not the unit of the last visit. None: it is used now, and each may go.
    """
    beyond, last = (-1, None) if distance is None else (distance, trace.last)
    later = [(use, index) for index in present if index != last and (use := trace.next_use(index)) > beyond]
    return (index for _, index in sorted(later, key=itemgetter(0), reverse=True))


# -- when an update may begin ------------------------------------------------------------------------------------------


def update_order(count: int, stays: Callable[[int], bool], trace: Trace) -> list[int]:
    """All units by index, in the order in which the next training forward uses them: those that stay on the device
    first, as they are brought when it begins."""
    return sorted(range(count), key=lambda index: (not stays(index), trace.first_use(index)))


def worth_speculating(overlap: Overlap, wrong: float) -> bool:
    """Whether updates are to begin before the step is decided.

    Args:
        wrong: the share of the last steps that decided otherwise than expected, as where they clip.
    """
    return overlap == "during_backward" or (overlap == "auto" and wrong <= _WRONG_MAX)


def may_speculate(*, trained_whole: bool, weights_in_ram: bool, gradients_in_ram: bool) -> bool:
    """Whether the update of a unit may begin before the step is decided, by where the unit's states rest.

    Gradients that spill would be waited for on their way to the store and back. New weights in RAM come to rest in
    other memory than the old ones, and where a part of the unit is frozen nothing would bring that part there.
    """
    return gradients_in_ram and (trained_whole or not weights_in_ram)


def may_keep_slot(nbytes: int, kept: int, room: int) -> bool:
    """Whether a speculative update may read the slot of its unit, which does not make room then.

    Args:
        nbytes: of the slot.
        kept: bytes of the slots that other updates read.
        room: bytes of all slots together.
    """
    return (kept + nbytes) * _SLOT_SHARE <= room
