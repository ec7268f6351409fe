"""The order in which units are used, learned from the last iteration."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice


class VisitTrace:
    """The visits of one iteration, and a prediction of these visits.

    The first prediction is the order that the constructor gets. Later predictions are the visits of the last iteration.
    The trace has a position in the prediction. If a visit differs from the prediction, the trace looks for the unit
    after the position, in case visits were skipped. If the unit is not there, the trace looks for it from the start, in
    case visits were repeated. A visit of a unit that is not in the prediction leaves the position unchanged. Every
    visit is recorded, so that a changed order is learned within one iteration.

    Experts are used only if a token is routed to them, which is known when their layer is reached: `expect` tells the
    next visits then. Before, a visit of an expert is predicted only if the last iteration visited all experts.

    Args:
        prediction: the order of the first iteration.
        routed: units that are experts.
    """

    def __init__(self, prediction: Sequence[int], routed: Collection[int] = ()) -> None:
        self._seen: list[int] = []
        self._routed = frozenset(routed)
        self._uncertain = self._routed
        self._expected: list[int] = []
        self._decided: Collection[int] = ()
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

    def expect(self, units: Iterable[int], among: Collection[int]) -> None:
        """Expect visits of these units next, and until the next call none of the other units in `among`."""
        self._expected, self._decided = list(units), frozenset(among)

    def visit(self, unit: int) -> None:
        if unit in self._expected:
            del self._expected[: self._expected.index(unit) + 1]
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
            self._uncertain = frozenset() if self._routed <= self._at.keys() else self._routed
            self._seen = []
        self._position = 0
        self._expected, self._decided = [], ()

    def upcoming(self) -> Iterator[int]:
        """Iterate over the next units of this iteration, the nearest first.

        The iterator stops at the end of the iteration, because the weights change there, and at experts of which it is
        not known yet which are used.
        """
        yield from self._expected
        decided = self._decided
        for unit in islice(self._order, self._position, None):
            if unit in decided:
                continue
            if unit in self._uncertain:  # units behind these experts would be evicted again to make room for experts
                return
            if unit not in self._routed:
                decided = ()  # experts behind this unit belong to another layer, or to the backward
            yield unit

    def first_use(self, unit: int) -> int:
        """Return the number of visits from the beginning of the next iteration until `unit` is used."""
        found = self._find(unit, 0)
        return len(self._order) if found is None else found

    def next_use(self, unit: int) -> int:
        """Return the number of visits until `unit` is used again, in this iteration or in the next one."""
        if unit in self._expected:
            return self._expected.index(unit)
        positions, count = self._at.get(unit), len(self._order)
        if positions is None:
            return 2 * count + 1
        index = bisect_left(positions, self._position)
        return (positions[index] if index < len(positions) else count + positions[0]) - self._position
