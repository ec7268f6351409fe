"""Ctrl-C and SIGTERM come between transitions, never in the middle of one.

[Note: where Ctrl-C may come]
Python runs a signal's handler between any two instructions of the main thread, and what it raises leaves half of what
was being done: a lease that nobody knows, some parameters shown and others not. So whatever changes more than one thing
is `whole`: signals that come meanwhile are delivered when it is over. It may wait for a device, and the user must not:
where it waits and nothing is half done, `interruptible` lets them in. A step lets none in before its end:
`interrupts_deferred`.

Only the main thread gets signals. Autograd on a GPU runs hooks on another one.
"""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class _Signals:
    """Those that have a handler, held back. Used by the main thread alone.

    Invariant: while `held` is not None its signals have `_note` as their handler.
    """

    def __init__(self) -> None:
        self.held: dict[signal.Signals, Callable[[int, FrameType | None], Any]] | None = None
        self.strict = 0
        self._came: list[tuple[int, FrameType | None]] = []

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.append((number, frame))

    def hold(self) -> None:
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self.held = {number: handler for number, handler in handlers.items() if callable(handler)}
            for number in self.held:
                signal.signal(number, self._note)
        except BaseException:  # of a handler that had not been replaced yet
            self.let_go()
            raise

    def let_go(self) -> None:
        """Put the handlers back, all of them, and deliver the first signal that came."""
        held, self.held = self.held or {}, None
        try:
            for number, handler in held.items():
                signal.signal(number, handler)
        except BaseException:  # of the one that was put back first
            for number, handler in held.items():
                signal.signal(number, handler)
            raise
        finally:
            came, self._came = self._came, []
        for first, frame in came[:1]:
            held[signal.Signals(first)](first, frame)


_signals = _Signals()


def _main() -> bool:
    return threading.get_ident() == threading.main_thread().ident


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Run the block to its end and deliver signals that came meanwhile afterwards; waits in it let none in."""
    if not _main():
        yield
        return
    outermost = _signals.held is None
    if outermost:
        _signals.hold()
    _signals.strict += 1
    try:
        yield
    finally:
        _signals.strict -= 1
        if outermost:
            _signals.let_go()


def whole(function: Callable[P, R]) -> Callable[P, R]:
    """A function in which signals come only where it is `interruptible`."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if _signals.held is not None or not _main():
            return function(*args, **kwargs)
        _signals.hold()
        try:
            return function(*args, **kwargs)
        finally:
            _signals.let_go()

    return run


@contextmanager
def interruptible() -> Iterator[None]:
    """A wait within something whole: nothing is half done here."""
    if not _main() or _signals.held is None or _signals.strict:
        yield
        return
    _signals.let_go()
    try:
        yield
    finally:
        _signals.hold()
