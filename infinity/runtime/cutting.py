"""Where the graph of a forward is cut: where one of its sites begins, and no other is being called.

Reentrant checkpointing (torch.utils.checkpoint, use_reentrant=True) hides what it calls in one node, whose inputs are
fixed before any hook of a module inside runs. There the inputs of that node are replaced: the graph is cut before the
checkpoint, and the first site that is entered in it tells which stage that was.
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

from infinity.runtime.pieces import Tape, replaced


class Site(NamedTuple):
    """A module that reads weights. Does not keep it alive.

    Attributes:
        units: that it reads, by index.
        cuts: whether it has weights that are fetched, so that a stage may begin there.
    """

    module: weakref.ref[nn.Module]
    units: tuple[int, ...]
    cuts: bool


class Forward:
    """The forward of one micro-batch, in one thread, of `watched` sites.

    Attributes:
        stage: that it is in; -1: none has begun.
        tape: the graph, as far as it is made.
    """

    def __init__(self) -> None:
        self.stage = -1
        self.tape = Tape()
        self._depth = 0  # sites that are being called
        self._in_checkpoint = False  # the graph was cut before a checkpoint, and no site in it was entered

    def begin(self, site: int, *, reentrant: bool) -> bool:
        """A site is entered, by its number. Returns whether a stage begins there, once it may run; `stage` is it then.
        Args: reentrant: the site is the first one in a reentrant checkpoint."""
        raise NotImplementedError

    def may_begin_in_checkpoint(self) -> bool:
        """Whether a stage may begin in the reentrant checkpoint that is called now."""
        raise NotImplementedError

    def reads(self, units: Sequence[int]) -> None:
        """The site that was entered reads these units."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """It runs in this context, in this thread."""
        before, _here.forward = _running(), self
        try:
            yield
        finally:
            _here.forward = before

    def enter(self, number: int, site: Site, given: tuple[Any, Any]) -> Any:
        """A site is entered with args and kwargs. Returns those that it is called with instead, or None."""
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
        """The call of a site ended, well or not."""
        self._depth -= 1

    def checkpoint(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """A reentrant checkpoint is called. Returns what it is given in place of its inputs."""
        if self._depth or not self.may_begin_in_checkpoint():
            return inputs
        self._in_checkpoint = True
        return replaced(inputs, {}, self.tape.cut(self.stage))[0]


_here = threading.local()


@contextmanager
def watched(sites: Sequence[Site]) -> Iterator[None]:
    """In this context forwards that are `running` hear of every site that they enter and leave. Other threads are left
    alone."""
    with ExitStack() as entered:
        for number, site in enumerate(sites):
            module = site.module()
            if module is None:
                continue

            def enter(module: nn.Module, args: Any, kwargs: Any, number: int = number, site: Site = site) -> Any:
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
    """A hook that torch.compile leaves as it is, where it is in use."""
    return torch.compiler.disable(hook) if "torch._dynamo" in sys.modules else hook


_lock = threading.Lock()
_users = 0


@contextmanager
def _checkpoints_heard_of() -> Iterator[None]:
    """Between the first user and the last, CheckpointFunction.apply is ours."""
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
                del CheckpointFunction.apply  # what it inherits is there again


def _apply(function: Any, preserve: Any, *inputs: Any) -> Any:
    forward = _running()
    if forward is not None and torch.is_grad_enabled():
        inputs = tuple(forward.checkpoint(inputs))
    return super(CheckpointFunction, CheckpointFunction).apply(function, preserve, *inputs)
