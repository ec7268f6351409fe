"""Whether updates speculate: what the config allows, and what the last steps have shown.

[Note: steps that are timed] Beside a backward that a device computes, updates cost what the device's copies and the
threads that feed it lose: whether that gains depends on the machine and the model. So with `auto` some steps are timed
with speculation and some without, taking turns, and the faster way is kept for a while. No bit depends on it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Protocol

from infinity.plan.placement import Overlap
from infinity.plan.policy import worth_speculating
from infinity.state.request import GroupUpdate

logger = logging.getLogger(__name__)

_MEMORY = 0.75  # of what was known before a step, the share that stays known after it
_LEARNING = 10  # steps before any is timed: they learn the order of units, and a device compiles and allocates
_TURN, _TURNS = 3, 4  # steps of one way before the other has its turn, and turns
_GAIN = 0.97  # of the time with speculation: what is not below that is no reason to do without
_KEPT = 500  # steps until they are timed again


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


class Timed:
    """Which way is faster ([Note: steps that are timed]).

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._steps = 0
        self._last: tuple[bool, float] | None = None  # how the step before went, and when it was decided
        self._seconds: dict[bool, float] = {}  # the least between two decisions of the same way
        self._chosen = True

    @property
    def speculates(self) -> bool:
        """Whether the step under way is to."""
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
                "a step takes %.3f s where updates begin during backward, and %.3f s where they begin after it: from "
                "now on they begin %s backward",
                self._seconds[True],
                self._seconds[False],
                "during" if self._chosen else "after",
            )
        elif self._steps == _LEARNING + _TURN * _TURNS + _KEPT:
            self._steps, self._seconds = _LEARNING, {}


class Speculation:
    """What is expected is always the same: no clipping, no skipping, no other hyperparameters or loss scale, no further
    backward pass.

    Args:
        timed: tells which way is faster, with `auto`; None: speculation is.

    Attributes:
        mode: as the plan has it.
        counts: what became of the updates.
    """

    def __init__(self, mode: Overlap, timed: Timed | None = None) -> None:
        self.mode = mode
        self._timed = timed
        self.counts = Counts()
        self._wrong = 0.0
        self._warned: set[str] = set()

    @property
    def worth_it(self) -> bool:
        """Whether to speculate in this step."""
        if not worth_speculating(self.mode, self._wrong):
            return False
        return self.mode != "auto" or self._timed is None or self._timed.speculates

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
        if self._timed is not None and self.mode == "auto":
            self._timed.step_decided()
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
