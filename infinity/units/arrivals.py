"""Which gradients a backward pass has brought, which units have all of theirs, and whether the pass is the last before
the step.

Nothing here decides what is computed: what is expected is learned from the pass before, and when it was wrong an update
that was speculated is undone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Arrivals:
    """Pieces of gradients of one unit, counted by parameter.

    Invariant: `_missing` counts the parameters that are expected in this pass and have not had all their pieces.

    Args:
        names: of the trained parameters.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._expected = dict.fromkeys(names, 1)
        self.begin_pass()

    def begin_pass(self) -> None:
        """A backward pass begins, after the one before ended or was interrupted."""
        self._came: dict[str, int] = {}
        self._missing = len(self._expected) - list(self._expected.values()).count(0)

    @property
    def any_came(self) -> bool:
        return bool(self._came)

    @property
    def all_came(self) -> bool:
        """Whether no piece is missing that the unit expected in this pass."""
        return self._missing == 0

    def came(self, name: str) -> bool:
        """A piece is there. Whether it was the last one that the unit expected in this pass."""
        count = self._came[name] = self._came.get(name, 0) + 1
        if count != self._expected[name]:
            return False
        self._missing -= 1
        return self.all_came

    def end_pass(self) -> None:
        """The pass is over: the next one is expected to bring as many pieces."""
        self._expected = {name: self._came.get(name, 0) for name in self._expected}
        self.begin_pass()


class Passes:
    """The backward passes of a model before a step.

    Args:
        arrivals: of every unit.

    Attributes:
        spanning: how many micro-batches the pass under way takes through one unit after the other; it is told when a
            unit has the gradients of all of them. 0: an ordinary pass.
    """

    def __init__(self, arrivals: Sequence[Arrivals]) -> None:
        self._arrivals = arrivals
        self._passes = 0
        self._passes_learned = 1
        self._accumulating = 0
        self._told = False  # no_sync was used since the last step: the passes outside of it are the last ones
        self._micro_batches = 0  # of passes that are over
        self.spanning = 0

    def begin(self, *, spanning: int = 0) -> None:
        """An outermost backward pass begins. Args: spanning: as the attribute."""
        self.spanning = spanning
        for each in self._arrivals:
            each.begin_pass()

    def end(self) -> None:
        """The outermost backward pass is over."""
        spanned, self.spanning = self.spanning, 0
        if not any(each.any_came for each in self._arrivals):
            return
        self._passes += 1
        self._micro_batches += spanned or 1
        for each in self._arrivals:
            if spanned:
                each.begin_pass()  # how many pieces came says nothing of a pass with one micro-batch
            else:
                each.end_pass()

    def interrupted(self) -> None:
        """An exception ended the pass under way."""
        self.spanning = 0

    def step_ended(self) -> None:
        """The gradients of the passes so far were used."""
        self._passes_learned = max(self._passes, 1)
        self.forget()

    def forget(self) -> None:
        """The gradients of the passes so far are gone."""
        self._passes = self._micro_batches = 0
        self._told = self._accumulating > 0

    def is_last(self, accumulation_steps: int | None) -> bool:
        """Whether the pass under way is expected to be the last one before the step.

        Args:
            accumulation_steps: passes before a step, or micro-batches, as the user said; None: as many passes as the
                last time.
        """
        if self._accumulating:
            return False
        if self._told or self._passes + 1 == (accumulation_steps or self._passes_learned):
            return True
        return self.spanning > 0 and self._micro_batches + self.spanning == accumulation_steps

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Passes in here are not the last ones before a step."""
        self._accumulating += 1
        self._told = True
        try:
            yield
        finally:
            self._accumulating -= 1
