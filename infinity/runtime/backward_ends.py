"""Beginning and end of a model's backward passes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from infinity.base.interrupt import uninterruptible
from infinity.coordinator.coordinator import Coordinator
from infinity.coordinator.gradient_handle import GradientHandle
from infinity.state.unit import ParameterPlace


class _PassEndCallback:
    """Callback at the end of one of autograd's passes. Autograd keeps it alive while the pass is in progress."""

    def __init__(self, task: int, end: Callable[[_PassEndCallback], None]) -> None:
        self.task = task
        self._end = end

    def __call__(self) -> None:
        self._end(self)


class BackwardEnds:
    """One callback at the end of every backward pass in which a gradient arrived.

    Reentrant checkpointing runs a backward pass inside another backward pass: only the end of the outermost pass ends
    the backward. In the context `spanning`, all passes count as one backward. If a pass raises, autograd deletes
    the callback of this pass without running it, so the weak reference to the callback returns None.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._spanning = False
        # by autograd's number of the pass: passes that are in progress or have raised; the innermost pass is the last
        self._passes: dict[int, weakref.ref[_PassEndCallback]] = {}
        self.taken: list[tuple[nn.Parameter, ParameterPlace, GradientHandle]] = []

    def forget(self) -> None:
        """Forget all passes.

        This is called when a forward begins. No backward is in progress then, so a pass that has not ended was
        interrupted.
        """
        self._passes = {}  # a new dict, because another thread may be reading the old dict
        self._put_back()

    @contextmanager
    def spanning(self, count: int) -> Iterator[None]:
        """Make all of autograd's passes in this context one backward pass of the model, with `count` micro-batches."""
        self._coordinator.begin_backward(spanning=count)
        self._spanning = True
        try:
            yield
        finally:
            self._spanning = False
        self._coordinator.timeline.end_all("backward")
        self._coordinator.end_backward(outermost=True)

    def watch(self) -> None:
        task = torch._C._current_graph_task_id()
        if task == -1 or task in self._passes:  # autograd gives every pass its own number
            return
        under_way = self._under_way()
        if not under_way and not self._spanning:
            self._put_back()
            self._coordinator.begin_backward()
        begun = _PassEndCallback(task, self._end)
        self._know([*under_way, begun])
        torch.autograd.Variable._execution_engine.queue_callback(begun)

    def _under_way(self) -> list[_PassEndCallback]:
        return [each for passing in self._passes.values() if (each := passing()) is not None]

    def _know(self, under_way: list[_PassEndCallback]) -> None:
        self._passes = {each.task: weakref.ref(each) for each in under_way}

    @uninterruptible
    def _end(self, ended: _PassEndCallback) -> None:
        under_way = self._under_way()
        outer = under_way[: under_way.index(ended)] if ended in under_way else under_way
        self._know(outer)
        self._put_back()
        if self._spanning:
            return
        if not outer:
            self._coordinator.timeline.end_all("backward")
        self._coordinator.end_backward(outermost=not outer)

    def _put_back(self) -> None:
        """Restore the gradient handles of parameters to which no gradient was added.

        Hooks remove a handle before autograd adds to `.grad`. torch.autograd.grad runs these hooks but adds nothing,
        and an interrupted backward pass may add nothing either.
        """
        for parameter, place, handle in self.taken:
            if parameter.grad is None and self._coordinator.has_gradient(place):
                parameter.grad = handle
        self.taken.clear()
