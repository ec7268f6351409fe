"""The graph of one micro-batch, cut into pieces whose backward can run one by one.

[Note: cutting a graph]
Before a unit is called, the graph is cut at each of the unit's inputs that has a graph. `_GraphCut` replaces the input
by a tensor in the same memory, whose graph begins at the cut. The gradients that arrive for this tensor are added up
(`_PieceGradient`). When the backward of the piece that made the original tensor runs, `_PieceRoot` passes the sum into
the graph of this piece:

    piece 1 …──▶ x ──▶ _PieceRoot        the root from which piece 1 is run backward
                 ┆ (the same memory)
                 _GraphCut ──▶ b ──▶ piece 2 …

Neither `_GraphCut` nor `_PieceRoot` keeps the memory of x alive. If several units use a tensor, the tensor's gradient
is the sum of the units' contributions. The last unit's contribution comes first, as in autograd, but the sum is in
fp32. Autograd numbers the nodes that a thread makes. The sequence number of a tensor's node therefore tells which piece
made the tensor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from infinity.errors import ModelError

Replace = Callable[[torch.Tensor], torch.Tensor]


def next_number() -> int:
    """Return the sequence number that autograd will give to the next node that this thread makes."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def number_of(node: Any) -> int:
    """Return the sequence number of a node of a graph."""
    return int(node._sequence_nr())


_ADVICE = (
    "which must not happen: the graph of a micro-batch differs from that of the first micro-batch. Call "
    "infinity.backward with vertical=False."
)


class _PieceGradient:
    """Gradient of a tensor that one piece makes and other pieces use.

    The object does not refer to the tensor's node: a cycle through a graph would never be collected.

    Attributes:
        total: sum of the gradients so far; None: no gradient has arrived.
        closed: whether the sum is final, so that a further gradient is an error.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.total: torch.Tensor | None = None
        self.closed = False

    def add(self, gradient: torch.Tensor) -> None:
        """Add the contribution of a unit that used the tensor.

        Raises ModelError if the piece that made the tensor has already run backward.
        """
        if self.closed:
            raise ModelError(
                f"a gradient arrived after the backward of the graph piece that made its tensor, {_ADVICE}"
            )
        if self.total is None:
            self.total = gradient
        else:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            self.total = self.total.to(wide) + gradient.to(wide)

    def take(self) -> torch.Tensor:
        total, self.total = self.total, None
        assert total is not None
        return total.to(self._dtype)


class _GraphCut(torch.autograd.Function):
    """Tensor with the same values as the input, without the input's graph.

    Gradients of this tensor are added to the _PieceGradient.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: list[torch.Tensor], gradient: _PieceGradient) -> torch.Tensor:
        ctx.gradient = gradient
        return tensor[0].detach()  # not a view, because the receiver may write to this tensor

    @staticmethod
    def backward(ctx: Any, *came: Any) -> Any:
        ctx.gradient.add(*came)
        return None, None, None


class _PieceRoot(torch.autograd.Function):
    """Root of a piece. The backward of this node returns the sum of the gradients that have arrived."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, gradient: _PieceGradient) -> torch.Tensor:
        ctx.gradient = gradient
        return tensor.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *came: Any) -> Any:
        return ctx.gradient.take(), None


class GraphPiece:
    """Computation of one micro-batch from one cut to the next.

    Attributes:
        stage: stage of the piece (micro_batches.py).
        begins: sequence number of the piece's first node.
        values: for each tensor that this piece makes and other pieces use: its _PieceRoot and its _PieceGradient.
        loss: the loss, if the micro-batch ends in this piece.
    """

    def __init__(self, stage: int, begins: int) -> None:
        self.stage = stage
        self.begins = begins
        self.values: list[tuple[torch.Tensor, _PieceGradient]] = []
        self.loss: torch.Tensor | None = None

    @property
    def roots(self) -> list[torch.Tensor]:
        """Tensors from which the piece is run backward: the loss, and tails whose gradients have arrived."""
        tails = [tail for tail, gradient in self.values if gradient.total is not None]
        return tails if self.loss is None else [*tails, self.loss]

    def backward(self) -> None:
        """Run the piece backward. All gradients of the tensors that the piece made must have arrived.

        Afterwards the piece keeps no tensor alive.

        Raises:
            ModelError: the graph of the piece has parts in common with other pieces.
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
            raise ModelError(f"a backward pass would run a part of a graph twice, {_ADVICE}") from error


class GraphTape:
    """The pieces of one micro-batch, in the order of their computation. One thread computes all of them."""

    def __init__(self) -> None:
        self._anchor = torch.empty((), requires_grad=True)
        # The key is the id of the node that made the tensor, and the number of the node's output. The value refers to
        # the node, so no other node can get this id.
        self._crossed: dict[tuple[int, int], tuple[Any, _PieceGradient]] = {}
        self.pieces = [GraphPiece(-1, 0)]

    def cut(self, stage: int) -> Replace:
        """Begin a piece of a stage. Return the function that replaces the input tensors of the piece."""
        self.pieces.append(GraphPiece(stage, next_number()))
        return self._crossing

    def is_of(self, stage: int) -> None:
        """Change the stage of the last piece, which was not known when the piece began."""
        self.pieces[-1].stage = stage

    def _crossing(self, tensor: torch.Tensor) -> torch.Tensor:
        key, node = (id(tensor.grad_fn), tensor.output_nr), tensor.grad_fn
        if key not in self._crossed:
            gradient = _PieceGradient(tensor.dtype)
            self._crossed[key] = node, gradient
            self.made_by(node).values.append((_PieceRoot.apply(tensor, gradient), gradient))
        crossed: torch.Tensor = _GraphCut.apply(self._anchor, [tensor], self._crossed[key][1])
        return crossed

    def made_by(self, node: Any) -> GraphPiece:
        """Return the piece that made a node. For a node that no piece made, return the first piece."""
        return self.pieces[bisect_right(self.pieces, number_of(node), key=lambda piece: piece.begins) - 1]

    def end(self, loss: torch.Tensor) -> None:
        """End the micro-batch, whose loss is `loss`."""
        piece = self.pieces[-1] if loss.grad_fn is None else self.made_by(loss.grad_fn)
        piece.loss = loss
        self._crossed.clear()

    def waits(self, stage: int) -> bool:
        """Return whether a backward of this stage is due: the last piece that has not run backward belongs to the
        stage, and its gradients have arrived."""
        return bool(self.pieces) and self.pieces[-1].stage == stage and bool(self.pieces[-1].roots)

    def backward(self, stage: int) -> None:
        """Run the pieces of a stage backward. All later pieces must have run."""
        while self.pieces and self.pieces[-1].stage == stage:
            self.pieces.pop().backward()

    def edges(self, loss: torch.Tensor) -> Iterator[tuple[Any, Any, bool]]:
        """Yield every edge of the graph of a loss, except edges to leaves. The loss must not have been run backward.

        An edge consists of the node below (closer to the inputs), the node above, and whether the graph is cut between
        them.
        """
        below = {id(gradient): node for node, gradient in self._crossed.values()}
        waiting = [] if loss.grad_fn is None else [loss.grad_fn]
        seen = {id(node): node for node in waiting}
        while waiting:
            upper = waiting.pop()
            is_cut = upper.name() == f"{_GraphCut.__name__}Backward"
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
    """Return the arguments of a call, with every tensor that has a graph replaced, also inside tuples.

    Other containers stay unchanged, because the called function may write to them.
    """
    made: dict[int, torch.Tensor] = {}  # a tensor that occurs twice is replaced by the same tensor
    found = (_replaced(given, replace, made) for given in args)
    return tuple(found), {name: _replaced(given, replace, made) for name, given in kwargs.items()}


def _replaced(given: Any, replace: Replace, made: dict[int, torch.Tensor]) -> Any:
    """Replace the tensors of one argument.

    A nested function that calls itself would be a reference cycle, and would keep the graph alive until Python collects
    cycles. This is therefore a function of the module.
    """
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
