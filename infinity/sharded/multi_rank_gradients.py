"""Gradients of units that are divided over the ranks. Optimizers and gradient handles see the gradients of all
ranks."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch

from infinity.errors import NotAvailableError, PeerError
from infinity.ranks.collective_queue import CollectiveQueue
from infinity.sharded.outbox import GradientOutbox, trained
from infinity.state.shard import Shard
from infinity.state.unit import ParameterPlace, ParameterSpec, experts_of
from infinity.units.accumulated_gradients import total_of
from infinity.units.gradients import GroupGradients, Named, StepAgreement, UnitGradients, sum_of

PARTIAL_NUMEL = 64 << 10
"""Number of elements of one partial sum of squares (_native.sums_of_squares)."""


class GradientAgreement:
    """The facts about gradients on which all ranks agree: the parameters that have a gradient, and their sums of
    squares.

    The facts are valid until the next gradient arrives.

    Args:
        shards: this rank's shards, by unit. They also say which slices the other ranks have.
        local: gradients of this rank's slices, by unit.
        collectives: queue of the collectives of the ranks.
        outbox: gradients in flight between the ranks.

    Attributes:
        present: names of the parameters that have a gradient on this rank. After an agreement, names of the parameters
            that have a gradient on any rank.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        local: Sequence[UnitGradients],
        collectives: CollectiveQueue,
        outbox: GradientOutbox,
    ) -> None:
        self._shards = shards
        self._local = local
        self._collectives = collectives
        self._outbox = outbox
        self._names = [spec.name for spec in _specs(shards)]
        self._partials: dict[str, list[float]] | None = None
        self.present: set[str] = set()

    def came(self, name: str) -> None:
        """Record that a gradient of this parameter has arrived on this rank."""
        self.present.add(name)
        self._partials = None

    def went(self, name: str) -> None:
        """Record that the gradient of this parameter was dropped."""
        if name in self.present:
            self.present.discard(name)
            self._partials = None

    def share(self, waiting: Sequence[bool]) -> list[bool]:
        """At the end of a backward pass, agree with all ranks on the parameters that have a gradient on any rank.

        After the agreement, such a parameter has a gradient on every rank.

        Args:
            waiting: for each trained unit, whether it has gradients that were not sent.

        Returns:
            For each trained unit, whether any rank has gradients that were not sent.

        Raises:
            PeerError: a rank failed.
        """
        mine = np.packbits([*waiting, *(name in self.present for name in self._names)])
        for each in self._collectives.all_gather_at("the end of backward", mine.tobytes()):
            mine = mine | np.frombuffer(each, np.uint8)
        bits = np.unpackbits(mine, count=len(waiting) + len(self._names)).astype(bool)
        self.present = {name for name, bit in zip(self._names, bits[len(waiting) :], strict=True) if bit}
        return [bool(bit) for bit in bits[: len(waiting)]]

    def partials(self, name: str) -> Sequence[float]:
        """Return the partial sums of Σ g² over all ranks' slices.

        If gradients have arrived since the last agreement, the ranks agree again. All ranks must then make this call.
        """
        if self._partials is None:
            self.make({}, "", (), "the norm of the gradients")
        return () if self._partials is None else self._partials[name]

    def make(
        self, facts: Mapping[str, object], skip: str, told: Sequence[int], what: str = "the step"
    ) -> StepAgreement:
        """Agree with all ranks on their facts and sums of squares, after all gradients have landed.

        Args:
            facts: JSON values that must be the same on all ranks; the keys are names for messages.
            skip: reason of this rank why the step must change nothing; "" when it has none.
            told: numbers about this rank's generations, for the other ranks.
            what: name of the point that the ranks have reached, for messages.

        Raises:
            PeerError: the ranks have different facts, or have gradients for different parameters; or a rank failed. The
                message names the difference and the ranks.
        """
        self._outbox.land_all()
        mine = np.array([part for each in self._pairs() for part in _own_partials(*each)], dtype=np.float64)
        came = np.packbits([name in self.present for name in self._names])
        said = json.dumps([facts, skip, list(told)], sort_keys=True).encode()
        payload = len(said).to_bytes(8, "little") + said + came.tobytes() + mine.tobytes()
        bits, reasons, heard = np.zeros(len(self._names), dtype=bool), list[str](), list[list[int]]()
        found: dict[str, list[float]] = {name: [] for name in self._names}
        for rank, each in enumerate(self._collectives.all_gather_at(what, payload)):
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
        return StepAgreement(next(iter(reasons), ""), heard)

    def _require_same_gradients(self, first: Any, theirs: Any, rank: int) -> None:
        """Check that a rank has dropped the same gradients as rank 0.

        At the end of the backward, the ranks have agreed on the gradients that exist. If a gradient is missing on a
        rank now, this rank has dropped the gradient and its part of the sum of squares.
        """
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
                for spec in shard.full.groups[index].specs:
                    first, last = max(spec.offset, begin), min(spec.offset + spec.numel, end)
                    count = _partials_of(first - begin, last - begin)
                    found[spec.name] += partials[at : at + count]
                    at += count

    def _drop_zeros(self) -> None:
        """Drop the landed gradients of parameters that have no gradient on any rank. These gradients are zeros."""
        for local in self._local:
            for group in local.groups.values():
                for name in group.present - self.present:
                    group.drop(name)


def _specs(shards: Iterable[Shard]) -> Iterator[ParameterSpec]:
    for shard in shards:
        for index in trained(shard):
            yield from shard.full.groups[index].specs


def _partials_of(begin: int, end: int) -> int:
    """Return the number of partial sums of the elements [begin, end) of a group."""
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
    """Check that another rank's facts are the same as this rank's facts.

    Args:
        theirs: facts of the other rank.
        mine: facts of this rank.
        rank: number of the other rank.
        advice: sentence of the message that says what the user can do about a difference.

    Raises:
        PeerError: a fact differs.
    """
    for what in sorted(theirs.keys() | mine.keys()):
        if theirs.get(what) != mine.get(what):
            raise PeerError(
                f"{what} differs between the ranks: {theirs.get(what)} on rank {rank}, {mine.get(what)} on this rank",
                (rank,),
                advice,
            )


class MultiRankGroupGradients:
    """The gradients of all ranks for one full group, for optimizers and gradient handles.

    Attributes:
        mean: factor by which the sum of the ranks' gradients is multiplied to get the mean.
        zeros: always empty. A gradient that arrives as zeros without memory is sent as dense zeros.

    Args:
        shard: this rank's shard of the unit.
        group_index: index of the group.
        local: gradients of this rank's slice; None when this rank has no slice of the group.
        outbox: gradients in flight between the ranks.
        agreement: facts on which all ranks agree.
    """

    zeros: Set[str] = frozenset()

    def __init__(
        self,
        shard: Shard,
        group_index: int,
        local: GroupGradients | None,
        outbox: GradientOutbox,
        agreement: GradientAgreement,
    ) -> None:
        self.mean = 1.0 / shard.cut.count
        self._shard = shard
        self._group_index = group_index
        self._local = local
        self._outbox = outbox
        self._agreement = agreement

    @property
    def present(self) -> Set[str]:
        """Names of all parameters of the model that have a gradient, not only of the parameters in this group."""
        return self._agreement.present

    def land(self, spec: ParameterSpec, gradient: torch.Tensor, *, accumulate: bool, more: bool = False) -> None:
        """Send a gradient to the ranks that own its slices. These ranks add it to the present gradient.

        `accumulate` has no effect, because the other ranks also determine whether a gradient is present.
        MultiRankGradients.drop_cleared drops the gradients that a script has set to None. `more` has no effect, because
        the owners add the gradients.
        """
        self._outbox.take(ParameterPlace(self._shard.full, self._group_index, spec), gradient)
        self._agreement.came(spec.name)

    def partials(self, spec: ParameterSpec) -> Sequence[float]:
        """Return the partial sums of squares over all ranks' slices (GradientAgreement.partials)."""
        return self._agreement.partials(spec.name)

    def sum_squares(self, spec: ParameterSpec) -> float:
        """Return Σ g² over all ranks' slices."""
        return total_of(self.partials(spec))

    def drop(self, name: str) -> None:
        """Drop the gradient of a parameter.

        Raises:
            PeerError: gradients were lost on their way between ranks.
        """
        self._outbox.land_all()  # gradients in flight would land after the drop
        self._outbox.forget(self._shard.full.index, name)
        if self._local is not None:
            self._local.drop(name)
        self._agreement.went(name)


class MultiRankGradients:
    """The gradients of a model whose units are divided over ranks (ModelGradients).

    Args:
        shards: this rank's shards, by unit.
        local: gradients of this rank's slices, by unit.
        collectives: queue of the collectives of the ranks.
        outbox: gradients in flight between the ranks.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        local: Sequence[UnitGradients],
        collectives: CollectiveQueue,
        outbox: GradientOutbox,
    ) -> None:
        self._units = local
        self._outbox = outbox
        self.agreement = GradientAgreement(shards, local, collectives, outbox)
        self._groups = {
            (shard.full.index, index): MultiRankGroupGradients(
                shard, index, _of_rank(local[shard.full.index], index), outbox, self.agreement
            )
            for shard in shards
            for index in trained(shard)
        }
        self._trained = [shard.full.index for shard in shards if trained(shard)]
        self._routed = {shard.full.index for shard in shards if shard.full.routed}
        self._experts = experts_of([shard.full for shard in shards])

    @property
    def elsewhere(self) -> Set[str]:
        return self.agreement.present

    def of(self, place: ParameterPlace) -> MultiRankGroupGradients:
        return self._groups[place.unit.index, place.group_index]

    def has(self, place: ParameterPlace) -> bool:
        return place.spec.name in self.agreement.present

    def value(self, place: ParameterPlace) -> torch.Tensor:
        raise NotAvailableError(
            f"the gradient of '{place.spec.name}' is split over several ranks, and its values are not available yet. "
            "What works is p.grad.norm(), torch.nn.utils.clip_grad_norm_ with norm_type=2 and a multiplication by a "
            "number. A hook of the parameter (register_hook, before the backward) receives the gradient of this "
            "rank's own batch."
        )

    def require_settable(self, place: ParameterPlace) -> None:
        raise NotAvailableError(
            f"the gradient of '{place.spec.name}' was set by hand, which is not available yet with several ranks: "
            "compute it by a backward pass, or use one process"
        )

    def begin_pass(self) -> None:
        self.take_completed()  # forget the units of a pass that an exception ended

    def backward_begins(self, units: Collection[int], staying: Collection[int]) -> None:
        return

    def backward_left(self, units: Iterable[int]) -> None:
        """Send the gradients of these units, and land all boxes that have arrived.

        The gradients of experts wait until the backward of their block has ended, because each rank's tokens are routed
        to other experts. Then all ranks send the gradients of all experts of the block.

        Raises:
            PeerError: another rank failed.
        """
        for index in units:
            if index not in self._routed:
                for each in (*self._experts.get(index, ()), index):
                    self._outbox.send(each, complete=self._units[each].arrivals.all_came)
        self._outbox.land_arrived()

    def before_landing(self, index: int, /) -> None:
        return  # the outbox does this when gradients of all ranks land

    def complete(self, index: int) -> Sequence[int]:
        self._units[index].send()
        return ()

    def micro_batch_passed(self, indices: Iterable[int], complete: Collection[int]) -> Sequence[int]:
        for index in indices:
            self._outbox.send(index, complete=index in complete)
            self._outbox.land_arrived()
        return self.take_completed()

    def take_completed(self) -> Sequence[int]:
        """Return the units whose gradients of a pass have all landed (GradientOutbox.take_completed)."""
        return self._outbox.take_completed()

    def pass_ended(self) -> None:
        """Send the gradients that any rank has not sent yet. All ranks must call this.

        Raises:
            PeerError: another rank failed.
        """
        waiting = self._outbox.waiting
        late = self.agreement.share([index in waiting for index in self._trained])
        self._outbox.land_arrived()  # all boxes that were sent before `share` have arrived
        for index, is_late in zip(self._trained, late, strict=True):
            if is_late:
                self._outbox.send(index)

    def send(self) -> None:
        for unit in self._units:
            unit.send()

    def synchronize(self) -> None:
        self._outbox.land_all()
        for unit in self._units:
            for group in unit.groups.values():
                group.wait_landed()

    def drop_cleared(self, named: Named) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, place in named():
                if place.group.trainable and parameter.grad is None and self.has(place):
                    self.of(place).drop(place.spec.name)

    def decide(self, facts: Mapping[str, object], skip: str, told: Sequence[int]) -> StepAgreement:
        return self.agreement.make(facts, skip, told)

    def sum_squares(self, places: Iterable[ParameterPlace]) -> tuple[float, str]:
        return sum_of(self.of, places)


def _of_rank(gradients: UnitGradients, group: int) -> GroupGradients | None:
    """Return the gradients of this rank's slice of a group; None if the rank has no slice."""
    return gradients.in_host_memory(group) if group in gradients.groups else None
