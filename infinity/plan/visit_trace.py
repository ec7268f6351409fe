"""The order in which units are used, learned from the last iteration."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import islice


class VisitTrace:
    """The visits of one iteration: predicted at first, then as last seen.

    A visit that the prediction does not have at its position is looked up further on (something was skipped) and then
    from the start (something was repeated). A visit that is nowhere in the prediction leaves the position alone. Every
    visit is recorded, so that a model whose order changes is learned anew within one iteration.
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
        """Return the first position of a unit from `start` on."""
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

        Its next use may be the very next visit: the last block's backward follows its forward, and a visit that repeats
        the one before is not recorded.
        """
        return self._seen[-1] if self._seen else None

    def close(self) -> None:
        """End the iteration. The visits that were seen are the next prediction."""
        if self._seen:
            self._predict(self._seen)
            self._seen = []
        self._position = 0

    def upcoming(self) -> Iterator[int]:
        """Iterate over the next units of this iteration, nearest first. Weights change at its end, where this stops."""
        return islice(self._order, self._position, None)

    def first_use(self, unit: int) -> int:
        """Return the number of visits from the beginning of the next iteration until `unit` is used."""
        found = self._find(unit, 0)
        return len(self._order) if found is None else found

    def next_use(self, unit: int) -> int:
        """Return the number of visits until `unit` is used again, in the next iteration if need be."""
        positions, count = self._at.get(unit), len(self._order)
        if positions is None:
            return 2 * count + 1
        index = bisect_left(positions, self._position)
        return (positions[index] if index < len(positions) else count + positions[0]) - self._position
