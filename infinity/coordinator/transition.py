"""What makes a method of the coordinator one that any thread may call."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from infinity.base.interrupt import whole

P = ParamSpec("P")
R = TypeVar("R")


class Locked(Protocol):
    """Attributes: _lock: held by whoever changes anything."""

    _lock: threading.RLock


Owner = TypeVar("Owner", bound=Locked)


def transition(
    method: Callable[Concatenate[Owner, P], R],
) -> Callable[Concatenate[Owner, P], R]:
    """A method that any thread may call, and that Ctrl-C finds not begun or done, but where it is `interruptible`."""

    @functools.wraps(method)
    def run(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return whole(run)
