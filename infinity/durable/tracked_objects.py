"""The state of a training loop that a commit keeps in addition to the model's states: the objects given to
infinity.track, and the random numbers.

[Note: where a loop is between two steps]
After optim.step() a loop steps its LR scheduler, counts and evaluates. Then the loop asks its loader for the next batch
and runs the next forward. A resumed run begins at the top of the loop, so the resumed run must restore everything to
the moment just before the loader was asked. Therefore a tracked loader is watched: each time the loop asks for an item,
the states of all objects and the random numbers are recorded, until a forward begins. At the end of an epoch the loop
asks twice: once for a batch that does not exist, and once for the first batch of a new epoch. The second record
replaces the first record, so it includes the step of a scheduler that steps once per epoch.

Where no loader is tracked, the random numbers are recorded when the step ends, and everything else is recorded when the
next forward begins. In that case a call of infinity.commit at the end of an iteration marks the exact place.
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
    """An object that can be tracked. Torch's schedulers and modules and torchdata's loaders have this interface."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True)
class LoopState:
    """The state of a loop at one moment, in copies that do not change.

    Attributes:
        rng: states of the random number generators.
        states: states of the tracked objects, by name.
        around: state that the loop does not track itself: optimizers and the model's buffers.
        is_top: whether the loop was at its top.
        gradients: whether there were gradients that no step had used.
        graphs: whether the backward of a forward since the step might still have been pending.
    """

    rng: dict[str, Any]
    states: dict[str, Any]
    around: dict[str, Any]
    is_top: bool
    gradients: bool
    graphs: bool


class Tracking:
    """The tracked objects of one run, by name.

    Args:
        optimizers: function that returns the records of the run's optimizers at the moment of the call.
        buffers: function that returns the model's persistent buffers at the moment of the call.
    """

    def __init__(self, optimizers: Callable[[], list[dict[str, Any]]], buffers: Callable[[], dict[str, Any]]) -> None:
        self._optimizers = optimizers
        self._buffers = buffers
        self._gradients = False
        self.items: dict[str, Stateful] = {}
        self._between = False  # a step has ended, and no forward has begun for the loader's next item
        self._graphs: list[Callable[[], object]] = []  # graphs of the forwards since the step
        self._gave = False  # the loader has returned the item of the iteration that begins
        self._step_end: LoopState | None = None
        self._top: LoopState | None = None

    def take(
        self, objects: Sequence[Stateful], named: Mapping[str, Stateful], give_back: Callable[[str, Stateful], None]
    ) -> None:
        """Track objects. `objects` and `named` are the arguments of infinity.track.

        `give_back(name, object)` restores the state of an object in a resumed run.
        """
        added: dict[str, Stateful] = {}
        for item in objects:
            kind = type(item).__name__
            number = sum(kind == name.split("#")[0] for name in [*self.items, *added])
            added[f"{kind}#{number}"] = item
        for name, item in (added | dict(named)).items():
            if name in self.items:
                raise ConfigError(f"infinity.track: the name '{name}' is in use already")
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
        """Whether the loop has reached its top since the step ended."""
        return self._top is not None

    def step_ended(self) -> None:
        self._between, self._top, self._gave = True, None, False
        self._graphs = []
        self._step_end = self._note([name for name, item in self.items.items() if is_data(item)])

    def step_passed(self) -> None:
        """Record the end of a step that is not committed.

        The state at the next top of the loop is recorded nevertheless, in case the run ends after this step.
        """
        self._between, self._top, self._gave = True, None, False
        self._graphs, self._step_end = [], None

    def gradients_came(self) -> None:
        """Record that there are gradients that no step has used."""
        self._gradients = True

    def gradients_gone(self) -> None:
        """Record that a step has used the gradients, or that they were dropped."""
        self._gradients = False

    def forward_begins(self, graph: Callable[[], object] = lambda: None) -> None:
        """Record that a forward with a graph begins.

        If the loader was not asked for an item since the step, the forward runs between a step and its scheduler's
        step. `graph` returns an object while the forward's backward may still run, and None afterwards.
        """
        if self.at_top or not self.has_data:
            self._between = False
        elif self._between:
            self._graphs.append(graph)

    def note(self) -> LoopState:
        """Return the state of the loop at the place where it is to be resumed.

        Raises:
            ConfigError: an object has a state that cannot be kept, or its state_dict raised.
        """
        if self._top is not None:
            return self._top
        if self._step_end is None:
            raise AssertionError("nothing was noted")
        late = self._note([name for name in self.items if name not in self._step_end.states])
        return replace(late, rng=self._step_end.rng, states=self._step_end.states | late.states)

    def moved(self) -> bool:
        """Return whether a tracked object has changed since the loader was asked.

        If an object has changed, the iteration of the loop ends later than the moment at which the loader is asked.
        """
        if self._top is None:
            return False
        now = {name: state_of(name, item) for name, item in self.items.items() if not is_data(item)}
        return not all(_same(state, self._top.states[name]) for name, state in now.items())

    def iteration_ended(self) -> None:
        """Record the current state of the loop, which is at its top."""
        self._top = replace(self._note(list(self.items)), is_top=True)

    def forget(self) -> None:
        """Stop tracking, because the run is over. The objects are freed when the loop drops its own references.

        If the objects were kept, a loader would end its worker processes only when the garbage collector runs, which
        can take seconds.
        """
        self.items.clear()
        self._between, self._step_end, self._top, self._graphs = False, None, None, []

    def evaluated(self) -> None:
        """Record a forward without a graph: the last item that the loader returned was for an evaluation."""
        self._gave = False

    @property
    def has_item(self) -> bool:
        """Whether the loop has reached its top and has taken an item from the loader after that."""
        return self.at_top and self._gave

    def _asked(self) -> None:
        if self._between and not self._gave:
            self.iteration_ended()

    def _given(self) -> None:
        self._gave = self._between

    def _note(self, names: list[str]) -> LoopState:
        states = {name: state_of(name, self.items[name]) for name in names}
        around = document.copy_of({"optimizers": self._optimizers(), "buffers": self._buffers()})
        return LoopState(
            rng.snapshot(),
            states,
            around,
            is_top=False,
            gradients=self._gradients,
            graphs=any(each() is not None for each in self._graphs),
        )


def _same(one: Any, other: Any) -> bool:
    """Return whether two states, both copied by document.copy_of, are equal."""
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
    """Return a copy of an object's state.

    Raises:
        ConfigError: the state cannot be kept, or state_dict raised.
    """
    try:
        return document.copy_of(item.state_dict())
    except Exception as error:
        raise ConfigError(f"infinity.track: the state of {name} cannot be kept: {error}") from error


def is_data(item: Any) -> bool:
    """Return whether an object yields batches or their indices: it is iterable, and is neither a module nor a
    container.
    """
    return isinstance(item, Iterable) and not isinstance(item, nn.Module) and not hasattr(item, "__getitem__")


class _Pass:
    """An iterator that reports when it is asked for an item and when it has returned one."""

    def __init__(self, inner: Iterator[Any], asked: Callable[[], None], given: Callable[[], None]) -> None:
        self._inner = inner
        self._asked, self._given = asked, given
        self._first = True

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Any:
        # the first request is recorded by `begin`, before the creation of the iterator draws random numbers
        if not self._first:
            self._asked()
        self._first = False
        item = next(self._inner)
        self._given()
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _watch(item: Any, asked: Callable[[], None], given: Callable[[], None]) -> None:
    """Make `item` call `asked` before it yields an item, and `given` after that.

    The class of `item` is replaced by a subclass of the same name. An object whose class cannot be changed is not
    watched.
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
    if not is_data(item):  # a loader would start its workers now: its state is read at the first commit
        state_of(name, item)
