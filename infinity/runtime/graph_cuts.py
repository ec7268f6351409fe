"""Cuts in the graph of a forward. The graph is cut where a site (a module that reads weights) is called outside of all
other sites.

Reentrant checkpointing (torch.utils.checkpoint, use_reentrant=True) hides its calls in one node, whose inputs are fixed
before any hook of a module inside runs. The graph is therefore cut before the checkpoint, at the inputs of this node.
The first site that is called inside the checkpoint determines which stage has begun.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from infinity.runtime.graph_pieces import GraphTape, replaced


class CuttableModule(NamedTuple):
    """A site: a module that reads weights. This object does not keep the module alive.

    Attributes:
        units: indices of the units that the module reads.
        cuts: whether a stage may begin with this module: true if any of the module's weights are fetched.
    """

    module: weakref.ref[nn.Module]
    units: tuple[int, ...]
    cuts: bool


class MicroBatchForward:
    """The forward of one micro-batch, in one thread. The hooks that `watched` installs report each call of a site to
    this object.

    Attributes:
        stage: the current stage; -1: no stage has begun.
        tape: the graph that the forward has made so far.
    """

    def __init__(self) -> None:
        self.stage = -1
        self.tape = GraphTape()
        self._depth = 0  # number of sites whose call is in progress
        # whether the graph was cut before a checkpoint in which no site has been called yet
        self._in_checkpoint = False

    def begin(self, site: int, *, reentrant: bool) -> bool:
        """Enter a site, given its number. Return whether a stage begins with the site; if so, set `stage`.

        If a stage begins, this method waits until the stage may run. `reentrant` says whether the site is the first
        site in a reentrant checkpoint.
        """
        raise NotImplementedError

    def may_begin_in_checkpoint(self) -> bool:
        """Return whether a stage may begin in the reentrant checkpoint that is about to run."""
        raise NotImplementedError

    def reads(self, units: Sequence[int]) -> None:
        """Record the units that the entered site reads."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """In this context, use this object as the forward of this thread."""
        before, _here.forward = _running(), self
        try:
            yield
        finally:
            _here.forward = before

    def enter(self, number: int, site: CuttableModule, given: tuple[Any, Any]) -> Any:
        """Enter a site that is called with args and kwargs.

        Return new args and kwargs for the call; None if the call keeps its args and kwargs.
        """
        self._depth += 1
        found = None
        if site.cuts and self._depth == 1:
            in_checkpoint, self._in_checkpoint = self._in_checkpoint, False
            if torch.is_grad_enabled():
                if self.begin(number, reentrant=False):
                    args, kwargs = given
                    found = replaced(args, kwargs, self.tape.cut(self.stage))
            elif in_checkpoint and self.begin(number, reentrant=True):
                self.tape.is_of(self.stage)
        self.reads(site.units)
        return found

    def leave(self) -> None:
        """Leave a site whose call ended, normally or by an exception."""
        self._depth -= 1

    def checkpoint(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Enter a reentrant checkpoint. Return the inputs with which the checkpoint must be called."""
        if self._depth or not self.may_begin_in_checkpoint():
            return inputs
        self._in_checkpoint = True
        return replaced(inputs, {}, self.tape.cut(self.stage))[0]


_here = threading.local()


@contextmanager
def watched(sites: Sequence[CuttableModule]) -> Iterator[None]:
    """In this context, call `enter` and `leave` at every site, for the forward that the thread runs
    (`MicroBatchForward.running`).

    Threads that run no forward in this way are not affected.
    """
    with ExitStack() as entered:
        for number, site in enumerate(sites):
            module = site.module()
            if module is None:
                continue

            def enter(
                module: nn.Module, args: Any, kwargs: Any, number: int = number, site: CuttableModule = site
            ) -> Any:
                forward = _running()
                return None if forward is None else forward.enter(number, site, (args, kwargs))

            entered.enter_context(
                module.register_forward_pre_hook(_not_compiled(enter), prepend=True, with_kwargs=True)
            )
            entered.enter_context(module.register_forward_hook(_not_compiled(_leave), always_call=True))
        entered.enter_context(_checkpoints_heard_of())
        yield


def _running() -> MicroBatchForward | None:
    forward: MicroBatchForward | None = getattr(_here, "forward", None)
    return forward


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    forward = _running()
    if forward is not None:
        forward.leave()


def _not_compiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return the hook, excluded from torch.compile if torch.compile is in use."""
    return torch.compiler.disable(hook) if "torch._dynamo" in sys.modules else hook


_lock = threading.Lock()
_users = 0


@contextmanager
def _checkpoints_heard_of() -> Iterator[None]:
    """Replace CheckpointFunction.apply by `_apply` while at least one thread is in this context."""
    global _users
    with _lock:
        _users += 1
        CheckpointFunction.apply = _apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                del CheckpointFunction.apply  # this makes the inherited method visible again


def _apply(function: Any, preserve: Any, *inputs: Any) -> Any:
    forward = _running()
    if forward is not None and torch.is_grad_enabled():
        inputs = tuple(forward.checkpoint(inputs))
    return super(CheckpointFunction, CheckpointFunction).apply(function, preserve, *inputs)
