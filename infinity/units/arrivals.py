"""Which gradients a backward pass has brought, which units have all of theirs, and whether the pass is the last before
the step.

Nothing here decides what is computed: what is expected is learned from the pass before, and when it was wrong an update
that was started early is undone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from infinity.state.unit import Place, Unit


class Arrivals:
    """Pieces of gradients, counted by parameter. Invariant: `_missing[u]` counts the parameters of unit u that are
    expected in this pass and have not had all their pieces."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._names = {
            unit.index: [spec.name for group in unit.trainable_groups for spec in group.specs] for unit in units
        }
        self._expected = {name: 1 for names in self._names.values() for name in names}
        self._passes = 0
        self._passes_learned = 1
        self._accumulating = 0
        self._told = False  # no_sync was used since the last step: the passes outside of it are the last ones
        self._began = False
        self.begin_pass()

    def begin_pass(self) -> None:
        """A backward pass begins, after the one before ended or was interrupted."""
        self._came: dict[str, int] = {}
        self._missing = {index: sum(self._expected[name] > 0 for name in names) for index, names in self._names.items()}

    def came(self, place: Place) -> bool:
        """A piece is there. Whether it was the last one that its unit expected in this pass."""
        name, index = place.spec.name, place.unit.index
        self._came[name] = self._came.get(name, 0) + 1
        if self._came[name] != self._expected[name]:
            return False
        self._missing[index] -= 1
        return self._missing[index] == 0

    def end_pass(self) -> None:
        """The outermost backward pass is over: what came is what the next one is expected to bring."""
        if not self._came:
            return
        self._passes += 1
        self._expected = {name: self._came.get(name, 0) for name in self._expected}
        self.begin_pass()

    def step_ended(self) -> None:
        """The gradients of the passes so far were used."""
        self._passes_learned = max(self._passes, 1)
        self.forget()

    def forget(self) -> None:
        """The gradients of the passes so far are gone."""
        self._passes, self._told = 0, self._accumulating > 0

    def last_pass(self, accumulation_steps: int | None) -> bool:
        """Whether the pass under way is believed to be the last one before the step.

        Args:
            accumulation_steps: passes before a step, as the user said; None: as many as the last time.
        """
        if self._accumulating:
            return False
        return self._told or self._passes + 1 == (accumulation_steps or self._passes_learned)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Passes in here are not the last ones before a step."""
        self._accumulating += 1
        self._told = True
        try:
            yield
        finally:
            self._accumulating -= 1
