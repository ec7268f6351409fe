"""Vertical micro-batches: all micro-batches go through one stage before the next stage begins ([Note: the order of
micro-batches] in micro_batches.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from infinity.base.interrupt import interrupts_deferred
from infinity.runtime.backward_ends import BackwardEnds
from infinity.runtime.graph_cuts import CuttableModule, MicroBatchForward, watched
from infinity.runtime.hooks import RootForward
from infinity.runtime.pausable_calls import PausableCall, TorchThreadState
from infinity.runtime.random_streams import RandomStreams
from infinity.runtime.stage_chain import StageChain


class _PausableForward(MicroBatchForward):
    """The forward of one micro-batch in a lane. The forward waits at the beginning of each stage until it is resumed.

    Attributes:
        loss: the loss that the forward computed; it is detached as soon as the forward has ended.
    """

    loss: torch.Tensor

    def __init__(self, of: VerticalBackward, call: Callable[[], torch.Tensor], surroundings: TorchThreadState) -> None:
        super().__init__()
        self._of = of

        def run() -> None:
            with of.root_forward.lane(), self.running():
                self.loss = call()

        self.lane = PausableCall(run, surroundings)

    def begin(self, site: int, *, reentrant: bool) -> bool:
        stage = self._of.chain.after(self.stage, site)
        if stage is None:
            return False
        self.stage = stage
        self.lane.park()
        self._of.keep(stage)
        return True

    def may_begin_in_checkpoint(self) -> bool:
        following = self.stage + 1
        return following < len(self._of.chain.stages) and self._of.chain.stages[following].reentrant

    def resume(self) -> None:
        try:
            self.lane.resume()
        except BaseException:
            self.lane.end()  # end the lane before other micro-batches draw random numbers
            raise
        if self.lane.over:
            self.tape.end(self.loss)
            self.loss = self.loss.detach()


class VerticalBackward:
    """Micro-batches that go through the stages together. The object is used for one call of `run` only.

    Args:
        streams: random streams of all micro-batches of a call of infinity.backward.
        numbers: positions of these micro-batches among all micro-batches of the call.
    """

    def __init__(
        self, root_forward: RootForward, ends: BackwardEnds, chain: StageChain, streams: RandomStreams, numbers: range
    ) -> None:
        self.root_forward = root_forward
        self.chain = chain
        self._coordinator = root_forward.coordinator
        self._ends = ends
        self._streams = streams
        self._numbers = numbers
        self._kept: list[int] = []

    def run(
        self, loss_fn: Callable[[Any], torch.Tensor], micro_batches: Sequence[Any], sites: Sequence[CuttableModule]
    ) -> list[torch.Tensor]:
        """Compute the gradients, and return the losses, detached."""
        surroundings = TorchThreadState(self._coordinator.accelerator)
        forwards = [_PausableForward(self, partial(loss_fn, each), surroundings) for each in micro_batches]
        try:
            with watched(sites), self.root_forward.lanes():
                self._run(forwards)
        except BaseException:
            with interrupts_deferred():
                for forward in forwards:
                    forward.lane.end()
                self._coordinator.forget_uses()
            raise
        return [forward.loss for forward in forwards]

    def _run(self, forwards: Sequence[_PausableForward]) -> None:
        numbered = list(enumerate(forwards))
        last = len(self.chain.stages) - 1
        for stage in range(-1, last):
            for index, forward in numbered if stage % 2 else reversed(numbered):  # to and fro
                self._resume(stage, index, forward)
            self._give_back()
        with self._ends.spanning(len(forwards)):
            for stage in range(last, -2, -1):
                if any(forward.tape.waits(stage) for forward in forwards):
                    self.keep(stage)
                for index, forward in numbered:
                    # in the last stage this runs the forward; the forwards of all other stages have already run
                    self._resume(stage, index, forward)
                    self._backward(stage, index, forward)
                self._give_back()

    def _resume(self, stage: int, index: int, forward: _PausableForward) -> None:
        if forward.stage != stage or forward.lane.over:  # the micro-batch skips the stage
            return
        with self._streams.of(self._numbers[index]):
            forward.resume()

    def _backward(self, stage: int, index: int, forward: _PausableForward) -> None:
        with self._streams.of(self._numbers[index]):
            forward.tape.backward(stage)
        units = self.chain.units_of(stage)
        is_last = index == len(self._numbers) - 1
        complete = [unit for unit in units if is_last and self._first_stage(unit) == stage]
        self._coordinator.micro_batch_passed(units, complete=complete)

    def _first_stage(self, unit: int) -> int:
        return next(stage for stage in range(-1, len(self.chain.stages)) if unit in self.chain.units_of(stage))

    def keep(self, stage: int) -> None:
        """If only one unit of a stage is fetched, keep this unit on the device until all micro-batches have passed the
        stage."""
        units = [index for index in self.chain.units_of(stage) if index not in self._coordinator.staying]
        if len(units) == 1 and not self._kept:
            self._coordinator.begin_use(units[0])
            self._kept = units

    def _give_back(self) -> None:
        kept, self._kept = self._kept, []
        for index in kept:
            self._coordinator.end_use(index)
