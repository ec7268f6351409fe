"""All micro-batches through one stage after the other ([Note: the order of micro-batches] in micro_batches.py)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from infinity.coordinator.coordinator import Coordinator
from infinity.runtime.chain import Chain, Recorder, mark
from infinity.runtime.hooks import Scope
from infinity.runtime.lanes import Lane, Surroundings
from infinity.runtime.passes import BackwardEnds
from infinity.runtime.pieces import Tape, reentrant_calls, replaced
from infinity.runtime.random_streams import RandomStreams


class Watch(Protocol):
    """Hears of the sites that forwards enter."""

    def enter(self, site: int, units: Sequence[int], given: Any, *, cuts: bool) -> Any:
        """A site is entered.

        Args:
            site: by its number.
            units: that its module reads, by index.
            given: the arguments of the call.
            cuts: whether it has weights that are fetched, so that a stage may begin there.

        Returns:
            The arguments it is called with instead, or None.
        """

    def leave(self) -> None:
        """The call ended, well or not."""

    def open(self) -> AbstractContextManager[None]:
        """It hears in this context."""


Watched = Callable[[Watch], AbstractContextManager[None]]


class Recording:
    """Watches a forward in ordinary order, in this thread, for a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._depth = 0
        self._in_checkpoint = False  # one that might be cut, and no site of it was entered

    def enter(self, site: int, units: Sequence[int], given: Any, *, cuts: bool) -> Any:
        self._depth += 1
        if not cuts or self._depth > 1:
            self._recorder.entered(site, units, begins=False)
            return None
        if torch.is_grad_enabled():
            self._recorder.cut(site)
            self._recorder.entered(site, units, begins=False)
            args, kwargs = given
            return replaced(args, kwargs, mark)
        self._recorder.entered(site, units, begins=self._in_checkpoint)
        self._in_checkpoint = False
        return None

    def leave(self) -> None:
        self._depth -= 1

    @contextmanager
    def open(self) -> Iterator[None]:
        with reentrant_calls(self._checkpoint):
            yield

    def _checkpoint(self, inputs: Sequence[Any]) -> Sequence[Any]:
        if self._depth:
            return inputs
        self._recorder.cut(None, reentrant=True)
        self._in_checkpoint = True
        return replaced(inputs, {}, mark)[0]


class _Forward:
    """The forward of one micro-batch, in a lane.

    Attributes:
        stage: that it waits for, or runs in.
        depth: sites that are being called.
        checkpoint: a reentrant checkpoint was cut, in which no site was entered yet.
    """

    def __init__(self, run: Callable[[_Forward], torch.Tensor], surroundings: Surroundings) -> None:
        self.lane = Lane(lambda: run(self), surroundings)
        self.tape = Tape()
        self.stage = -1
        self.depth = 0
        self.checkpoint = False

    def wait_for(self, stage: int) -> None:
        self.stage = stage
        self.lane.park()


class Vertical:
    """Micro-batches that go through the stages together. Used once.

    Args:
        streams: of all micro-batches of a call.
        numbers: of these among them.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        scope: Scope,
        ends: BackwardEnds,
        chain: Chain,
        streams: RandomStreams,
        numbers: range,
    ) -> None:
        self._coordinator = coordinator
        self._scope = scope
        self._ends = ends
        self._chain = chain
        self._streams = streams
        self._numbers = numbers
        self._here = threading.local()
        self._kept: list[int] = []
        self._losses: dict[int, torch.Tensor] = {}

    def run(self, loss_fn: Callable[[Any], torch.Tensor], micro_batches: list[Any], watched: Watched) -> list[Any]:
        """Compute the gradients. Returns the losses, detached."""
        device = self._coordinator.resources.device
        surroundings = Surroundings(None if device is None else device.accelerator)

        def forward_of(micro_batch: Any) -> _Forward:
            return _Forward(lambda forward: self._forward(forward, loss_fn, micro_batch), surroundings)

        forwards = [forward_of(micro_batch) for micro_batch in micro_batches]
        del micro_batches
        try:
            self._run(forwards, watched)
        except BaseException:
            self._end(forwards)
            self._coordinator.reset()
            raise
        return [self._losses[index] for index in range(len(forwards))]

    def _forward(self, forward: _Forward, loss_fn: Callable[[Any], torch.Tensor], micro_batch: Any) -> torch.Tensor:
        """In the lane."""
        self._here.forward = forward
        with self._scope.lane(), reentrant_calls(self._checkpoint):
            return loss_fn(micro_batch)

    @staticmethod
    def _end(forwards: Sequence[_Forward]) -> None:
        interrupted = None
        for forward in forwards:
            try:
                forward.lane.end()
            except KeyboardInterrupt as error:
                interrupted = error
        if interrupted is not None:
            raise interrupted

    def _run(self, forwards: Sequence[_Forward], watched: Watched) -> None:
        last = len(self._chain.stages) - 1
        with watched(self), self._scope.lanes():
            for stage in range(-1, last):
                self._through(stage, forwards)
            with self._ends.spanning(len(forwards)):
                self._last(last, forwards)
                for stage in range(last - 1, -2, -1):
                    if any(forward.tape.waits(stage) for forward in forwards):
                        self._keep(stage)
                    for index, forward in enumerate(forwards):
                        self._backward(stage, index, forward, len(forwards))
                    self._give_back()

    def _through(self, stage: int, forwards: Sequence[_Forward]) -> None:
        """All micro-batches go through a stage, to and fro."""
        order = list(enumerate(forwards))
        for index, forward in order if stage % 2 else reversed(order):
            self._resume(stage, index, forward)
        self._give_back()

    def _last(self, stage: int, forwards: Sequence[_Forward]) -> None:
        """The last stage, forward and backward."""
        for index, forward in enumerate(forwards):
            self._resume(stage, index, forward)
            self._backward(stage, index, forward, len(forwards))
        self._give_back()

    def _resume(self, stage: int, index: int, forward: _Forward) -> None:
        if forward.stage != stage or forward.lane.over:  # it has skipped the stage
            return
        with self._streams.of(self._numbers[index]):
            try:
                forward.lane.resume()
            except BaseException:
                forward.lane.end()  # before others draw random numbers
                raise
        if forward.lane.over:
            loss = forward.lane.take_result()
            forward.tape.end(loss)
            self._losses[index] = loss.detach()

    def _backward(self, stage: int, index: int, forward: _Forward, count: int) -> None:
        with self._streams.of(self._numbers[index]):
            forward.tape.backward(stage)
        units = self._chain.units_of(stage)
        complete = [] if index < count - 1 else [unit for unit in units if self._first_stage(unit) == stage]
        self._coordinator.passed(units, complete=complete)

    def _first_stage(self, unit: int) -> int:
        return next(stage for stage in range(-1, len(self._chain.stages)) if unit in self._chain.units_of(stage))

    # -- in the lanes -------------------------------------------------------------------------------------------------

    @contextmanager
    def open(self) -> Iterator[None]:
        """Watch.open: lanes alone are watched."""
        yield

    def enter(self, site: int, units: Sequence[int], given: Any, *, cuts: bool) -> Any:
        """Watch.enter: where a stage begins the micro-batch waits for it."""
        forward: _Forward | None = getattr(self._here, "forward", None)
        if forward is None:
            return None
        forward.depth += 1
        if not cuts or forward.depth > 1:
            return None
        checkpoint, forward.checkpoint = forward.checkpoint, False
        stage = self._chain.after(forward.stage, site)
        if stage is None or not (checkpoint or torch.is_grad_enabled()):
            return None
        forward.wait_for(stage)
        self._keep(stage)
        if checkpoint:
            forward.tape.is_of(stage)
            return None
        args, kwargs = given
        return replaced(args, kwargs, forward.tape.cut(stage))

    def leave(self) -> None:
        """Watch.leave."""
        forward: _Forward | None = getattr(self._here, "forward", None)
        if forward is not None:
            forward.depth -= 1

    def _checkpoint(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """A reentrant checkpoint is called with these: if a stage is expected to begin in it, the graph is cut here."""
        forward: _Forward = self._here.forward
        following = forward.stage + 1
        if forward.depth or following >= len(self._chain.stages) or not self._chain.stages[following].reentrant:
            return inputs
        forward.checkpoint = True
        return replaced(inputs, {}, forward.tape.cut(forward.stage))[0]

    def _keep(self, stage: int) -> None:
        """The one unit whose weights a stage has fetched stays on the device until the last micro-batch has passed."""
        units = [index for index in self._chain.units_of(stage) if index not in self._coordinator.staying]
        if len(units) != 1 or self._kept:
            return
        self._coordinator.acquire(units[0])
        self._kept = units

    def _give_back(self) -> None:
        kept, self._kept = self._kept, []
        for index in kept:
            self._coordinator.release(index)
