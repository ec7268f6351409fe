"""Ctrl-C and SIGTERM come between transitions, never in the middle of one.

[Note: where Ctrl-C may come]
Python runs a signal's handler between any two instructions of the main thread, and what it raises leaves half of what
was being done: a lease that nobody knows, some parameters shown and others not. So whatever changes more than one thing
is `whole`: of the signals that come meanwhile the first is delivered when it is over, and no other. Where it waits long
and nothing is half done (Weights.finish_fetch, OffloadedUnit._await), `interruptible` lets them in. Its other waits,
such as those for a commit or for the window of spilled gradients, let none in; nor does a step before its end
(`interrupts_deferred`).

Only the main thread gets signals. Autograd on a GPU runs hooks on another one. What was deferred before a fork is the
parent's; a forked child begins with nothing deferred, and may be stopped as any process.

[Note: whose handler it is]
A handler is wrapped when something whole begins, and stays wrapped: a step has hundreds of transitions, and installing
a handler costs more than most of them. The wrapper calls the handler, at once or when what is whole is over. A handler
that is not a function (SIG_DFL, SIG_IGN, or one not installed from Python) raises nothing and is left alone.

The user may install another handler at any time; the next transition finds that it is not wrapped, and wraps it. It
looks with `_signal.getsignal`, which takes some 15 ns; `signal.getsignal` makes enums and takes a hundred times as
long. A new wrapper calls the handler that it found and no other, so handlers that call the one before them, ours among
them, never go in circles. A wrapper that the user saved and puts back is as good as new.

`give_back`, when the last model is closed or collected, unwraps. Until then code that asks whose the handler is finds
the wrapper: asyncio.run leaves Ctrl-C to KeyboardInterrupt, as it did before Python 3.11; and one that has begun before
the model was offloaded, and ends before the model, leaves its handler behind.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # CPython's own, see the note
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

Handler = Callable[[int, FrameType | None], Any]

_NUMBERS = (int(signal.SIGINT), int(signal.SIGTERM))


class _Wrapper:
    """The handler of a signal, which waits while something whole runs."""

    __slots__ = ("handler",)

    def __init__(self, handler: Handler) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        _signals.came.append((self.handler, number, frame))
        if not _signals.deferred:
            _signals.deliver()


class _Signals:
    """What the main thread defers.

    Invariant: while `deferred`, handlers that are functions are wrapped, unless the user replaced one meanwhile.

    Attributes:
        deferred: something whole runs, and does not wait.
        strict: where it waits, too, no signal is let in.
        main: the only thread that may defer; 0 where Python does not say which one gets signals.
    """

    def __init__(self) -> None:
        self.deferred = self.strict = False
        self.came: list[tuple[Handler, int, FrameType | None]] = []
        self.main = threading.main_thread().ident or 0

    def defer(self) -> None:
        for number in _NUMBERS:
            handler = _signal.getsignal(number)
            if type(handler) is not _Wrapper and callable(handler):
                self._wrap(number, handler)
        self.deferred = True

    def _wrap(self, number: int, handler: Handler) -> None:
        try:
            signal.signal(number, _Wrapper(handler))
        except ValueError:  # embedded, or not the main interpreter: this is not the thread that gets signals
            self.main = 0

    def let_go(self) -> None:
        self.deferred = False
        if self.came:
            self.deliver()

    def deliver(self) -> None:
        """Call the handler of the first signal that came: what a second one raised would hide what the first raised."""
        came, self.came = self.came, []
        for handler, number, frame in came[:1]:
            handler(number, frame)

    def forget(self) -> None:
        """In a forked child, whose main thread is the one that forked."""
        self.deferred = self.strict = False
        self.came = []
        self.main = threading.get_ident()


_signals = _Signals()
os.register_at_fork(after_in_child=_signals.forget)


def _may_defer() -> bool:
    """Whether signals come to this thread, and are not deferred."""
    return not _signals.deferred and threading.get_ident() == _signals.main


def give_back() -> None:
    """Unwrap the handlers that are in place: nothing will be whole for now."""
    if not _may_defer():
        return
    for number in _NUMBERS:
        while isinstance(wrapper := signal.getsignal(number), _Wrapper):
            signal.signal(number, wrapper.handler)


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Run the block to its end and deliver signals that came meanwhile afterwards; waits in it let none in."""
    if threading.get_ident() != _signals.main:
        yield
        return
    deferred, strict = _signals.deferred, _signals.strict
    if not deferred:
        _signals.defer()
    _signals.strict = True
    try:
        yield
    finally:
        _signals.strict = strict
        if not deferred:
            _signals.let_go()


def whole(function: Callable[P, R]) -> Callable[P, R]:
    """A function in which signals come only where it is `interruptible`."""
    signals, get_ident = _signals, threading.get_ident

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if signals.deferred or get_ident() != signals.main:
            return function(*args, **kwargs)
        signals.defer()
        try:
            return function(*args, **kwargs)
        finally:
            signals.let_go()

    return run


@contextmanager
def interruptible() -> Iterator[None]:
    """A wait within something whole: nothing is half done here."""
    if not _signals.deferred or _signals.strict or threading.get_ident() != _signals.main:
        yield
        return
    try:
        _signals.let_go()  # may raise what came before: what follows is whole all the same
        yield
    finally:
        _signals.defer()
