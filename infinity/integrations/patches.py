"""Replacement of library functions by infinity's for an unchanged script, and restoration of the originals."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from infinity.errors import NotAvailableError
from infinity.integrations.patch_table import TABLE, TESTED, PatchRow

_active: list[str] = []


def active() -> list[str]:
    """Return the names of the functions that are replaced now, and of the modules that are patched when imported."""
    return list(_active)


class Patches:
    """A record of replaced attributes of classes and modules, in the order of their replacement.

    At the end of a `with` block, the originals are restored.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []
        self._waiting: list[_WhenImported] = []
        self._others: list[Callable[[], None]] = []

    def __enter__(self) -> Patches:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def wrap(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        """Make `owner.name(*args)` call `ours(theirs, *args)`, where `theirs` is the original.

        The replacement of a classmethod is a classmethod, and the replacement of a staticmethod is a staticmethod. An
        inherited method is replaced only in `owner`.

        Raises:
            NotAvailableError: the library does not have the function any more.
        """
        place = place_of(owner, name)
        own = name in vars(owner)
        found = vars(owner)[name] if own else getattr(owner, name)
        kind = type(found) if isinstance(found, classmethod | staticmethod) else None
        theirs = found.__func__ if kind is not None else found

        @functools.wraps(theirs)
        def call(*args: Any, **kwargs: Any) -> Any:
            return ours(theirs, *args, **kwargs)

        self._before.append((owner, name, found if own else _INHERITED))
        _active.append(place)
        setattr(owner, name, call if kind is None else kind(call))

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Set the attribute `owner.name`. Raises NotAvailableError if the library lacks the attribute."""
        place = place_of(owner, name)
        self._before.append((owner, name, vars(owner)[name]))
        _active.append(place)
        setattr(owner, name, value)

    def add(self, undo: Callable[[], None]) -> None:
        """Register a function that `undo` calls to revert another change."""
        self._others.append(undo)

    def when_imported(self, name: str, act: Callable[[ModuleType], None]) -> None:
        """Call `act(module)` when the script imports the module, or now if the module is already imported.

        infinity does not import the module itself, because some imports take seconds.
        """
        if name in sys.modules:
            act(sys.modules[name])
            return
        waiting = _WhenImported(name, act)
        self._waiting.append(waiting)
        _active.append(name)
        sys.meta_path.insert(0, waiting)

    def undo(self) -> None:
        """Restore all originals."""
        while self._waiting:
            self._waiting.pop().forget()
        while self._others:
            self._others.pop()()
        while self._before:
            owner, name, before = self._before.pop()
            _active.remove(_place(owner, name))
            if before is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


_INHERITED = object()


def place_of(owner: Any, name: str) -> str:
    """Return the dotted name of a function, which is its key in the table.

    Args:
        owner: a class, a module, or an object of a class.
        name: the attribute's name.

    Raises:
        NotAvailableError: the library does not have the function any more.
    """
    place = _place(owner, name)
    point = TABLE.get(place)
    assert point is not None, f"{place} is replaced, and has no row in infinity/integrations/patch_table.py"
    require_there(owner, name, place, point)
    return place


def require_there(owner: Any, name: str, place: str, point: PatchRow) -> None:
    """Raise NotAvailableError if the owner lacks the attribute.

    The error names the attribute (`place`), and says what the replacement does (`point`).
    """
    # an __init__ that is inherited from object does not count
    every = isinstance(owner, type) and name.startswith("__")
    if not (name in vars(owner) if every else hasattr(owner, name)):
        package = place.partition(".")[0]
        mend = f" Install {package}=={TESTED[package]}." if package in TESTED else ""
        raise NotAvailableError(
            f"{place} does not exist. infinity replaces it: the replacement {point.does}. Without it: "
            f"{point.breaks}.{mend}"
        )


def _place(owner: Any, name: str) -> str:
    if isinstance(owner, ModuleType):
        return f"{owner.__name__}.{name}"
    kind = owner if isinstance(owner, type) else type(owner)
    return f"{kind.__module__}.{kind.__qualname__}.{name}"


class _WhenImported(MetaPathFinder):
    """An import finder that calls a function when one particular module has been imported."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._act = act
        self._looking = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return a spec whose loader executes the module and then calls `act`.

        Some callers of find_spec only check whether the module exists, so the finder remains in sys.meta_path until the
        module is executed.
        """
        if name != self._name or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(self._exec, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec

    def _exec(self, original: Callable[[ModuleType], None], module: ModuleType) -> None:
        self.forget()
        original(module)
        self._act(module)

    def forget(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            _active.remove(self._name)


@contextmanager
def patched(owner: Any, name: str, ours: Callable[..., Any]) -> Iterator[None]:
    """Replace a function in the `with` block. The arguments are the same as for Patches.wrap."""
    with Patches() as patches:
        patches.wrap(owner, name, ours)
        yield
