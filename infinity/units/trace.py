"""The order in which units are used, learned from the last iteration, and what it says about the next use of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Trace:
    """One iteration's visits: predicted at first, then as last seen.

    A visit that the prediction does not have at its position is looked up further on (something was skipped) and
    then from the start (something was repeated); one that is nowhere in it leaves the position alone. Either way it
    is recorded, so that a model whose order changes is learned anew within one iteration.
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        self._order = list(prediction)
        self._seen: list[int] = []
        self._position = 0

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(self._order)

    def visit(self, unit: int) -> None:
        if self._seen and self._seen[-1] == unit:
            return
        self._seen.append(unit)
        for start in (self._position, 0):
            try:
                self._position = self._order.index(unit, start) + 1
                return
            except ValueError:
                continue

    def close(self) -> None:
        """End the iteration: what was seen is the next prediction."""
        if self._seen:
            self._order, self._seen = self._seen, []
        self._position = 0

    def upcoming(self) -> Iterator[int]:
        """The units to come in this iteration, nearest first. Never reaches over its end: weights change there."""
        return iter(self._order[self._position :])

    def first_use(self, unit: int) -> int:
        """Visits from the beginning of the next iteration until `unit` is used."""
        return self._order.index(unit) if unit in self._order else len(self._order)

    def next_use(self, unit: int) -> int:
        """Visits from now until `unit` is used again, in the next iteration if need be."""
        for start, distance in ((self._position, 0), (0, len(self._order) - self._position)):
            try:
                return self._order.index(unit, start) - start + distance
            except ValueError:
                continue
        return 2 * len(self._order) + 1
