"""Decorator of coordinator methods that any thread may call."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from infinity.base.interrupt import uninterruptible

P = ParamSpec("P")
R = TypeVar("R")


class Locked(Protocol):
    """Object with a lock.

    Attributes:
        _lock: lock that is held during every change.
    """

    _lock: threading.RLock


Owner = TypeVar("Owner", bound=Locked)


def transition(
    method: Callable[Concatenate[Owner, P], R],
) -> Callable[Concatenate[Owner, P], R]:
    """Make a method callable from any thread, with Ctrl-C deferred except in its `interruptible` parts."""

    @functools.wraps(method)
    def run(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return uninterruptible(run)
