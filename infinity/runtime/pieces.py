"""The graph of one micro-batch, cut into pieces whose backward can run one by one.

[Note: cutting a graph]
Where a unit begins, each tensor that it is given and that has a graph is replaced by one of the same memory that has
none below it: `_Cut`. What its backward brings is kept in a `Value`, and `_Tail` brings it into the graph above when
that piece is run:

    piece 1 …──▶ x ──▶ _Tail        the root from which piece 1 is run backward
                 ┆ (the same memory)
                 _Cut ──▶ b ──▶ piece 2 …

Neither keeps the memory of x alive. A tensor may be given to several units; then its gradient is the sum of what they
bring, the last unit's first, as autograd adds them, but in fp32. Which piece made a tensor is told by the sequence
number of its node: autograd counts the nodes that a thread makes.

Reentrant checkpointing (torch.utils.checkpoint, use_reentrant=True) hides what it calls in one node, whose inputs are
fixed before any hook of a module inside runs. There the inputs of that node are replaced (`reentrant_calls`).
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from infinity.errors import ModelError

Replace = Callable[[torch.Tensor], torch.Tensor]


def next_number() -> int:
    """The sequence number of the next node that this thread makes."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def number_of(node: Any) -> int:
    """The sequence number of a node of a graph."""
    return int(node._sequence_nr())


_ADVICE = (
    "which must not happen: a micro-batch has another graph than the first one had. Call infinity.backward with "
    "vertical=False."
)


class _Sum:
    """The gradient of a value, as far as it has come.

    Attributes:
        closed: nothing more may come.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._sum: torch.Tensor | None = None
        self.closed = False

    @property
    def came(self) -> bool:
        return self._sum is not None

    def add(self, gradient: torch.Tensor) -> None:
        """A unit that was given the value brings its part. Raises ModelError: what made the value was run already."""
        if self.closed:
            raise ModelError(f"a gradient came too late for what made its tensor, {_ADVICE}")
        if self._sum is None:
            self._sum = gradient
        else:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            self._sum = self._sum.to(wide) + gradient.to(wide)

    def take(self) -> torch.Tensor:
        found, self._sum = self._sum, None
        assert found is not None
        return found.to(self._dtype)


class Value:
    """A tensor that crosses from one piece to others.

    Attributes:
        node: that made it. It is held so that it is told from others by its id.
        gradient: which those who are given it add to. (It does not know the value: a cycle through a graph would never
            be collected.)
        tail: the root from which the piece that made it is run backward.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.node = tensor.grad_fn
        self.gradient = _Sum(tensor.dtype)
        self.tail: torch.Tensor = _Tail.apply(tensor, self.gradient)


class _Cut(torch.autograd.Function):
    """The same values, with nothing below them; what comes back is added to the gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: list[torch.Tensor], gradient: _Sum) -> torch.Tensor:
        ctx.gradient = gradient
        return tensor[0].detach()

    @staticmethod
    def backward(ctx: Any, *came: Any) -> Any:
        ctx.gradient.add(*came)
        return None, None, None


class _Tail(torch.autograd.Function):
    """A root: its backward is the gradient of the value, which has come by then."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, gradient: _Sum) -> torch.Tensor:
        ctx.gradient = gradient
        return tensor.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *came: Any) -> Any:
        return ctx.gradient.take(), None


class Piece:
    """What one micro-batch computes from one cut to the next.

    Args:
        stage: that it is of (micro_batches.py).

    Attributes:
        values: that it makes and others are given.
        loss: that it ends in.
    """

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.values: list[Value] = []
        self.loss: torch.Tensor | None = None

    def backward(self) -> None:
        """Run it backward, once everything that it made has its gradient. It keeps nothing alive afterwards.

        Raises:
            ModelError: it has parts in common with others.
        """
        roots = self._roots()
        for value in self.values:
            value.gradient.closed = True
        self.values, self.loss = [], None
        if not roots:
            return
        try:
            torch.autograd.backward(roots)
        except RuntimeError as error:
            if "backward through the graph a second time" not in str(error):
                raise
            raise ModelError(f"a part of a graph was to be run backward twice, {_ADVICE}") from error

    @property
    def waits(self) -> bool:
        """Whether there is something to run."""
        return bool(self._roots())

    def _roots(self) -> list[torch.Tensor]:
        roots = [value.tail for value in self.values if value.gradient.came]
        return roots if self.loss is None else [*roots, self.loss]


class Tape:
    """The pieces of one micro-batch, in the order in which they are computed, all in one thread."""

    def __init__(self) -> None:
        self._anchor = torch.empty((), requires_grad=True)
        self.pieces = [Piece(-1)]
        self._begins = [0]  # the number of each piece's first node
        self._values: dict[tuple[int, int], Value] = {}

    def cut(self, stage: int) -> Replace:
        """A piece begins here, in a stage. Returns what replaces the tensors that are given to it."""
        self.pieces.append(Piece(stage))
        self._begins.append(next_number())
        return self._crossing

    def is_of(self, stage: int) -> None:
        """The piece that began last is of another stage than was said."""
        self.pieces[-1].stage = stage

    def _crossing(self, tensor: torch.Tensor) -> torch.Tensor:
        key = id(tensor.grad_fn), tensor.output_nr
        value = self._values.get(key)
        if value is None:
            value = self._values[key] = Value(tensor)
            self._made_by(tensor).values.append(value)
        crossed: torch.Tensor = _Cut.apply(self._anchor, [tensor], value.gradient)
        return crossed

    def _made_by(self, tensor: torch.Tensor) -> Piece:
        return self.pieces[bisect_right(self._begins, number_of(tensor.grad_fn)) - 1]

    def end(self, loss: torch.Tensor) -> None:
        """The micro-batch ends in this loss."""
        piece = self.pieces[-1] if loss.grad_fn is None else self._made_by(loss)
        piece.loss = loss
        self._values.clear()

    def waits(self, stage: int) -> bool:
        """Whether the last piece of a stage has something to run."""
        return bool(self.pieces) and self.pieces[-1].stage == stage and self.pieces[-1].waits

    def backward(self, stage: int) -> None:
        """Run the pieces of a stage backward, which must be the last of those that were not run."""
        while self.pieces and self.pieces[-1].stage == stage:
            self.pieces.pop().backward()


def replaced(
    args: Sequence[Any], kwargs: Mapping[str, Any], replace: Replace
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call, with another tensor in place of each that a graph has made, also in tuples. Other containers
    stay as they are: whoever is called may write to them."""
    made: dict[int, torch.Tensor] = {}  # a tensor that is given twice stays one
    found = (_replaced(given, replace, made) for given in args)
    return tuple(found), {name: _replaced(given, replace, made) for name, given in kwargs.items()}


def _replaced(given: Any, replace: Replace, made: dict[int, torch.Tensor]) -> Any:
    """No function in a function: one that calls itself would keep the graph until Python collects cycles."""
    if isinstance(given, torch.Tensor):
        if given.grad_fn is None:
            return given
        if id(given) not in made:
            made[id(given)] = replace(given)
        return made[id(given)]
    if not isinstance(given, tuple):
        return given
    found = [_replaced(inner, replace, made) for inner in given]
    if all(new is old for new, old in zip(found, given, strict=True)):
        return given
    return type(given)(*found) if hasattr(given, "_fields") else type(given)(found)


# -- reentrant checkpointing ------------------------------------------------------------------------------------------

_watching = threading.local()
_lock = threading.Lock()
_users = 0


@contextmanager
def reentrant_calls(give: Callable[[Sequence[Any]], Sequence[Any]]) -> Iterator[None]:
    """While this thread is in this context, inputs of reentrant checkpoints are replaced. Other threads are left alone.

    Args:
        give: what a checkpoint is given in place of its inputs.
    """
    _watching.give = give
    _watch(+1)
    try:
        yield
    finally:
        _watch(-1)
        del _watching.give


def _watch(change: int) -> None:
    """Between the first user and the last, CheckpointFunction.apply is ours."""
    global _users
    with _lock:
        before, _users = _users, _users + change
        if before == 0:
            CheckpointFunction.apply = _apply  # type: ignore[method-assign]
        elif _users == 0:
            del CheckpointFunction.apply  # what it inherits is there again


def _apply(function: Any, preserve: Any, *inputs: Any) -> Any:
    give = getattr(_watching, "give", None)
    if give is not None and torch.is_grad_enabled():
        inputs = tuple(give(inputs))
    return super(CheckpointFunction, CheckpointFunction).apply(function, preserve, *inputs)
