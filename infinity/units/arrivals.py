"""Counts of the gradients that have arrived in a backward pass.

The counts show when all gradients of a unit have arrived, and which backward pass is the last one before the step. The
number of gradients that a pass is expected to bring is learned from the previous pass. If the expectation was wrong,
the speculative updates that relied on it are undone, so the counts change no result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class GradientArrivals:
    """Counts of the gradient pieces of one unit, by parameter. With tied weights, for example, a parameter gets several
    pieces in one pass.

    Invariant: `_missing` counts the parameters that still expect a piece in this pass.

    Args:
        names: names of the unit's trained parameters.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._expected = dict.fromkeys(names, 1)
        self.begin_pass()

    def begin_pass(self) -> None:
        """Begin a backward pass, after the previous one ended or was interrupted."""
        self._came: dict[str, int] = {}
        self._missing = len(self._expected) - list(self._expected.values()).count(0)

    @property
    def any_came(self) -> bool:
        return bool(self._came)

    @property
    def all_came(self) -> bool:
        """Whether all pieces that the unit expected in this pass have arrived."""
        return self._missing == 0

    def came(self, name: str) -> bool:
        """Count a piece that has arrived.

        Returns:
            Whether this piece was the last piece that the unit expected in this pass.
        """
        count = self._came[name] = self._came.get(name, 0) + 1
        if count != self._expected[name]:
            return False
        self._missing -= 1
        return self.all_came

    def end_pass(self) -> None:
        """End the pass. The next pass is expected to bring the same number of pieces."""
        self._expected = {name: self._came.get(name, 0) for name in self._expected}
        self.begin_pass()


class BackwardPasses:
    """The backward passes of a model before a step.

    Args:
        arrivals: arrivals of every unit.

    Attributes:
        spanning: number of micro-batches whose backward the pass in progress runs through each unit before the next
            unit; 0: an ordinary pass. In a spanning pass, a unit is complete when the gradients of all micro-batches
            have arrived.
    """

    def __init__(self, arrivals: Sequence[GradientArrivals]) -> None:
        self._arrivals = arrivals
        self._passes = 0
        self._passes_learned = 1
        self._accumulating = 0
        self._told = False  # no_sync was used since the last step: a pass outside of no_sync is the last pass
        self._micro_batches = 0  # number of micro-batches in the passes that have ended
        self.spanning = 0

    def begin(self, *, spanning: int = 0) -> None:
        """Begin an outermost backward pass.

        Args:
            spanning: number of micro-batches (see the attribute `spanning`).
        """
        self.spanning = spanning
        for each in self._arrivals:
            each.begin_pass()

    def end(self) -> None:
        """End the outermost backward pass."""
        spanned, self.spanning = self.spanning, 0
        if not any(each.any_came for each in self._arrivals):
            return
        self._passes += 1
        self._micro_batches += spanned or 1
        for each in self._arrivals:
            if spanned:
                each.begin_pass()  # the number of pieces does not predict a pass with one micro-batch
            else:
                each.end_pass()

    def interrupted(self) -> None:
        """End the pass in progress after an exception."""
        self.spanning = 0

    def step_ended(self) -> None:
        """Learn the number of passes before a step: the number of passes before the step that has just ended."""
        self._passes_learned = max(self._passes, 1)
        self.forget()

    def forget(self) -> None:
        """Forget the passes since the last step, because their gradients were dropped."""
        self._passes = self._micro_batches = 0
        self._told = self._accumulating > 0

    def is_last(self, accumulation_steps: int | None) -> bool:
        """Return whether the pass in progress is expected to be the last one before the step.

        Args:
            accumulation_steps: number of passes, or of micro-batches, before a step, if the user has set it; None: as
                many passes as before the last step.
        """
        if self._accumulating:
            return False
        if self._told or self._passes + 1 == (accumulation_steps or self._passes_learned):
            return True
        return self.spanning > 0 and self._micro_batches + self.spanning == accumulation_steps

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Mark each pass in this context as not the last pass before a step."""
        self._accumulating += 1
        self._told = True
        try:
            yield
        finally:
            self._accumulating -= 1
