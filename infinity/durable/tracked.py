"""What is kept of a training loop beside the states: the objects given to infinity.track, and the random numbers.

[Note: where a loop is between two steps]
After optim.step() a loop steps its LR scheduler, counts, evaluates; then it asks its loader for the next batch and runs
the next forward. A resumed run begins at the top of the loop, so what it must find is everything as it was just before
the loader was asked. A tracked loader is watched for that: each time it is asked, all objects and random numbers are
noted, until a forward begins after that. At the end of an epoch it is asked twice, once for the batch it does not have
and once for a new epoch; the second note replaces the first, so schedulers that step once an epoch have stepped.

Where no loader is tracked the random numbers are noted when the step ends and everything else when the next forward
begins; there infinity.commit, called where an iteration ends, says exactly where that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from infinity.durable import rng
from infinity.errors import ConfigError
from infinity.io import document


class Stateful(Protocol):
    """What can be tracked, as torch's schedulers, loaders and modules can."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True)
class Noted:
    """A loop at one moment, in copies that nothing changes.

    Attributes:
        states: of tracked objects, by name; `around`: what the loop does not see, of optimizers and the model.
        is_top: the loop was at its top.
        gradients: some had come that no step has used.
        graphs: there was a forward since the step whose backward may come.
    """

    rng: dict[str, Any]
    states: dict[str, Any]
    around: dict[str, Any]
    is_top: bool
    gradients: bool
    graphs: bool


class Tracking:
    """The objects of one run, by name.

    Args:
        optimizers: gives the hyperparameters of the run's optimizers, which belong to the same moment.
        buffers: gives the model's persistent buffers, which do, too.
    """

    def __init__(self, optimizers: Callable[[], list[dict[str, Any]]], buffers: Callable[[], dict[str, Any]]) -> None:
        self._optimizers = optimizers
        self._buffers = buffers
        self._gradients = False
        self.items: dict[str, Stateful] = {}
        self._between = False  # a step has ended, and no forward has begun for the item that a loader gave since
        self._graphs: list[Callable[[], object]] = []  # of the forwards since the step
        self._gave = False  # an item of the iteration that begins has been taken
        self._step_end: Noted | None = None
        self._top: Noted | None = None

    def take(
        self, objects: Sequence[Stateful], named: Mapping[str, Stateful], give_back: Callable[[str, Stateful], None]
    ) -> None:
        """As infinity.track. Args: give_back: gives an object of this name its state, in a resumed run."""
        added: dict[str, Stateful] = {}
        for item in objects:
            kind = type(item).__name__
            number = sum(kind == name.split("#")[0] for name in [*self.items, *added])
            added[f"{kind}#{number}"] = item
        for name, item in (added | dict(named)).items():
            if name in self.items:
                raise ConfigError(f"infinity.track: there is a '{name}' already")
            _require_stateful(name, item)
            give_back(name, item)
            self.add(name, item)

    def add(self, name: str, item: Stateful) -> None:
        self.items[name] = item
        if is_data(item):
            _watch(item, self._asked, self._given)

    @property
    def has_data(self) -> bool:
        return any(is_data(item) for item in self.items.values())

    @property
    def at_top(self) -> bool:
        """Whether the loop came to its top since the step ended."""
        return self._top is not None

    def step_ended(self) -> None:
        self._between, self._top, self._gave = True, None, False
        self._graphs = []
        self._step_end = self._note([name for name, item in self.items.items() if is_data(item)])

    def step_passed(self) -> None:
        """A step has ended that is not committed, unless the run ends here: the loop's top is noted all the same."""
        self._between, self._top, self._gave = True, None, False
        self._graphs, self._step_end = [], None

    def gradients_came(self) -> None:
        """Some that no step has used."""
        self._gradients = True

    def gradients_gone(self) -> None:
        """A step has used them, or they were dropped."""
        self._gradients = False

    def forward_begins(self, graph: Callable[[], object] = lambda: None) -> None:
        """A forward with a graph begins. Before the loader was asked it is one of those between a step and its
        scheduler's. Args: graph: gives something while its backward may come."""
        if self.at_top or not self.has_data:
            self._between = False
        elif self._between:
            self._graphs.append(graph)

    def note(self) -> Noted:
        """The loop as it is to be resumed.

        Raises:
            ConfigError: an object has no state that can be kept, or its state_dict raised.
        """
        if self._top is not None:
            return self._top
        if self._step_end is None:
            raise AssertionError("nothing was noted")
        late = self._note([name for name in self.items if name not in self._step_end.states])
        return replace(late, rng=self._step_end.rng, states=self._step_end.states | late.states)

    def moved(self) -> bool:
        """Whether something that is tracked has changed since the loader was asked: then the loop's iteration ends
        behind that."""
        if self._top is None:
            return False
        now = {name: state_of(name, item) for name, item in self.items.items() if not is_data(item)}
        return not all(_same(state, self._top.states[name]) for name, state in now.items())

    def iteration_ended(self) -> None:
        """The loop is at its top now."""
        self._top = replace(self._note(list(self.items)), is_top=True)

    def forget(self) -> None:
        """The run is over: its objects are the loop's alone again, and go when the loop lets go of them. A loader with
        workers that has to wait for the garbage collector ends them late, after seconds."""
        self.items.clear()
        self._between, self._step_end, self._top, self._graphs = False, None, None, []

    def evaluated(self) -> None:
        """A forward without a graph: what loaders gave before was for that."""
        self._gave = False

    @property
    def has_item(self) -> bool:
        """Whether the loop came to its top and took an item since."""
        return self.at_top and self._gave

    def _asked(self) -> None:
        if self._between and not self._gave:
            self.iteration_ended()

    def _given(self) -> None:
        self._gave = self._between

    def _note(self, names: list[str]) -> Noted:
        states = {name: state_of(name, self.items[name]) for name in names}
        around = document.copy_of({"optimizers": self._optimizers(), "buffers": self._buffers()})
        return Noted(
            rng.snapshot(),
            states,
            around,
            is_top=False,
            gradients=self._gradients,
            graphs=any(each() is not None for each in self._graphs),
        )


def _same(one: Any, other: Any) -> bool:
    """Of two states, as document.copy_of makes them."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(each, other[key]) for key, each in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and one != one:
        return bool(other != other)
    return bool(one == other)


def state_of(name: str, item: Stateful) -> Any:
    """A copy of an object's state.

    Raises:
        ConfigError: it cannot be kept, or state_dict raised.
    """
    try:
        return document.copy_of(item.state_dict())
    except Exception as error:
        raise ConfigError(f"infinity.track: the state of {name} cannot be kept: {error}") from error


def is_data(item: Any) -> bool:
    """Whether an object gives batches or their indices: it can be iterated and is no module and no container."""
    return isinstance(item, Iterable) and not isinstance(item, nn.Module) and not hasattr(item, "__getitem__")


class _Pass:
    """An iterator that tells when it is asked."""

    def __init__(self, inner: Iterator[Any], asked: Callable[[], None], given: Callable[[], None]) -> None:
        self._inner = inner
        self._asked, self._given = asked, given
        self._first = True

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Any:
        if not self._first:  # what making the iterator drew was drawn before: that moment is noted
            self._asked()
        self._first = False
        item = next(self._inner)
        self._given()
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _watch(item: Any, asked: Callable[[], None], given: Callable[[], None]) -> None:
    """Have `item` tell before it gives something, and when it has. Its class becomes one of the same name that inherits
    from it.

    An object that cannot change its class is not watched.
    """
    base: Any = type(item)

    def begin(self: Any) -> Any:
        asked()
        inner = base.__iter__(self)
        return inner if inner is self else _Pass(inner, asked, given)

    def give(self: Any) -> Any:
        asked()
        found = base.__next__(self)
        given()
        return found

    changed: dict[str, Any] = {"__next__": give} if hasattr(base, "__next__") else {"__iter__": begin}
    watched = type(base.__name__, (base,), changed | {"__module__": base.__module__, "__doc__": base.__doc__})
    try:
        item.__class__ = watched
    except TypeError:
        return


def _require_stateful(name: str, item: Any) -> None:
    if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
        hint = ""
        if type(item).__name__ == "DataLoader":
            hint = " torchdata.stateful_dataloader.StatefulDataLoader takes the same arguments and has both."
        raise ConfigError(
            f"infinity.track: {name} has no state_dict and load_state_dict, so its state cannot be kept.{hint}"
        )
    if not is_data(item):  # asked at the first commit: a loader would start its workers
        state_of(name, item)
