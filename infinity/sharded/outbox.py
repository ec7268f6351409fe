"""Gradients of units that are cut over ranks: from every rank to the one that owns a slice.

[Note: the way of a gradient between ranks]

    autograd ──take──▶ box (the unit's groups, whole) ──send──▶ all-to-all ──▶ owner: the slices of all ranks
                                                                               └─▶ GroupGradients.land, rank by rank

Each rank sends its gradients of a micro-batch in the dtype they come in; the owner adds them in fp32, in the order of
the ranks, micro-batch by micro-batch. So N ranks with M micro-batches have the bits of one rank with N·M of the same
shapes: m0r0, m0r1, …, m1r0, …

What a rank has no gradient of counts as zeros, unless no rank has one. (A gradient of -0.0 is 0.0 then.)

A box is sent when the backward of other units begins, on every rank, whether or not everything came. What came later,
or for a unit whose backward no hook announced, is sent at the end of the pass, where the ranks tell each other which
units that is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from infinity.io.arena import Lease, PinnedArena, Space
from infinity.ranks.exchange import Exchange, Ticket
from infinity.ranks.operations import AllToAll, Operation
from infinity.state.shard import Shard
from infinity.state.unit import Place
from infinity.units.gradients import UnitGradients


@dataclass(eq=False)
class _Box:
    """Gradients of one unit that were not sent.

    Attributes:
        names: of those that came.
    """

    lease: Lease
    names: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _OnWay:
    """A box under way.

    Attributes:
        received: this rank's slices of each trained group, from all ranks; None where it has none.
        complete: this rank expects nothing more of the unit in this pass.
    """

    shard: Shard
    box: _Box
    complete: bool
    received: Lease | None
    tickets: Sequence[Ticket]


class Outbox:
    """The boxes of a model.

    Args:
        shards: by unit.
        local: the gradients of this rank's slices, by unit.
        space: memory for two units on their way, sent and received.
        before: called with the index of a unit before gradients of it land: from then on nothing may read those that
            are there.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        local: Sequence[UnitGradients],
        exchange: Exchange,
        space: Space,
        before: Callable[[int], None],
    ) -> None:
        self._shards = shards
        self._local = local
        self._exchange = exchange
        self._space = space
        self._before = before
        self._boxes: dict[int, _Box] = {}
        self._on_way: deque[_OnWay] = deque()
        self._completed: list[int] = []

    def take(self, place: Place, gradient: torch.Tensor) -> None:
        """Put one gradient into the box of its unit; a second piece of it is added there.

        Raises:
            PeerError: another rank failed.
        """
        index, spec, group = place.unit.index, place.spec, place.group
        box = self._boxes.get(index) or self._begin(index)
        flat = _flat(box.lease, self._shards[index], place.group_index)[spec.offset : spec.offset + spec.numel]
        values = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
        values = values.reshape(-1).to(group.dtype)
        if spec.name in box.names:
            flat.add_(values)
            return
        flat.copy_(values)
        box.names.add(spec.name)

    def _begin(self, index: int) -> _Box:
        box = self._boxes[index] = _Box(self._lease(self._shards[index].unit.gradient_bytes))
        return box

    def _lease(self, nbytes: int) -> Lease:
        while True:
            lease = self._space.try_lease(nbytes)
            if lease is not None:
                return lease
            if not self._on_way:  # units whose backward no hook announced: no rank may send them before the others
                return PinnedArena(nbytes).lease(nbytes, "gradients between ranks")
            self._land_next()

    @property
    def waiting(self) -> set[int]:
        """The units whose box has something."""
        return set(self._boxes)

    def send(self, index: int, *, complete: bool = False) -> None:
        """Begin the way of a unit's box. All ranks do this, in the same order.

        Args:
            complete: this rank expects nothing more of the unit in this pass.
        """
        shard = self._shards[index]
        if not shard.unit.trainable_groups:
            return
        box = self._boxes.get(index) or self._begin(index)
        mine = sum(_mine_bytes(shard, group_index) for group_index in trained(shard))
        received = self._lease(shard.cut.count * mine) if mine else None
        del self._boxes[index]
        tickets, at = [], 0
        for group_index in trained(shard):
            group = shard.unit.groups[group_index]
            _zero_the_rest(box, shard, group_index)
            itemsize = group.dtype.itemsize
            nbytes = shard.cut.count * _mine_bytes(shard, group_index)
            operation = Operation(
                AllToAll(
                    _flat(box.lease, shard, group_index).view(torch.uint8),
                    [(end - begin) * itemsize for begin, end in shard.slices[group_index]],
                    _bytes_of(received, at, nbytes),
                    [_mine_bytes(shard, group_index)] * shard.cut.count,
                ),
                shard.unit.index,
                f"the gradients of unit '{shard.unit.name}'",
            )
            tickets.append(self._exchange.submit(operation))
            at += nbytes
        self._on_way.append(_OnWay(shard, box, complete, received, tickets))

    def land(self) -> None:
        """Land what has arrived."""
        while self._on_way and all(ticket.done() for ticket in self._on_way[0].tickets):
            self._land_next()

    def settle(self) -> None:
        """Land everything that was sent. Raises PeerError."""
        while self._on_way:
            self._land_next()

    def _land_next(self) -> None:
        """Wait for what was sent first, and land it. What an interrupt ends while it waits, or an error before anything
        of it has landed, stays to be landed. An error later loses it, and its memory comes back."""
        for ticket in self._on_way[0].tickets:
            ticket.result()
        self._land(self._on_way[0])

    def _land(self, arrived: _OnWay) -> None:
        shard, at = arrived.shard, 0
        self._before(shard.unit.index)
        self._on_way.popleft()
        try:
            for group_index in trained(shard):
                group, local = shard.unit.groups[group_index], shard.local.groups[group_index]
                nbytes = _mine_bytes(shard, group_index)
                for _ in range(shard.cut.count):  # rank by rank
                    flat = _bytes_of(arrived.received, at, nbytes).view(group.dtype)
                    at += nbytes
                    for piece in local.specs:
                        self._local[shard.unit.index].groups[group_index].land(
                            piece,
                            flat[piece.offset : piece.offset + piece.numel],
                            accumulate=True,  # to what is there: what nobody wants was dropped
                        )
        finally:
            if arrived.received is not None:
                arrived.received.release()
            arrived.box.lease.release()
        if arrived.complete:
            self._completed.append(shard.unit.index)

    def take_completed(self) -> list[int]:
        """The units of which all gradients of a pass have landed, as far as this rank can tell. Each is told once."""
        found, self._completed = self._completed, []
        return found

    def forget(self, unit: int, name: str) -> None:
        """Nobody wants the gradient of this parameter."""
        box = self._boxes.get(unit)
        if box is not None:
            box.names.discard(name)


def trained(shard: Shard) -> list[int]:
    """The groups of a unit that are trained, on whatever rank."""
    return [index for index, group in enumerate(shard.unit.groups) if group.trainable]


def _mine_bytes(shard: Shard, group_index: int) -> int:
    begin, end = shard.mine(group_index)
    return (end - begin) * shard.unit.groups[group_index].dtype.itemsize


def _bytes_of(lease: Lease | None, begin: int, nbytes: int) -> torch.Tensor:
    if lease is None or not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(lease.view(begin, nbytes), dtype=torch.uint8)


def _flat(lease: Lease, shard: Shard, group_index: int) -> torch.Tensor:
    """The gradients of a group in a box, [numel]."""
    begin = sum(shard.unit.groups[index].gradient_bytes for index in trained(shard) if index < group_index)
    group = shard.unit.groups[group_index]
    return torch.frombuffer(lease.view(begin, group.numel * group.dtype.itemsize), dtype=group.dtype)


def _zero_the_rest(box: _Box, shard: Shard, group_index: int) -> None:
    flat = _flat(box.lease, shard, group_index)
    for spec in shard.unit.groups[group_index].specs:
        if spec.name not in box.names:
            flat[spec.offset : spec.offset + spec.numel].zero_()
