"""Whether updates speculate: what the config allows, and what the last steps have shown. No clock is asked."""

from __future__ import annotations

import logging
from collections.abc import Set
from dataclasses import dataclass
from typing import Protocol

from infinity.plan.placement import Overlap
from infinity.state.request import GroupUpdate

logger = logging.getLogger(__name__)

_MEMORY = 0.75  # of what was known before a step, the share that stays known after it
_WRONG_MAX = 0.3  # a wrong speculation moves the states once for nothing


class Predictable(Protocol):
    """An optimizer that says what its next step will want."""

    @property
    def accumulation_steps(self) -> int | None:
        """Backward passes before a step; None: as many as the last time."""

    @property
    def expected_scale(self) -> float:
        """What the gradients will be multiplied by, unless the step clips."""

    def expected_update(self, unit: int) -> dict[int, GroupUpdate]:
        """What the next step will want of a unit's groups, as far as is known now."""


@dataclass
class Counts:
    """Units' updates since the model was offloaded.

    Attributes:
        early: speculative ones that the step agreed with.
        undone: speculative ones that were undone.
        late: begun when the step was decided.
        clipped: steps, not units, that clipped their gradients or had another loss scale than before, where updates
            may speculate: then none is right.
    """

    early: int = 0
    undone: int = 0
    late: int = 0
    clipped: int = 0


class Speculation:
    """What is expected is always the same: no clipping, no skipping, no other hyperparameters or loss scale, no further
    backward pass.

    Attributes:
        mode: as the plan has it.
        counts: what became of the updates.
    """

    def __init__(self, mode: Overlap) -> None:
        self.mode = mode
        self.counts = Counts()
        self._wrong = 0.0
        self._warned: set[str] = set()

    @property
    def worth_it(self) -> bool:
        """Whether to speculate in this step."""
        if self.mode == "auto":
            return self._wrong <= _WRONG_MAX
        return self.mode == "during_backward"

    def _learn(self, *, wrong: bool) -> None:
        self._wrong = _MEMORY * self._wrong + (1 - _MEMORY) * wrong

    def dropped(self, units: int) -> None:
        """Speculative updates were undone before a step was decided."""
        self.counts.undone += units
        if units:
            self._learn(wrong=True)

    def step_decided(self, right: Set[int], wrong: Set[int], requested: Set[int], *, clipped: bool) -> None:
        """Also where nothing was speculated: what a speculation would have come to.

        Args:
            right, wrong, requested: units whose speculative updates go on, those whose are undone, and those to update.
            clipped: the gradients are not multiplied by what was expected.
        """
        self._learn(wrong=bool(wrong) or clipped)
        self.counts.undone += len(wrong)
        self.counts.early += len(right)
        self.counts.late += len(requested - right)
        self.counts.clipped += clipped and self.mode in ("auto", "during_backward")
        if wrong and not clipped:
            self.warn(
                "the hyperparameters at step() were not those of the backward pass",
                "Change them after step(), as torch's schedulers do, or set overlap: before_forward.",
            )

    def warn(self, cause: str, advice: str) -> None:
        """Say once why a speculative update was undone and which setting avoids it."""
        if cause in self._warned:
            return
        self._warned.add(cause)
        logger.warning(
            "updates that were begun during backward are done again, to the same result: %s. %s", cause, advice
        )
