"""Handling of forked children (DataLoader workers): infinity refuses to run in them, and inherited locks are closed.

The engine's threads and the arena's pages do not exist in a forked child. File descriptors do exist in the child: a
child that kept the descriptor of a lock would keep the swap directory locked after the death of the parent.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Protocol

from infinity.errors import ForkError


class _ClosesInChild(Protocol):
    def close_in_child(self) -> None: ...


_used = False
_in_child = False  # whether this is a forked child of a process that had used infinity
_holders: weakref.WeakSet[_ClosesInChild] = weakref.WeakSet()


def close_in_children(holder: _ClosesInChild) -> None:
    """Make every forked child call `holder.close_in_child()`."""
    use()
    _holders.add(holder)


def use() -> None:
    """Record that this process uses infinity: children that are forked later must not use infinity."""
    global _used
    _used = True


def in_this_process(function: Callable[[], object]) -> Callable[[], None]:
    """Wrap a function so that it does nothing in forked children.

    A finalizer would run once more in each child, but the resource that it frees belongs to the parent.
    """
    process = os.getpid()

    def call() -> None:
        if os.getpid() == process:
            function()

    return call


def in_forked_child() -> bool:
    return _in_child


def refuse_in_forked_child() -> None:
    """Raise ForkError in a process that was forked after its parent had imported and used infinity."""
    if _in_child:
        raise ForkError(
            "an offloaded model cannot be used in a forked child process (a DataLoader worker?): its threads and "
            "pinned memory exist in the parent only. Keep the model out of the worker, or start workers with 'spawn'."
        )


def _after_fork() -> None:
    global _in_child
    _in_child = _in_child or _used
    for holder in list(_holders):
        holder.close_in_child()


os.register_at_fork(after_in_child=_after_fork)
