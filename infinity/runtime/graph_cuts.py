"""Cuts in the graph of a forward, where one of its sites begins while no other site is being called.

Reentrant checkpointing (torch.utils.checkpoint, use_reentrant=True) hides its calls in one node, whose inputs are fixed
before any hook of a module inside runs. So the inputs of that node are replaced: the graph is cut before the
checkpoint, and the first site that is entered inside tells which stage has begun.
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

from infinity.runtime.graph_pieces import Tape, replaced


class CuttableModule(NamedTuple):
    """A module that reads weights. It does not keep the module alive.

    Attributes:
        units: indices of the units that the module reads.
        cuts: whether the module has weights that are fetched, so that a stage may begin there.
    """

    module: weakref.ref[nn.Module]
    units: tuple[int, ...]
    cuts: bool


class Forward:
    """The forward of one micro-batch, in one thread, through `watched` sites.

    Attributes:
        stage: the current stage; -1: none has begun.
        tape: the graph that was made so far.
    """

    def __init__(self) -> None:
        self.stage = -1
        self.tape = Tape()
        self._depth = 0  # sites that are being called
        self._in_checkpoint = False  # the graph was cut before a checkpoint, and no site inside was entered yet

    def begin(self, site: int, *, reentrant: bool) -> bool:
        """Enter a site, by its number. Return whether a stage begins there; then `stage` is that stage.

        If a stage begins, wait until it may run. `reentrant` says that the site is the first one in a reentrant
        checkpoint.
        """
        raise NotImplementedError

    def may_begin_in_checkpoint(self) -> bool:
        """Return whether a stage may begin in the reentrant checkpoint that is being called."""
        raise NotImplementedError

    def reads(self, units: Sequence[int]) -> None:
        """Note the units that the entered site reads."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make this the forward of this thread, in this context."""
        before, _here.forward = _running(), self
        try:
            yield
        finally:
            _here.forward = before

    def enter(self, number: int, site: CuttableModule, given: tuple[Any, Any]) -> Any:
        """Enter a site with args and kwargs. Return those to call it with instead, or None to keep them."""
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
        """Enter a reentrant checkpoint. Return the inputs to give it instead."""
        if self._depth or not self.may_begin_in_checkpoint():
            return inputs
        self._in_checkpoint = True
        return replaced(inputs, {}, self.tape.cut(self.stage))[0]


_here = threading.local()


@contextmanager
def watched(sites: Sequence[CuttableModule]) -> Iterator[None]:
    """Tell `running` forwards of every site that they enter and leave, in this context.

    Other threads are not affected.
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


def _running() -> Forward | None:
    forward: Forward | None = getattr(_here, "forward", None)
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
    """Replace CheckpointFunction.apply by ours from the first user of this context to the last."""
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
                del CheckpointFunction.apply  # makes the inherited method visible again


def _apply(function: Any, preserve: Any, *inputs: Any) -> Any:
    forward = _running()
    if forward is not None and torch.is_grad_enabled():
        inputs = tuple(forward.checkpoint(inputs))
    return super(CheckpointFunction, CheckpointFunction).apply(function, preserve, *inputs)
