"""Choice whether updates speculate. The choice depends on the config and on the results of the last steps.

[Note: steps that are timed] Updates that run while a device computes the backward slow down the device's copies and the
threads that queue the device's work. Whether speculation still gains time depends on the machine and the model. With
`overlap: auto`, some steps with speculation and some steps without are therefore timed alternately, and the faster way
is used for a number of steps. Both ways give the same bits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Protocol

from infinity.plan.placement import Overlap
from infinity.plan.policy import worth_speculating
from infinity.state.update_request import GroupUpdate

logger = logging.getLogger(__name__)

_MEMORY = 0.75  # weight of the old average in the running average of wrong steps
_LEARNING = 10  # first steps, which are not timed: the order of units is learned, and a device compiles and allocates
_TURN, _TURNS = 3, 4  # steps in a row with the same choice, and number of such rows
_GAIN = 0.97  # updates stop speculating only if a step then takes less than this share of the time
_KEPT = 500  # steps until the two ways are timed again


class StepPredictor(Protocol):
    """Optimizer that predicts its next step."""

    @property
    def accumulation_steps(self) -> int | None:
        """Number of backward passes before a step; None: as many as before the last step."""

    @property
    def expected_scale(self) -> float:
        """Factor by which the step multiplies the gradients if it does not clip them."""

    def expected_update(self, unit: int) -> dict[int, GroupUpdate]:
        """Return the updates of a unit's groups that the next step is expected to request, by group index."""


@dataclass
class UpdateCounts:
    """Numbers of unit updates since the model was offloaded.

    Attributes:
        early: speculative updates that were the same as the step's updates.
        undone: speculative updates that were undone.
        late: updates that began when the step was decided.
        clipped: number of steps (not of unit updates) that clipped their gradients or changed the loss scale while
            updates were allowed to speculate. Every speculative update of such a step is wrong.
    """

    early: int = 0
    undone: int = 0
    late: int = 0
    clipped: int = 0


class TimedSpeculationChoice:
    """Choice of the faster way, with or without speculation ([Note: steps that are timed]).

    Args:
        clock: function that returns the present time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._steps = 0
        self._last: tuple[bool, float] | None = None  # step before: whether it speculated, and its time
        self._seconds: dict[bool, float] = {}  # shortest time of a step, with and without speculation
        self._chosen = True

    @property
    def speculates(self) -> bool:
        """Whether the updates of the step in progress should speculate."""
        timed = self._steps - _LEARNING
        if 0 <= timed < _TURN * _TURNS:
            return timed // _TURN % 2 == 0
        return self._chosen

    def step_decided(self) -> None:
        way, now = self.speculates, self._clock()
        if self._last is not None and self._last[0] == way and self._steps >= _LEARNING:
            self._seconds[way] = min(self._seconds.get(way, float("inf")), now - self._last[1])
        self._last = way, now
        self._steps += 1
        if self._steps == _LEARNING + _TURN * _TURNS:
            self._chosen = not self._seconds[False] < _GAIN * self._seconds[True]
            logger.info(
                "a step takes %.3f s if updates begin during backward, and %.3f s if they begin after it: from "
                "now on they begin %s backward",
                self._seconds[True],
                self._seconds[False],
                "during" if self._chosen else "after",
            )
        elif self._steps == _LEARNING + _TURN * _TURNS + _KEPT:
            self._steps, self._seconds = _LEARNING, {}


class SpeculationChoice:
    """Choice whether updates speculate, learned from the steps so far.

    A speculative update always expects that the step does not clip and is not skipped, that hyperparameters and loss
    scale do not change, and that no further backward pass follows.

    Args:
        mode: overlap mode of the plan.
        timed: choice of the faster way in mode `auto`; None: speculation is assumed to be faster.

    Attributes:
        mode: overlap mode of the plan.
        counts: counts of the updates by outcome.
    """

    def __init__(self, mode: Overlap, timed: TimedSpeculationChoice | None = None) -> None:
        self.mode = mode
        self._timed = timed
        self.counts = UpdateCounts()
        self._wrong = 0.0
        self._warned: set[str] = set()

    @property
    def worth_it(self) -> bool:
        """Whether the updates of this step should speculate."""
        if not worth_speculating(self.mode, self._wrong):
            return False
        return self.mode != "auto" or self._timed is None or self._timed.speculates

    def _learn(self, *, wrong: bool) -> None:
        self._wrong = _MEMORY * self._wrong + (1 - _MEMORY) * wrong

    def dropped(self, units: int) -> None:
        """Count speculative updates that were undone before a step was decided."""
        self.counts.undone += units
        if units:
            self._learn(wrong=True)

    def step_decided(self, right: Set[int], wrong: Set[int], requested: Set[int], *, clipped: bool) -> None:
        """Learn from a decided step whether speculative updates were right, or would have been right.

        Args:
            right: units whose speculative updates continue.
            wrong: units whose speculative updates are undone.
            requested: units to update.
            clipped: whether the step multiplies the gradients by another factor than expected.
        """
        self._learn(wrong=bool(wrong) or clipped)
        if self._timed is not None and self.mode == "auto":
            self._timed.step_decided()
        self.counts.undone += len(wrong)
        self.counts.early += len(right)
        self.counts.late += len(requested - right)
        self.counts.clipped += clipped and self.mode in ("auto", "during_backward")
        if wrong and not clipped:
            self.warn(
                "the hyperparameters changed between the backward pass and step()",
                "Change them after step(), as torch's schedulers do, or set overlap: before_forward.",
            )

    def warn(self, cause: str, advice: str) -> None:
        """Warn once: say why a speculative update was undone, and which setting avoids this."""
        if cause in self._warned:
            return
        self._warned.add(cause)
        logger.warning("updates that began during backward are repeated, with the same result: %s. %s", cause, advice)
