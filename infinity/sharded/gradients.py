"""Gradients of units that are cut over ranks, as optimizers and handles see them: whole, with what all ranks know."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch

from infinity.errors import NotAvailableError, PeerError
from infinity.ranks.exchange import Exchange
from infinity.sharded.outbox import Outbox, trained
from infinity.state.shard import Shard
from infinity.state.unit import ParameterSpec, Place
from infinity.units.gradients import (
    Decision,
    GroupGradients,
    Named,
    UnitGradients,
    sum_of,
    total_of,
)

PARTIAL_NUMEL = 64 << 10
"""Elements of a partial of a sum of squares (_native.sums_of_squares)."""


class Agreement:
    """What all ranks know of the gradients since the last one came: which parameters have one, and their sums of
    squares.

    Args:
        shards: by unit, this rank's; those of the others follow from them.
        local: the gradients of this rank's slices, by unit.

    Attributes:
        present: names of the parameters that have a gradient on this rank, or on any rank once they have agreed.
    """

    def __init__(
        self, shards: Sequence[Shard], local: Sequence[UnitGradients], exchange: Exchange, outbox: Outbox
    ) -> None:
        self._shards = shards
        self._local = local
        self._exchange = exchange
        self._outbox = outbox
        self._names = [spec.name for spec in _specs(shards)]
        self._partials: dict[str, list[float]] | None = None
        self.present: set[str] = set()

    def came(self, name: str) -> None:
        """A gradient of this parameter is on its way."""
        self.present.add(name)
        self._partials = None

    def went(self, name: str) -> None:
        """Nobody wants the gradient of this parameter any more."""
        if name in self.present:
            self.present.discard(name)
            self._partials = None

    def share(self, waiting: Sequence[bool]) -> list[bool]:
        """At the end of a backward pass: from here on a parameter has a gradient on every rank if it has one on any.

        Args:
            waiting: of each unit that is trained, whether something of it was not sent.

        Returns:
            The same, by any rank.

        Raises:
            PeerError: a rank failed.
        """
        mine = np.packbits([*waiting, *(name in self.present for name in self._names)])
        for each in self._exchange.all_gather_at("the end of backward", mine.tobytes()):
            mine = mine | np.frombuffer(each, np.uint8)
        bits = np.unpackbits(mine, count=len(waiting) + len(self._names)).astype(bool)
        self.present = {name for name, bit in zip(self._names, bits[len(waiting) :], strict=True) if bit}
        return [bool(bit) for bit in bits[: len(waiting)]]

    def partials(self, name: str) -> Sequence[float]:
        """Of Σ g², of all ranks' slices. Where gradients came since the ranks agreed, they agree now: all must ask."""
        if self._partials is None:
            self.make({}, "", (), "the norm of the gradients")
        return () if self._partials is None else self._partials[name]

    def make(self, facts: Mapping[str, object], skip: str, told: Sequence[int], what: str = "the step") -> Decision:
        """Tell all ranks what this one has, and take in what they have. Waits until all gradients have landed.

        Args:
            facts: what must be the same on all ranks, by what to call it; JSON.
            skip: why this rank wants the step to change nothing; "" where it does not.
            told: of this rank's generations.
            what: the ranks are at.

        Raises:
            PeerError: facts differ, or which parameters have a gradient, and names them and the ranks; a rank failed.
        """
        self._outbox.settle()
        mine = np.array([part for each in self._pairs() for part in _own_partials(*each)], dtype=np.float64)
        came = np.packbits([name in self.present for name in self._names])
        said = json.dumps([facts, skip, list(told)], sort_keys=True).encode()
        payload = len(said).to_bytes(8, "little") + said + came.tobytes() + mine.tobytes()
        bits, reasons, heard = np.zeros(len(self._names), dtype=bool), list[str](), list[list[int]]()
        found: dict[str, list[float]] = {name: [] for name in self._names}
        for rank, each in enumerate(self._exchange.all_gather_at(what, payload)):
            length = int.from_bytes(each[:8], "little")
            theirs, why, of_generations = json.loads(each[8 : 8 + length])
            heard.append(of_generations)
            require_same(theirs, facts, rank, "Every rank must take the same steps with the same optimizer.")
            reasons += [f"{why} (rank {rank})"] if why else []
            at = 8 + length + len(came)
            theirs_came = np.unpackbits(np.frombuffer(each[8 + length : at], np.uint8), count=len(bits)).astype(bool)
            if facts and rank:
                self._require_same_gradients(bits, theirs_came, rank)
            bits |= theirs_came
            self._take_in(rank, np.frombuffer(each[at:], np.float64).tolist(), found)
        self._partials = found
        self.present = {name for name, bit in zip(self._names, bits, strict=True) if bit}
        self._drop_zeros()
        return Decision(next(iter(reasons), ""), heard)

    def _require_same_gradients(self, first: Any, theirs: Any, rank: int) -> None:
        """Since the end of backward the ranks know of the gradients of all: what one of them alone does not have any
        more it has dropped, with its part of the sum of squares."""
        differs = np.flatnonzero(first != theirs)
        if len(differs):
            without = rank if first[differs[0]] else 0
            raise PeerError(
                f"parameter '{self._names[differs[0]]}' has a gradient on some ranks and none on rank {without}",
                (without,),
                "Every rank must clear the same gradients (zero_grad, grad = None) between backward and step.",
            )

    def _pairs(self) -> Iterator[tuple[Shard, UnitGradients]]:
        return zip(self._shards, self._local, strict=True)

    def _take_in(self, rank: int, partials: list[float], found: dict[str, list[float]]) -> None:
        at = 0
        for shard in self._shards:
            for index in trained(shard):
                begin, end = shard.slices[index][rank]
                for spec in shard.unit.groups[index].specs:
                    first, last = max(spec.offset, begin), min(spec.offset + spec.numel, end)
                    count = _partials_of(first - begin, last - begin)
                    found[spec.name] += partials[at : at + count]
                    at += count

    def _drop_zeros(self) -> None:
        """What landed of parameters that no rank has a gradient of."""
        for local in self._local:
            for group in local.groups.values():
                for name in group.present - self.present:
                    group.drop(name)


def _specs(shards: Iterable[Shard]) -> Iterator[ParameterSpec]:
    for shard in shards:
        for index in trained(shard):
            yield from shard.unit.groups[index].specs


def _partials_of(begin: int, end: int) -> int:
    """How many partials the elements [begin, end) of a group have."""
    return 0 if begin >= end else -(-end // PARTIAL_NUMEL) - begin // PARTIAL_NUMEL


def _own_partials(shard: Shard, local: UnitGradients) -> Iterator[float]:
    for index in trained(shard):
        for piece in shard.local.groups[index].specs:
            group = local.groups[index]
            if piece.name in group.present:
                yield from group.partials(piece)
            else:
                yield from [0.0] * _partials_of(piece.offset, piece.offset + piece.numel)


def require_same(theirs: Mapping[str, object], mine: Mapping[str, object], rank: int, advice: str) -> None:
    """Raises PeerError where what a rank says differs from what this one has. Args: advice: what to do then."""
    for what in sorted(theirs.keys() | mine.keys()):
        if theirs.get(what) != mine.get(what):
            raise PeerError(
                f"{what} differs between the ranks: {theirs.get(what)} on rank {rank}, {mine.get(what)} on this one",
                (rank,),
                advice,
            )


class SharedGroup:
    """The gradients of one group, as optimizers and handles see them: of the whole group.

    Attributes:
        mean: what a gradient is to be multiplied by, since those of all ranks were added.

    Args:
        local: of this rank's slice; None where it has none.
    """

    def __init__(
        self, shard: Shard, group_index: int, local: GroupGradients | None, outbox: Outbox, agreement: Agreement
    ) -> None:
        self.mean = 1.0 / shard.cut.count
        self._shard = shard
        self._group_index = group_index
        self._local = local
        self._outbox = outbox
        self._agreement = agreement

    @property
    def present(self) -> Set[str]:
        """Of the model's parameters, those that have a gradient."""
        return self._agreement.present

    def land(self, spec: ParameterSpec, gradient: torch.Tensor, *, accumulate: bool, more: bool = False) -> None:
        """Send a gradient on its way, to be added to what its owner has. `accumulate` says nothing: whether there is
        something depends on all ranks, and what a rank does not want any more it drops (SharedGradients.drop_cleared).
        Nor does `more`: the owner adds up."""
        self._outbox.take(Place(self._shard.unit, self._group_index, spec), gradient)
        self._agreement.came(spec.name)

    def partials(self, spec: ParameterSpec) -> Sequence[float]:
        """As GroupGradients.partials, of all ranks' slices (Agreement.partials)."""
        return self._agreement.partials(spec.name)

    def sum_squares(self, spec: ParameterSpec) -> float:
        """As GroupGradients.sum_squares, of all ranks' slices."""
        return total_of(self.partials(spec))

    def drop(self, name: str) -> None:
        """Raises PeerError: gradients were lost on their way."""
        self._outbox.settle()  # what is under way would land later
        self._outbox.forget(self._shard.unit.index, name)
        if self._local is not None:
            self._local.drop(name)
        self._agreement.went(name)


class SharedGradients:
    """The gradients of a model whose units are cut over ranks (Gradients).

    Args:
        local: of this rank's slices, by unit.
        outbox: of these gradients.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        local: Sequence[UnitGradients],
        exchange: Exchange,
        outbox: Outbox,
    ) -> None:
        self._units = local
        self._outbox = outbox
        self.agreement = Agreement(shards, local, exchange, outbox)
        self._groups = {
            (shard.unit.index, index): SharedGroup(
                shard, index, local[shard.unit.index].groups.get(index), outbox, self.agreement
            )
            for shard in shards
            for index in trained(shard)
        }
        self._trained = [shard.unit.index for shard in shards if trained(shard)]

    @property
    def elsewhere(self) -> Set[str]:
        return self.agreement.present

    def of(self, place: Place) -> SharedGroup:
        return self._groups[place.unit.index, place.group_index]

    def has(self, place: Place) -> bool:
        return place.spec.name in self.agreement.present

    def value(self, place: Place) -> torch.Tensor:
        raise NotAvailableError(
            f"the gradient of '{place.spec.name}' lies in slices on several ranks, and its values are not "
            "available yet. What works is p.grad.norm(), torch.nn.utils.clip_grad_norm_ with norm_type=2 and a "
            "multiplication by a number. A hook of the parameter (register_hook, before the backward) is given the "
            "gradient of this rank's own batch."
        )

    def require_settable(self, place: Place) -> None:
        raise NotAvailableError(
            f"the gradient of '{place.spec.name}' was set by hand, which is not available yet with several ranks: "
            "let backward bring it, or use one process"
        )

    def begin_pass(self) -> None:
        self.take_completed()  # of a pass that an exception ended

    def backward_begins(self, units: Collection[int], staying: Collection[int]) -> None:
        return

    def left(self, units: Iterable[int]) -> None:
        """Of these units what came is sent, and what has arrived of any lands. Raises PeerError."""
        for index in units:
            self._outbox.send(index, complete=self._units[index].arrivals.all_came)
        self._outbox.land()

    def about_to_land(self, index: int, /) -> None:
        return  # the outbox does it, when gradients of all ranks land

    def complete(self, index: int) -> Sequence[int]:
        self._units[index].send()
        return ()

    def passed(self, indices: Iterable[int], complete: Collection[int]) -> Sequence[int]:
        for index in indices:
            self._outbox.send(index, complete=index in complete)
            self._outbox.land()
        return self.take_completed()

    def take_completed(self) -> Sequence[int]:
        """As Outbox.take_completed."""
        return self._outbox.take_completed()

    def pass_ended(self) -> None:
        """What any rank has not sent of its gradients is sent. All ranks call. Raises PeerError."""
        waiting = self._outbox.waiting
        late = self.agreement.share([index in waiting for index in self._trained])
        self._outbox.land()  # what was sent before they told each other has arrived
        for index, is_late in zip(self._trained, late, strict=True):
            if is_late:
                self._outbox.send(index)

    def send(self) -> None:
        for unit in self._units:
            unit.send()

    def synchronize(self) -> None:
        self._outbox.settle()
        for unit in self._units:
            for group in unit.groups.values():
                group.settle()

    def drop_cleared(self, named: Named) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, place in named():
                if place.group.trainable and parameter.grad is None and self.has(place):
                    self.of(place).drop(place.spec.name)

    def decide(self, facts: Mapping[str, object], skip: str, told: Sequence[int]) -> Decision:
        return self.agreement.make(facts, skip, told)

    def sum_squares(self, places: Iterable[Place]) -> tuple[float, str]:
        return sum_of(self.of, places)
