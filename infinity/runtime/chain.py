"""Whether the units of a model form a chain, learned from one forward in ordinary order.

[Note: what a chain is]
All micro-batches can go through one unit after the other where nothing but what a unit is given comes from what ran
before it. So where a unit begins the graph can be cut, if no edge goes past the cut. While the forward is recorded,
each tensor that a unit is given passes a `_Mark`, a node that changes nothing: an edge from there is one that the cut
replaces. Any other edge between two pieces goes past all cuts between them, and they are none.

What remains are the stages: from one cut to the next. A stage may have several units, as where an image is put amid
embedded words. Where a loss has a part for each router of a mixture of experts, edges go past all units and nothing
remains.

What else couples micro-batches: a buffer that the forward changes, as the means of BatchNorm; an attribute that it sets
on a module; a setting of torch that holds for a part of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from infinity.runtime.pieces import next_number, number_of
from infinity.runtime.saved import Kept


@dataclass(frozen=True)
class Stage:
    """What runs from one cut to the next.

    Attributes:
        site: it begins where this one is entered (by its number).
        reentrant: that is in a reentrant checkpoint.
        units: that its modules read, by index.
    """

    site: int
    reentrant: bool
    units: tuple[int, ...]


@dataclass(frozen=True)
class Chain:
    """The stages of a model.

    Attributes:
        before: units that are read before the first cut.
        kept_bytes: what the forward of one micro-batch keeps until the last stage begins.
    """

    stages: tuple[Stage, ...]
    before: tuple[int, ...] = ()
    kept_bytes: int = 0

    @property
    def worth_it(self) -> bool:
        """Whether most units are in a stage of their own, or nearly: those of one stage are fetched for each
        micro-batch where they have no room together."""
        units = {unit for stage in self.stages for unit in stage.units}
        return len(self.stages) > 1 and 2 * len(self.stages) > len(units)

    def after(self, stage: int, site: int) -> int | None:
        """The next stage that begins at a site. Args: stage: that runs now; -1: none has begun."""
        later = range(stage + 1, len(self.stages))
        return next((index for index in later if self.stages[index].site == site), None)

    def units_of(self, stage: int) -> tuple[int, ...]:
        """Args: stage: -1 for what is before the first cut."""
        return self.before if stage < 0 else self.stages[stage].units


class _Mark(torch.autograd.Function):
    """The same values, behind a node that can be told from others."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()  # no view: whoever is given it may write to it

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return gradient


def mark(tensor: torch.Tensor) -> torch.Tensor:
    """What a unit is given in place of a tensor, while a forward is recorded."""
    marked: torch.Tensor = _Mark.apply(tensor)
    return marked


@dataclass
class _Candidate:
    """Where the graph might be cut.

    Attributes:
        site: that is entered there; None: none was, in that reentrant checkpoint.
        begins: the number of the first node behind it.
        kept_bytes: that the forward keeps until here.
        units: that are read from here to the next candidate.
    """

    site: int | None
    reentrant: bool
    begins: int
    kept_bytes: int = 0
    units: list[int] = field(default_factory=list)


class Recorder:
    """A forward in ordinary order, in one thread.

    Args:
        kept: counts what the forward keeps.

    Attributes:
        changed_flag: of torch, that is set otherwise for a part of the forward; "" where none is.
        came_with_graph: a part of the graph was made before the forward.
    """

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self._begins = next_number()
        self._flags = _flags()
        self._candidates = [_Candidate(None, False, 0)]
        self.changed_flag = ""
        self.came_with_graph = False

    def cut(self, site: int | None, *, reentrant: bool = False) -> None:
        """The graph might be cut here."""
        self.changed_flag = next(
            (name for name, now in _flags().items() if now != self._flags[name]), self.changed_flag
        )
        self._candidates.append(_Candidate(site, reentrant, next_number(), self._kept.nbytes))

    def entered(self, site: int, units: Sequence[int], *, begins: bool) -> None:
        """A site is entered. Args: begins: it is the first one in a reentrant checkpoint that might be cut."""
        last = self._candidates[-1]
        if begins:
            last.site = site
        last.units += [index for index in units if index not in last.units]

    def chain(self, loss: torch.Tensor) -> Chain:
        """The stages between which the graph can be cut, perhaps none, once the forward has ended in this loss."""
        begins = [each.begins for each in self._candidates]
        edges = [(number_of(lower), number_of(upper), _is_mark(upper)) for upper, lower in _edges(loss.grad_fn)]
        self.came_with_graph = any(lower < self._begins for lower, _, _ in edges)
        crossing = [
            (bisect_right(begins, lower) - 1, bisect_right(begins, upper) - 1, marked) for lower, upper, marked in edges
        ]
        kept = {at for at, each in enumerate(self._candidates) if each.site is not None}
        while True:
            past = {
                at
                for lower, upper, marked in crossing
                if not (marked and upper in kept)
                for at in range(lower + 1, upper + 1)
            }
            if not past & kept:
                return self._stages(kept)
            kept -= past

    def _stages(self, kept: set[int]) -> Chain:
        stages, units = list[Stage](), list[int]()
        before: tuple[int, ...] = ()
        first: _Candidate | None = None
        for at, each in enumerate(self._candidates):
            if at in kept:
                if first is None:
                    before = tuple(units)
                else:
                    stages.append(_stage(first, units))
                first, units = each, []
            units += [index for index in each.units if index not in units]
        if first is not None:
            stages.append(_stage(first, units))
        kept_bytes = 0 if first is None else first.kept_bytes
        return Chain(tuple(stages), before, kept_bytes)


def _stage(first: _Candidate, units: Sequence[int]) -> Stage:
    assert first.site is not None
    return Stage(first.site, first.reentrant, tuple(units))


def _flags() -> dict[str, Any]:
    """What torch keeps for all threads, and code sets for a while."""
    cuda = torch.backends.cuda
    return {
        "the default dtype": torch.get_default_dtype(),
        "flash_sdp_enabled": cuda.flash_sdp_enabled(),
        "mem_efficient_sdp_enabled": cuda.mem_efficient_sdp_enabled(),
        "math_sdp_enabled": cuda.math_sdp_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
    }


class Attributes:
    """The attributes of a model's modules, as they are where this is made. (Parameters, buffers and hooks are not.)"""

    def __init__(self, model: nn.Module) -> None:
        self._before = {name: (module, _plain(module)) for name, module in model.named_modules()}

    def changed(self) -> str:
        """The name of one that is another now; "" where none is."""
        for name, (module, before) in self._before.items():
            for key, value in _plain(module).items():
                if key not in before or not _is_same(value, before[key]):
                    return f"{name}.{key}" if name else key
        return ""


def _plain(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if key not in _OF_TORCH}


_OF_TORCH = frozenset(vars(nn.Module()))


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, int | float | str | tuple) and one == other)


class Buffers:
    """The buffers of a model, as they are where this is made."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def changed(self) -> list[str]:
        """The names of those that have other values now. Versions do not tell: those of BatchNorm's means stay."""
        return [
            name
            for name, buffer in self._model.named_buffers()
            if name in self._before and not _same_bits(buffer, self._before[name])
        ]

    def put_back(self) -> None:
        """They have the values of before."""
        changed = self.changed()
        with torch.no_grad():
            for name, buffer in self._model.named_buffers():
                if name in changed:
                    buffer.resize_(self._before[name].shape).copy_(self._before[name])


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat = [each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return torch.equal(*flat)


def _is_mark(node: Any) -> bool:
    return str(node.name()) == "_MarkBackward"


def _edges(root: Any) -> Iterator[tuple[Any, Any]]:
    """Every edge of a graph, but for those to leaves: (the node above, the node below)."""
    seen, waiting = {id(root): root}, [root] if root is not None else []
    while waiting:
        upper = waiting.pop()
        for lower, _ in upper.next_functions:
            if lower is None or hasattr(lower, "variable"):
                continue
            yield upper, lower
            if id(lower) not in seen:
                seen[id(lower)] = lower
                waiting.append(lower)
