"""Which unit makes room, and which is fetched next: pure functions of what the trace expects.

No clock and no free memory is asked, so that every rank decides alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from infinity.units.trace import Trace


def victims(candidates: Iterable[int], next_use: Callable[[int], int], beyond: int = -1) -> Iterator[int]:
    """Units that may make room, the one with the farthest next use first; of equals the first in `candidates`.

    Args:
        candidates: units, by index, that nothing keeps on the device.
        next_use: visits from now until a unit is used again.
        beyond: only units whose next use is later than this many visits from now.
    """
    later = [(use, index) for index in candidates if (use := next_use(index)) > beyond]
    return (index for _, index in sorted(later, key=lambda each: -each[0]))


def to_prefetch(upcoming: Iterable[int], is_released: Callable[[int], bool]) -> Iterator[tuple[int, int]]:
    """(visits from now, unit) of the units to fetch ahead, nearest first."""
    return ((distance, index) for distance, index in enumerate(upcoming) if is_released(index))


def update_order(count: int, stays: Callable[[int], bool], trace: Trace) -> list[int]:
    """All units by index, in the order in which the next training forward uses them: those that stay on the device
    first, as they are brought when it begins."""
    return sorted(range(count), key=lambda index: (not stays(index), trace.first_use(index)))
