"""The state of a training loop, which a commit keeps in addition to the model's states: the objects that were passed to
infinity.track, and the states of the random number generators.

[Note: where a loop is between two steps]
After optim.step() a loop calls the step of its LR scheduler, counts and evaluates. Then the loop asks its loader for
the next batch and runs the next forward. A resumed run begins at the top of the loop. It must therefore restore all
states to the moment just before the loop asks the loader. For this purpose a tracked loader is watched: each time the
loop asks for an item, the states of all objects and of the random number generators are recorded, until a forward
begins. At the end of an epoch the loop asks twice: once for a batch that does not exist, and once for the first batch
of the next epoch. The second record replaces the first one, so it includes the step of a scheduler that is called once
per epoch.

If no loader is tracked, the states of the random number generators are recorded when the step ends, and all other
states when the next forward begins. To record all states at the same moment, a loop can call infinity.commit at the end
of an iteration.
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
    """An object that can be tracked. torch's schedulers and modules, and torchdata's loaders, have this interface."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True)
class LoopState:
    """Copy of the state of a loop at one moment.

    Attributes:
        rng: states of the random number generators.
        states: states of the tracked objects, by name.
        around: state that is recorded even if the loop does not track it: optimizers and the model's buffers.
        is_top: whether the loop was at its top.
        gradients: whether there were gradients that no step had used.
        graphs: whether the backward of a forward after the step may still come.
    """

    rng: dict[str, Any]
    states: dict[str, Any]
    around: dict[str, Any]
    is_top: bool
    gradients: bool
    graphs: bool


class TrackedObjects:
    """The tracked objects of one run, by name.

    Args:
        optimizers: function that returns the present records of the run's optimizers.
        buffers: function that returns the present persistent buffers of the model.
    """

    def __init__(self, optimizers: Callable[[], list[dict[str, Any]]], buffers: Callable[[], dict[str, Any]]) -> None:
        self._optimizers = optimizers
        self._buffers = buffers
        self._gradients = False
        self.items: dict[str, Stateful] = {}
        self._between = False  # a step has ended, and no forward has begun for the next item of the loader
        self._graphs: list[Callable[[], object]] = []  # graphs of the forwards since the step
        self._gave = False  # the loader has returned the item for the iteration that begins
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
        """Whether the loop has reached its top after the end of the step."""
        return self._top is not None

    def step_ended(self) -> None:
        self._between, self._top, self._gave = True, None, False
        self._graphs = []
        self._step_end = self._note([name for name, item in self.items.items() if is_data(item)])

    def step_passed(self) -> None:
        """Record the end of a step that is not committed.

        The state is still recorded when the loop next reaches its top, because the run may end after this step.
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

        If the loop has not asked its loader for an item since the step, the forward runs between a step and its
        scheduler's step. `graph` returns an object as long as the backward of the forward may still run, and None
        afterwards.
        """
        if self.at_top or not self.has_data:
            self._between = False
        elif self._between:
            self._graphs.append(graph)

    def note(self) -> LoopState:
        """Return the state of the loop at the place where a resumed run will continue.

        Raises:
            ConfigError: the state of an object cannot be kept, or its state_dict raised an exception.
        """
        if self._top is not None:
            return self._top
        if self._step_end is None:
            raise AssertionError("nothing was noted")
        late = self._note([name for name in self.items if name not in self._step_end.states])
        return replace(late, rng=self._step_end.rng, states=self._step_end.states | late.states)

    def moved(self) -> bool:
        """Return whether a tracked object has changed after the loop asked its loader.

        If an object has changed, the iteration of the loop ends after the moment at which the loop asks its loader.
        """
        if self._top is None:
            return False
        now = {name: state_of(name, item) for name, item in self.items.items() if not is_data(item)}
        return not all(_same(state, self._top.states[name]) for name, state in now.items())

    def iteration_ended(self) -> None:
        """Record the current state of the loop, which is at its top."""
        self._top = replace(self._note(list(self.items)), is_top=True)

    def forget(self) -> None:
        """Stop tracking, because the run has ended. The objects are freed when the loop drops its own references.

        With a reference from here, a loader would end its worker processes only when the garbage collector runs, which
        can take seconds.
        """
        self.items.clear()
        self._between, self._step_end, self._top, self._graphs = False, None, None, []

    def evaluated(self) -> None:
        """Record a forward without a graph, which means that the last item from the loader was for an evaluation."""
        self._gave = False

    @property
    def has_item(self) -> bool:
        """Whether the loop has reached its top, and has got an item from the loader after that."""
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
    """Return whether two states are equal. Both must be results of document.copy_of."""
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
        ConfigError: the state cannot be kept, or state_dict raised an exception.
    """
    try:
        return document.copy_of(item.state_dict())
    except Exception as error:
        raise ConfigError(f"infinity.track: the state of {name} cannot be kept: {error}") from error


def is_data(item: Any) -> bool:
    """Return whether an object is a loader or a sampler: it is iterable, and is neither a module nor a container."""
    return isinstance(item, Iterable) and not isinstance(item, nn.Module) and not hasattr(item, "__getitem__")


class _TrackedIterator:
    """An iterator that reports each request for an item, and each item that it has returned."""

    def __init__(self, inner: Iterator[Any], asked: Callable[[], None], given: Callable[[], None]) -> None:
        self._inner = inner
        self._asked, self._given = asked, given
        self._first = True

    def __iter__(self) -> _TrackedIterator:
        return self

    def __next__(self) -> Any:
        # `begin` records the first request, before the creation of the iterator draws random numbers
        if not self._first:
            self._asked()
        self._first = False
        item = next(self._inner)
        self._given()
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _watch(item: Any, asked: Callable[[], None], given: Callable[[], None]) -> None:
    """Make the iterable `item` call `asked` before it returns an element, and `given` after it has returned the
    element.

    The class of `item` is replaced by a subclass of the same name. An object whose class cannot be changed is not
    watched.
    """
    base: Any = type(item)

    def begin(self: Any) -> Any:
        asked()
        inner = base.__iter__(self)
        return inner if inner is self else _TrackedIterator(inner, asked, given)

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
    if not is_data(item):  # not now for a loader, which would start its workers
        state_of(name, item)
