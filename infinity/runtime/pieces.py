"""The graph of one micro-batch, cut into pieces whose backward can run one by one.

[Note: cutting a graph]
Where a unit begins, each tensor that it is given and that has a graph is replaced by one of the same memory that has
none below it: `_Cut`. What its backward brings is added up (`_Gradient`), and `_Tail` brings it into the graph above
when that piece is run:

    piece 1 …──▶ x ──▶ _Tail        the root from which piece 1 is run backward
                 ┆ (the same memory)
                 _Cut ──▶ b ──▶ piece 2 …

Neither keeps the memory of x alive. A tensor may be given to several units; then its gradient is the sum of what they
bring, the last unit's first, as autograd adds them, but in fp32. Which piece made a tensor is told by the sequence
number of its node: autograd counts the nodes that a thread makes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

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


class _Gradient:
    """The gradient of a tensor that crosses from one piece to others. (It does not know the tensor's node: a cycle
    through a graph would never be collected.)

    Attributes:
        total: as far as it has come; None: nothing has.
        closed: nothing more may come.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.total: torch.Tensor | None = None
        self.closed = False

    def add(self, gradient: torch.Tensor) -> None:
        """A unit that was given the tensor brings its part. Raises ModelError: what made the tensor was run already."""
        if self.closed:
            raise ModelError(f"a gradient came too late for what made its tensor, {_ADVICE}")
        if self.total is None:
            self.total = gradient
        else:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            self.total = self.total.to(wide) + gradient.to(wide)

    def take(self) -> torch.Tensor:
        total, self.total = self.total, None
        assert total is not None
        return total.to(self._dtype)


class _Cut(torch.autograd.Function):
    """The same values, with nothing below them; what comes back is added to the gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: list[torch.Tensor], gradient: _Gradient) -> torch.Tensor:
        ctx.gradient = gradient
        return tensor[0].detach()  # no view: whoever is given it may write to it

    @staticmethod
    def backward(ctx: Any, *came: Any) -> Any:
        ctx.gradient.add(*came)
        return None, None, None


class _Tail(torch.autograd.Function):
    """A root: its backward is the gradient, which has come by then."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, gradient: _Gradient) -> torch.Tensor:
        ctx.gradient = gradient
        return tensor.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *came: Any) -> Any:
        return ctx.gradient.take(), None


class Piece:
    """What one micro-batch computes from one cut to the next.

    Attributes:
        stage: that it is of (micro_batches.py).
        begins: the number of its first node.
        values: the tails and the gradients of what it makes and others are given.
        loss: that it ends in.
    """

    def __init__(self, stage: int, begins: int) -> None:
        self.stage = stage
        self.begins = begins
        self.values: list[tuple[torch.Tensor, _Gradient]] = []
        self.loss: torch.Tensor | None = None

    @property
    def roots(self) -> list[torch.Tensor]:
        """What it is run backward from, as far as gradients have come."""
        tails = [tail for tail, gradient in self.values if gradient.total is not None]
        return tails if self.loss is None else [*tails, self.loss]

    def backward(self) -> None:
        """Run it backward, once everything that it made has its gradient. It keeps nothing alive afterwards.

        Raises:
            ModelError: it has parts in common with others.
        """
        roots = self.roots
        for _, gradient in self.values:
            gradient.closed = True
        self.values, self.loss = [], None
        try:
            if roots:
                torch.autograd.backward(roots)
        except RuntimeError as error:
            if "backward through the graph a second time" not in str(error):
                raise
            raise ModelError(f"a part of a graph was to be run backward twice, {_ADVICE}") from error


class Tape:
    """The pieces of one micro-batch, in the order in which they are computed, all in one thread."""

    def __init__(self) -> None:
        self._anchor = torch.empty((), requires_grad=True)
        # By the id of the node that made the tensor, which is held so that no other has it.
        self._crossed: dict[tuple[int, int], tuple[Any, _Gradient]] = {}
        self.pieces = [Piece(-1, 0)]

    def cut(self, stage: int) -> Replace:
        """A piece begins here, in a stage. Returns what replaces the tensors that are given to it."""
        self.pieces.append(Piece(stage, next_number()))
        return self._crossing

    def is_of(self, stage: int) -> None:
        """The piece that began last is of another stage than was said."""
        self.pieces[-1].stage = stage

    def _crossing(self, tensor: torch.Tensor) -> torch.Tensor:
        key, node = (id(tensor.grad_fn), tensor.output_nr), tensor.grad_fn
        if key not in self._crossed:
            gradient = _Gradient(tensor.dtype)
            self._crossed[key] = node, gradient
            self.made_by(node).values.append((_Tail.apply(tensor, gradient), gradient))
        crossed: torch.Tensor = _Cut.apply(self._anchor, [tensor], self._crossed[key][1])
        return crossed

    def made_by(self, node: Any) -> Piece:
        """The piece that has made a node, or the first one."""
        return self.pieces[bisect_right(self.pieces, number_of(node), key=lambda piece: piece.begins) - 1]

    def end(self, loss: torch.Tensor) -> None:
        """The micro-batch ends in this loss."""
        piece = self.pieces[-1] if loss.grad_fn is None else self.made_by(loss.grad_fn)
        piece.loss = loss
        self._crossed.clear()

    def waits(self, stage: int) -> bool:
        """Whether the last piece of a stage has something to run."""
        return bool(self.pieces) and self.pieces[-1].stage == stage and bool(self.pieces[-1].roots)

    def backward(self, stage: int) -> None:
        """Run the pieces of a stage backward, which must be the last of those that were not run."""
        while self.pieces and self.pieces[-1].stage == stage:
            self.pieces.pop().backward()

    def edges(self, loss: torch.Tensor) -> Iterator[tuple[Any, Any, bool]]:
        """Every edge of the graph of a loss that was not run, but for those to leaves: the node below, the node above,
        and whether the graph is cut between them."""
        below = {id(gradient): node for node, gradient in self._crossed.values()}
        waiting = [] if loss.grad_fn is None else [loss.grad_fn]
        seen = {id(node): node for node in waiting}
        while waiting:
            upper = waiting.pop()
            is_cut = upper.name() == "_CutBackward"
            lowers = [below[id(upper.gradient)]] if is_cut else [lower for lower, _ in upper.next_functions]  # type: ignore[attr-defined]
            for lower in lowers:
                if lower is None or hasattr(lower, "variable"):
                    continue
                yield lower, upper, is_cut
                if id(lower) not in seen:
                    seen[id(lower)] = lower
                    waiting.append(lower)


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
