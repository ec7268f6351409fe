"""Deferral of Ctrl-C and SIGTERM: signals are delivered between transitions, never in the middle of a transition.

[Note: where Ctrl-C may come] Python runs a signal handler between any two instructions of the main thread. If the
handler raises, the interrupted work is left half done: for example a lease without an owner, or a unit of which only
some parameters are available. So every function that changes more than one thing is decorated with `uninterruptible`.
If signals arrive while such a function runs, the first signal is delivered when the function ends, and the other
signals are dropped. Where an `uninterruptible` function waits long and nothing is half done (UnitWeights.finish_fetch,
OffloadedUnit._await), `interruptible` allows the delivery of signals. No signal is delivered during other waits of such
a function, such as a wait for a commit or for the window of spilled gradients. During a step, no signal is delivered
before the end of the step (`interrupts_deferred`).

Only the main thread receives signals. Autograd on a GPU runs hooks on another thread. Signals that were deferred before
a fork belong to the parent: a forked child starts without deferred signals, and can be stopped like any process.

[Note: whose handler it is] A handler is wrapped when an `uninterruptible` function begins. It stays wrapped, because a
step has hundreds of transitions, and installing a handler costs more than most transitions. The wrapper calls the
handler at once, or when the `uninterruptible` function ends. A handler that is not a function raises nothing and is not
wrapped (SIG_DFL, SIG_IGN, or a handler that was not installed from Python).

The user may install another handler at any time; the next transition finds that the new handler is not wrapped, and
wraps it. The check uses `_signal.getsignal`, which takes some 15 ns; `signal.getsignal` converts the result to enums
and takes a hundred times as long. A new wrapper calls only the handler that was installed before the wrapper. As a
result, handlers that call their predecessor (which may be a wrapper) never call each other in a cycle. A wrapper that
the user saved and installs again works like a new wrapper.

`give_back` unwraps the handlers when the last model is closed or collected. Until the handlers are unwrapped, code that
asks for the handler gets the wrapper. Therefore asyncio.run leaves Ctrl-C to KeyboardInterrupt, as before Python 3.11.
If asyncio.run begins before the model is offloaded and ends before the model is closed, asyncio's handler stays
installed.
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


class _DeferringSignalHandler:
    """Handler of a signal that defers the wrapped handler while an `uninterruptible` function runs."""

    __slots__ = ("handler",)

    def __init__(self, handler: Handler) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        _signals.came.append((self.handler, number, frame))
        if not _signals.deferred:
            _signals.deliver()


class _DeferredSignals:
    """Deferral state of the main thread.

    Invariant: while `deferred`, handlers that are functions are wrapped, unless the user has replaced a handler since.

    Attributes:
        deferred: whether an `uninterruptible` function runs and is not in an interruptible wait.
        strict: whether signals are deferred during the function's waits, too.
        came: handlers to call, with their arguments, in the order in which the signals arrived.
        main: id of the only thread that may defer; 0 if Python does not say which thread gets signals.
    """

    def __init__(self) -> None:
        self.deferred = self.strict = False
        self.came: list[tuple[Handler, int, FrameType | None]] = []
        self.main = threading.main_thread().ident or 0

    def defer(self) -> None:
        for number in _NUMBERS:
            handler = _signal.getsignal(number)
            if type(handler) is not _DeferringSignalHandler and callable(handler):
                self._wrap(number, handler)
        self.deferred = True

    def _wrap(self, number: int, handler: Handler) -> None:
        try:
            signal.signal(number, _DeferringSignalHandler(handler))
        except ValueError:  # Python is embedded, or this is not the main interpreter: this thread does not get signals
            self.main = 0

    def let_go(self) -> None:
        self.deferred = False
        if self.came:
            self.deliver()

    def deliver(self) -> None:
        """Call the handler of the first signal only: an exception of a second handler would hide the first
        exception."""
        came, self.came = self.came, []
        for handler, number, frame in came[:1]:
            handler(number, frame)

    def forget(self) -> None:
        """Reset the state in a forked child, whose main thread is the thread that forked."""
        self.deferred = self.strict = False
        self.came = []
        self.main = threading.get_ident()


_signals = _DeferredSignals()
os.register_at_fork(after_in_child=_signals.forget)


def _may_defer() -> bool:
    """Return whether this thread receives signals and signals are not deferred."""
    return not _signals.deferred and threading.get_ident() == _signals.main


def give_back() -> None:
    """Unwrap the installed handlers, because no model is left that needs wrapped handlers."""
    if not _may_defer():
        return
    for number in _NUMBERS:
        while isinstance(wrapper := signal.getsignal(number), _DeferringSignalHandler):
            signal.signal(number, wrapper.handler)


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer signals during the block, its waits included, and deliver them after the block."""
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


def uninterruptible(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that signals are delivered only at its end and in `interruptible` waits."""
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
    """Deliver signals during a wait within an `uninterruptible` function. Nothing may be half done at this point."""
    if not _signals.deferred or _signals.strict or threading.get_ident() != _signals.main:
        yield
        return
    try:
        _signals.let_go()  # may raise for a deferred signal; `finally` defers again in any case
        yield
    finally:
        _signals.defer()
