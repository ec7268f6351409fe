"""Transfer of gradients between ranks, for units that are divided over ranks. Each slice of a gradient is sent to the
rank that owns the slice.

[Note: the way of a gradient between ranks]

    autograd ──take──▶ box (the full groups of the unit) ──send──▶ all-to-all ──▶ owner: the slices of all ranks
                                                                                  └─▶ GroupGradients.land, rank by rank

Each rank sends its gradients of a micro-batch in the dtype of the weights. The owner of a slice adds the gradients in
fp32, one micro-batch after the other, and the gradients of one micro-batch in the order of the ranks. So N ranks with M
micro-batches give the same bits as one rank with N·M micro-batches of the same shapes: m0r0, m0r1, …, m1r0, …

If a gradient is missing on some ranks but not on all, it counts as zeros on these ranks. (Adding such zeros turns a
gradient of -0.0 into 0.0.)

Every rank sends the box of a unit when the backward of other units begins, even if some gradients of the unit have not
arrived. Gradients that arrive later, or whose backward was announced by no hook, are sent at the end of the backward
pass. The ranks then tell each other which units have such gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from infinity.io.arena import ArenaRegion, Lease, PinnedArena
from infinity.ranks.collective_queue import CollectiveQueue, OperationFuture
from infinity.ranks.operations import AllToAll, CollectiveOperation, SharedPlace
from infinity.sharded.mailboxes import Mailboxes
from infinity.state.shard import Shard
from infinity.state.unit import ParameterPlace
from infinity.tiers.downloads import GradientLanding, GradientQueue, GroupGradientDownload
from infinity.units.gradients import UnitGradients


@dataclass(eq=False)
class _UnsentGradients:
    """Gradients of one unit that have not been sent yet.

    Attributes:
        lease: memory of the gradients of all trained groups of the unit; None as long as all gradients that arrived are
            zeros without memory.
        names: names of the parameters whose gradients have arrived.
        downloads: downloads from the device to `lease`, by group; empty if the gradients come from host memory.
    """

    lease: Lease | None = None
    names: set[str] = field(default_factory=set)
    downloads: dict[int, GroupGradientDownload] = field(default_factory=dict)

    def memory(self) -> Lease:
        """Return the memory of the gradients."""
        if self.lease is None:
            raise AssertionError("a box without memory")
        return self.lease

    def landings(self, group_index: int) -> list[GradientLanding]:
        """Send the gradients of a group from the device to the box, and return all landings in flight."""
        return self.downloads[group_index].landings() if group_index in self.downloads else []


@dataclass(frozen=True)
class _GradientsInFlight:
    """A box that was sent and has not landed.

    Attributes:
        shard: this rank's shard of the unit.
        box: the box that was sent.
        complete: whether this rank expects no further gradient of the unit in this pass.
        received: received slices of each trained group, from all ranks; None when this rank owns no slice of the unit.
        tickets: tickets of the operations in flight.
    """

    shard: Shard
    box: _UnsentGradients
    complete: bool
    received: Lease | None
    tickets: Sequence[OperationFuture]


class GradientOutbox:
    """The boxes of a model.

    Args:
        shards: this rank's shards, by unit.
        local: gradients of this rank's slices, by unit.
        collectives: queue of the collectives of the ranks.
        space: memory for the gradients of two units in flight: one part for gradients that are sent, and one part for
            gradients that are received.
        before_landing: function that is called with the index of a unit before gradients of the unit land. The function
            makes sure that nothing reads the present gradients of the unit any more.
        queue: queue of gradients from the device; None if gradients come from host memory.
        mailboxes: memory that all ranks share, of which `space` is a part; None if the ranks share no memory.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        local: Sequence[UnitGradients],
        collectives: CollectiveQueue,
        space: ArenaRegion,
        before_landing: Callable[[int], None],
        queue: GradientQueue | None = None,
        mailboxes: Mailboxes | None = None,
    ) -> None:
        self._shards = shards
        self._local = local
        self._collectives = collectives
        self._space = space
        self._before_landing = before_landing
        self._queue = queue
        self._mailboxes = mailboxes
        self._boxes: dict[int, _UnsentGradients] = {}
        self._on_way: deque[_GradientsInFlight] = deque()
        self._completed: list[int] = []

    def take(self, place: ParameterPlace, gradient: torch.Tensor) -> None:
        """Put one gradient into the box of its unit. A second piece of a gradient is added to its first piece.

        Raises:
            PeerError: another rank failed.
        """
        index, spec, group = place.unit.index, place.spec, place.group
        box = self._boxes.setdefault(index, _UnsentGradients())
        if gradient.is_sparse and not gradient._nnz() and spec.name not in box.names:
            return  # zeros of an expert without tokens; `send` fills what has not arrived with zeros
        self._give_memory(box, index)
        if self._queue is not None and spec.numel and not gradient.is_sparse and spec.name not in box.names:
            self._pack(self._queue, box, place, gradient)
            return
        for landing in box.landings(place.group_index):
            landing.require_landed()
        flat = _flat(box.memory(), self._shards[index], place.group_index)[spec.offset : spec.offset + spec.numel]
        values = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
        values = values.reshape(-1).to("cpu", group.dtype)
        if spec.name in box.names:
            flat.add_(values)
            return
        flat.copy_(values)
        box.names.add(spec.name)

    def _pack(self, queue: GradientQueue, box: _UnsentGradients, place: ParameterPlace, gradient: torch.Tensor) -> None:
        """Put the first gradient of a parameter into the ring of the device, from which it goes to the box."""
        group = place.group
        download = box.downloads.get(place.group_index)
        if download is None:
            download = box.downloads[place.group_index] = GroupGradientDownload(queue, group)
        if download.packed is not None and not download.packed.takes(place.spec, add=False):
            download.send()
        if download.packed is None:
            target = _memory(box.memory(), self._shards[place.unit.index], place.group_index)
            download.begin(target, group.dtype, summed=False)
        if download.packed is not None:
            queue.pack(download.packed, place.spec, gradient.detach(), add=False)
        box.names.add(place.spec.name)

    def _give_memory(self, box: _UnsentGradients, index: int) -> None:
        if box.lease is None:
            box.lease = self._lease(self._shards[index].full.gradient_bytes)

    def _lease(self, nbytes: int) -> Lease:
        while True:
            lease = self._space.try_lease(nbytes)
            if lease is not None:
                return lease
            if not self._on_way:  # a unit that no hook announced: all ranks send it at the end of the pass
                return PinnedArena(nbytes).lease(nbytes, "gradients between ranks")
            self._land_next()

    @property
    def waiting(self) -> set[int]:
        """Units with a box that was not sent yet."""
        return set(self._boxes)

    def send(self, index: int, *, complete: bool = False) -> None:
        """Send the box of a unit. All ranks call this in the same order.

        Args:
            index: index of the unit.
            complete: whether this rank expects no further gradient of the unit in this pass.
        """
        shard = self._shards[index]
        if not shard.full.trainable_groups:
            return
        box = self._boxes.setdefault(index, _UnsentGradients())
        self._give_memory(box, index)
        mine, senders = sum(_mine_bytes(shard, group_index) for group_index in trained(shard)), self._senders(shard)
        received = self._lease(len(senders) * mine) if mine else None
        del self._boxes[index]
        tickets, at = [], 0
        for group_index in trained(shard):
            group = shard.full.groups[group_index]
            landed = [landing.require_landed for landing in box.landings(group_index)]
            itemsize, of_each = group.dtype.itemsize, _mine_bytes(shard, group_index)
            nbytes = len(senders) * of_each
            operation = CollectiveOperation(
                AllToAll(
                    _flat(box.memory(), shard, group_index).view(torch.uint8),
                    [(end - begin) * itemsize for begin, end in shard.slices[group_index]],
                    _bytes_of(received, at, nbytes),
                    [of_each * (rank in senders) for rank in range(shard.cut.count)],
                    self._shared_place(box.memory(), shard, group_index),
                ),
                shard.full.index,
                f"the gradients of unit '{shard.full.name}'",
                after=[*landed, partial(_zero_missing, box, shard, group_index)],
            )
            tickets.append(self._collectives.submit(operation))
            at += nbytes
        self._on_way.append(_GradientsInFlight(shard, box, complete, received, tickets))

    def _senders(self, shard: Shard) -> list[int]:
        """Return the ranks whose pieces need memory. In shared memory, this rank's own piece stays in its box."""
        own = shard.cut.index if self._mailboxes is not None else -1
        return [rank for rank in range(shard.cut.count) if rank != own]

    def _shared_place(self, lease: Lease, shard: Shard, group_index: int) -> SharedPlace | None:
        """Return the place of the gradients of a group in memory that all ranks share; None without such memory."""
        if self._mailboxes is None:
            return None
        return SharedPlace(self._mailboxes.place(lease, _begin(shard, group_index)), self._mailboxes)

    def land_arrived(self) -> None:
        """Land the boxes that have arrived."""
        while self._on_way and all(ticket.done() for ticket in self._on_way[0].tickets):
            self._land_next()

    def land_all(self) -> None:
        """Wait for all boxes in flight, and land them.

        Raises:
            PeerError: another rank failed.
        """
        while self._on_way:
            self._land_next()

    def _land_next(self) -> None:
        """Wait for the oldest box in flight, and land it.

        If Ctrl-C or an error ends this method before any gradient of the box has landed, the box remains in the queue.
        After a later error the box is lost, and its memory is given back.
        """
        for ticket in self._on_way[0].tickets:
            ticket.result()
        self._land(self._on_way[0])

    def _land(self, arrived: _GradientsInFlight) -> None:
        shard, at = arrived.shard, 0
        senders = self._senders(shard)
        self._before_landing(shard.full.index)
        self._on_way.popleft()
        try:
            for group_index in trained(shard):
                nbytes, dtype = _mine_bytes(shard, group_index), shard.full.groups[group_index].dtype
                begin, end = shard.mine(group_index)
                for rank in range(shard.cut.count):  # in the order of the ranks
                    if rank in senders:
                        flat = _bytes_of(arrived.received, at, nbytes).view(dtype)
                        at += nbytes
                    else:
                        flat = _flat(arrived.box.memory(), shard, group_index)[begin:end]
                    self._land_piece(shard, group_index, flat)
        finally:
            if arrived.received is not None:
                arrived.received.release()
            arrived.box.memory().release()
        if arrived.complete:
            self._completed.append(shard.full.index)

    def _land_piece(self, shard: Shard, group_index: int, flat: torch.Tensor) -> None:
        """Land the gradients of one rank for this rank's slice of a group."""
        for piece in shard.local.groups[group_index].specs:
            self._local[shard.full.index].groups[group_index].land(
                piece,
                flat[piece.offset : piece.offset + piece.numel],
                accumulate=True,  # added to the present gradient; dropped gradients are no longer there
            )

    def take_completed(self) -> list[int]:
        """Return the units whose gradients of a backward pass have all landed, as far as this rank knows. Each unit is
        returned only once."""
        found, self._completed = self._completed, []
        return found

    def forget(self, unit: int, name: str) -> None:
        """Forget the gradient of a parameter."""
        box = self._boxes.get(unit)
        if box is not None:
            box.names.discard(name)


def trained(shard: Shard) -> list[int]:
    """Return the indices of a unit's trained groups, including groups without elements on this rank."""
    return [index for index, group in enumerate(shard.full.groups) if group.trainable]


def _mine_bytes(shard: Shard, group_index: int) -> int:
    begin, end = shard.mine(group_index)
    return (end - begin) * shard.full.groups[group_index].dtype.itemsize


def _bytes_of(lease: Lease | None, begin: int, nbytes: int) -> torch.Tensor:
    if lease is None or not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(lease.view(begin, nbytes), dtype=torch.uint8)


def _memory(lease: Lease, shard: Shard, group_index: int) -> memoryview:
    """Return the memory of the gradients of a group in a box."""
    group = shard.full.groups[group_index]
    return lease.view(_begin(shard, group_index), group.numel * group.dtype.itemsize)


def _begin(shard: Shard, group_index: int) -> int:
    """Return the offset in a box of the gradients of a group."""
    return sum(shard.full.groups[index].gradient_bytes for index in trained(shard) if index < group_index)


def _flat(lease: Lease, shard: Shard, group_index: int) -> torch.Tensor:
    """Return the gradients of a group in a box, [numel]."""
    return torch.frombuffer(_memory(lease, shard, group_index), dtype=shard.full.groups[group_index].dtype)


def _zero_missing(box: _UnsentGradients, shard: Shard, group_index: int) -> None:
    flat = _flat(box.memory(), shard, group_index)
    for spec in shard.full.groups[group_index].specs:
        if spec.name not in box.names:
            flat[spec.offset : spec.offset + spec.numel].zero_()
