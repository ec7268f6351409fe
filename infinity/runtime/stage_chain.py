"""Whether the units of a model form a chain, learned from one forward in ordinary order.

[Note: what a chain is]
All micro-batches can go through one unit after the other if a unit depends on earlier units only through its inputs.
The graph can then be cut where a unit begins, if no edge bypasses the cut. While the forward is recorded, the graph is
cut at the beginning of each site's call (graph_pieces.py). An edge that a cut replaces is harmless. Any other edge
between two pieces bypasses all cuts between these pieces, and the bypassed cuts are discarded.

The remaining cuts separate the stages. A stage may have several units, for example if the model inserts an image
between the embeddings of words. If a loss has a term for each router of a mixture of experts, edges bypass all units
and no cut remains.

Micro-batches also depend on each other if the forward changes one of these:

* a buffer, such as the means of BatchNorm;
* an attribute of a module;
* a global setting of torch, during a part of the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from infinity.runtime.graph_cuts import MicroBatchForward
from infinity.runtime.graph_pieces import next_number, number_of
from infinity.runtime.saved_tensors import SavedBytesCounter


@dataclass(frozen=True)
class ForwardStage:
    """The part of a forward from one cut to the next.

    Attributes:
        site: number of the site; the stage begins with the call of this site.
        reentrant: whether the stage begins in a reentrant checkpoint.
        units: indices of the units that the stage's modules read.
    """

    site: int
    reentrant: bool
    units: tuple[int, ...]


@dataclass(frozen=True)
class StageChain:
    """The stages of a model.

    Attributes:
        before: indices of the units that are read before the first cut.
        kept_bytes: bytes of the tensors that the forward of one micro-batch keeps until the last stage begins.
    """

    stages: tuple[ForwardStage, ...]
    before: tuple[int, ...] = ()
    kept_bytes: int = 0

    @property
    def worth_it(self) -> bool:
        """Whether the number of stages is more than half the number of units.

        If the units of one stage do not fit the device at the same time, they are fetched for each micro-batch.
        """
        units = {unit for stage in self.stages for unit in stage.units}
        return len(self.stages) > 1 and 2 * len(self.stages) > len(units)

    def after(self, stage: int, site: int) -> int | None:
        """Return the first stage after `stage` that begins at a site; `stage` is -1 before the first stage."""
        later = range(stage + 1, len(self.stages))
        return next((index for index in later if self.stages[index].site == site), None)

    def units_of(self, stage: int) -> tuple[int, ...]:
        """Return the units of a stage, by index; stage -1 is the part before the first cut."""
        return self.before if stage < 0 else self.stages[stage].units


@dataclass
class _CutCandidate:
    """A place in the forward at which the graph can be cut, if no edge bypasses the cut.

    Attributes:
        site: number of the site that is called at this place; -1 for a reentrant checkpoint in which no site was
            called.
        kept_bytes: bytes of the tensors that the forward keeps before this place.
    """

    site: int
    reentrant: bool
    kept_bytes: int
    units: list[int] = field(default_factory=list)


class StageRecorder(MicroBatchForward):
    """A forward in ordinary order, cut at every candidate.

    Args:
        kept: counter of the bytes that the forward keeps for the backward.
    """

    def __init__(self, kept: SavedBytesCounter) -> None:
        super().__init__()
        self._kept = kept
        self._begins = next_number()
        self._flags = _flags()
        self._before: list[int] = []
        self._candidates: list[_CutCandidate] = []
        self._changed_flag = ""  # name of a setting of torch that a part of the forward changes

    def begin(self, site: int, *, reentrant: bool) -> bool:
        if reentrant:
            self._candidates[-1].site = site
        else:
            self._may_cut(site, reentrant=False)
        return True

    def may_begin_in_checkpoint(self) -> bool:
        self._may_cut(-1, reentrant=True)
        return True

    def _may_cut(self, site: int, *, reentrant: bool) -> None:
        changed = (name for name, now in _flags().items() if now != self._flags[name])
        self._changed_flag = next(changed, self._changed_flag)
        self._candidates.append(_CutCandidate(site, reentrant, self._kept.nbytes))
        self.stage += 1

    def reads(self, units: Sequence[int]) -> None:
        (self._candidates[-1].units if self._candidates else self._before).extend(units)

    def found(self, loss: torch.Tensor) -> tuple[StageChain, str]:
        """Return the chain of the forward that computed this loss, possibly without stages.

        The second result is the reason why micro-batches cannot go through the stages one after the other; "" if they
        can.
        """
        edges = list(self.tape.edges(loss))
        chain, why = self._chain(edges), ""
        if self._changed_flag:
            why = f"{self._changed_flag} is set during a part of the forward, and all micro-batches share it"
        elif any(number_of(lower) < self._begins for lower, _, _ in edges):
            why = "the micro-batch, or a tensor that the loss function adds to it, has a graph already"
        elif not chain.worth_it:
            why = (
                "the units of the model do not form a chain: a result of a unit is used again after later units, as "
                "the loss uses the routers of a mixture of experts"
            )
        return chain, why

    def _chain(self, edges: Sequence[tuple[Any, Any, bool]]) -> StageChain:
        crossing = [
            (self.tape.made_by(lower).stage, self.tape.made_by(upper).stage, is_cut) for lower, upper, is_cut in edges
        ]
        kept = {at for at, each in enumerate(self._candidates) if each.site >= 0}
        while True:
            past = {
                at
                for lower, upper, is_cut in crossing
                if not (is_cut and upper in kept)
                for at in range(lower + 1, upper + 1)
            }
            if not past & kept:
                return self._stages(kept)
            kept -= past

    def _stages(self, kept: set[int]) -> StageChain:
        before, stages = list(self._before), list[_CutCandidate]()
        for at, each in enumerate(self._candidates):
            if at in kept:
                stages.append(replace(each, units=[]))
            (stages[-1].units if stages else before).extend(each.units)
        return StageChain(
            tuple(ForwardStage(each.site, each.reentrant, tuple(dict.fromkeys(each.units))) for each in stages),
            tuple(dict.fromkeys(before)),
            stages[-1].kept_bytes if stages else 0,
        )


def _flags() -> dict[str, Any]:
    """Return the values of torch's global settings (for all threads) that code may change temporarily."""
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


class AttributeSnapshot:
    """Snapshot of the attributes of a model's modules, without parameters, buffers and hooks."""

    def __init__(self, model: nn.Module) -> None:
        self._before = {name: (module, _plain(module)) for name, module in model.named_modules()}

    def changed(self) -> str:
        """Return the name of an attribute that has changed since the snapshot; "" if no attribute has changed."""
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


class BufferSnapshot:
    """Snapshot of the buffers of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def changed(self) -> list[str]:
        """Return the names of buffers whose values have changed since the snapshot.

        The tensors' version counters would not show all changes: updates of BatchNorm's means do not count as changes
        there.
        """
        return [name for name, now, before in self._pairs() if not _same_bits(now, before)]

    def put_back(self) -> None:
        """Restore the values of the snapshot."""
        with torch.no_grad():
            for _, now, before in self._pairs():
                if not _same_bits(now, before):
                    now.resize_(before.shape).copy_(before)

    def _pairs(self) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        return [(name, now, self._before[name]) for name, now in self._model.named_buffers() if name in self._before]


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat = [each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return torch.equal(*flat)
