"""The order in which units are used, learned from the last iteration."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import islice


class VisitTrace:
    """The visits of one iteration, and a prediction of these visits.

    The first prediction is the order that the constructor gets. Later predictions are the visits of the last iteration.
    The trace has a position in the prediction. If a visit differs from the prediction, the trace looks for the unit
    after the position, in case visits were skipped. If the unit is not there, the trace looks for it from the start, in
    case visits were repeated. A visit of a unit that is not in the prediction leaves the position unchanged. Every
    visit is recorded, so that a changed order is learned within one iteration.
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        self._seen: list[int] = []
        self._predict(prediction)

    def _predict(self, order: Sequence[int]) -> None:
        self._order = tuple(order)
        self._position = 0
        self._at: dict[int, list[int]] = {}  # positions of each unit in the order, ascending
        for position, unit in enumerate(order):
            self._at.setdefault(unit, []).append(position)

    def _find(self, unit: int, start: int) -> int | None:
        """Return a unit's first position in the prediction from `start` on; None if there is no such position."""
        positions = self._at.get(unit, ())
        index = bisect_left(positions, start)
        return positions[index] if index < len(positions) else None

    def visit(self, unit: int) -> None:
        if self._seen and self._seen[-1] == unit:
            return
        self._seen.append(unit)
        for start in (self._position, 0):
            found = self._find(unit, start)
            if found is not None:
                self._position = found + 1
                return

    @property
    def last(self) -> int | None:
        """The unit of the last visit in this iteration.

        The next visit may use the same unit: the last block's backward follows its forward, and a second visit of a
        unit in succession is not recorded.
        """
        return self._seen[-1] if self._seen else None

    def close(self) -> None:
        """End the iteration. The recorded visits become the prediction for the next iteration."""
        if self._seen:
            self._predict(self._seen)
            self._seen = []
        self._position = 0

    def upcoming(self) -> Iterator[int]:
        """Iterate over the next units of this iteration, the nearest first.

        The iterator stops at the end of the iteration, because the weights change there.
        """
        return islice(self._order, self._position, None)

    def first_use(self, unit: int) -> int:
        """Return the number of visits from the beginning of the next iteration until `unit` is used."""
        found = self._find(unit, 0)
        return len(self._order) if found is None else found

    def next_use(self, unit: int) -> int:
        """Return the number of visits until `unit` is used again, in this iteration or in the next one."""
        positions, count = self._at.get(unit), len(self._order)
        if positions is None:
            return 2 * count + 1
        index = bisect_left(positions, self._position)
        return (positions[index] if index < len(positions) else count + positions[0]) - self._position
