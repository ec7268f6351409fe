"""Replacing functions of libraries, so that an unchanged script meets ours, and putting theirs back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Patches:
    """Replaced attributes of classes and modules, in the order they were replaced."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def wrap(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        """Let `owner.name(*args)` be `ours(theirs, *args)`, where `theirs` is what it was. What a class inherits, and
        classmethods and staticmethods, stay what they are for callers."""
        own = name in vars(owner)
        found = vars(owner)[name] if own else getattr(owner, name)
        kind = type(found) if isinstance(found, classmethod | staticmethod) else None
        theirs = found.__func__ if kind is not None else found

        @functools.wraps(theirs)
        def call(*args: Any, **kwargs: Any) -> Any:
            return ours(theirs, *args, **kwargs)

        self._before.append((owner, name, found if own else _INHERITED))
        setattr(owner, name, call if kind is None else kind(call))

    def undo(self) -> None:
        """Put back what was there."""
        while self._before:
            owner, name, before = self._before.pop()
            if before is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


_INHERITED = object()


@contextmanager
def patched(owner: Any, name: str, ours: Callable[..., Any]) -> Iterator[None]:
    """`Patches.wrap` in a context."""
    patches = Patches()
    patches.wrap(owner, name, ours)
    try:
        yield
    finally:
        patches.undo()
