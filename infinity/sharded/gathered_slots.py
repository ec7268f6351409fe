"""Slots in host memory whose weights are gathered from the slices of all ranks for each use.

[Note: gathering]
A fetch is a collective. Every rank begins the same fetches in the same order, independently of its free memory and of
the progress of its updates. A fetch therefore never waits for memory. If views keep the memory of a released slot in
use, the next slot temporarily takes additional memory. A fetch may have to wait for the update of this rank's slice, or
for the read of the slice. The thread of the collectives does this waiting.

[Note: the secondary partition]
Weights may be gathered over a group G of ranks that is smaller than the group W over which states are sharded. The
weights are then also divided over G, and each rank keeps a copy of its slice of this second division in RAM. The first
fetch after an update gathers over W and fills the copies. Later fetches gather over G. The version of the weights
decides between G and W, so the decision is the same on every rank. If G has one rank, this is ZeRO-2. (Source of the
secondary partition: Wang et al., ZeRO++, 2023, §3.2.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch

from infinity.io.arena import ArenaRegion, Lease, PinnedArena
from infinity.io.engine import Transfer
from infinity.plan.policy import long_from_top
from infinity.ranks.collective_queue import CollectiveQueue, OperationFuture
from infinity.ranks.operations import AllGather, CollectiveOperation
from infinity.sizes import format_bytes
from infinity.state.shard import Shard
from infinity.tiers.destination import StateDestination, Written
from infinity.tiers.home import WeightsHome
from infinity.tiers.resources import ModelResources
from infinity.tiers.slots import Fetch, MaterializedHostSlot, Slot

logger = logging.getLogger(__name__)

_Wait = Callable[[], object]
"""Function that waits until this rank's slice is in its place (CollectiveOperation.after)."""


class GatheredSlotPool:
    """Slots of a model whose units are divided over ranks (SlotPool).

    Args:
        resources: resources of the model.
        collectives: queue of the collectives of the ranks.
        shards: this rank's shards, by unit.
    """

    def __init__(self, resources: ModelResources, collectives: CollectiveQueue, shards: Sequence[Shard]) -> None:
        self._resources = resources
        self._collectives = collectives
        self._shards = {id(homes.weights): shard for homes, shard in zip(resources.units, shards, strict=True)}
        self._from_top = long_from_top(resources.arena.free_bytes)
        self._told = False
        self._copies: dict[int, _SliceCopy] = {}
        near = resources.plan.peers.near
        if near is not None:  # the same on all ranks, even if the slice of a rank is empty
            for homes, shard in zip(resources.units, shards, strict=True):
                if not shard.full.stays:
                    self._copies[id(homes.weights)] = _SliceCopy(near.of(shard.full), resources.secondary)

    def start(self, home: WeightsHome, after: Written, version: int) -> Fetch:
        """Start to gather weights. The result is never None ([Note: gathering]).

        Raises:
            PeerError: the queue is broken.
        """
        shard, copy = self._shards[id(home)], self._copies.get(id(home))
        lease = self._lease(shard)
        if copy is not None and copy.version == version:
            return self._gather(lease, copy.shard, near=True, own=copy.own)

        def own(index: int, mine: memoryview) -> _Wait:
            return self._own(home, index, mine, after)

        fetch = self._gather(lease, shard, near=False, own=own, keep=copy)
        if copy is not None:
            copy.version = version
        return fetch

    def _gather(
        self,
        lease: Lease,
        shard: Shard,
        *,
        near: bool,
        own: Callable[[int, memoryview], _Wait],
        keep: _SliceCopy | None = None,
    ) -> Fetch:
        """Start to gather weights into a lease.

        Args:
            lease: memory of the slot.
            shard: this rank's slice in the division over the ranks that gather.
            near: whether to gather over G; False: over W.
            own: function that starts to bring this rank's slice of a group to its place, and returns a function that
                waits for the slice.
            keep: copy that is filled from the gathered weights; None: no copy is filled.
        """
        tickets = []
        for index, group in enumerate(shard.full.groups):
            begin, end = shard.weight_range(index, shard.cut.index)
            slices = [
                last - first for first, last in (shard.weight_range(index, rank) for rank in range(shard.cut.count))
            ]
            buffer = lease.tensor()[group.weight_offset : group.weight_offset + group.weight_bytes]
            operation = CollectiveOperation(
                AllGather(buffer, slices, near),
                shard.full.index,
                f"unit '{shard.full.name}'",
                after=[own(index, lease.view(begin, end - begin))] if begin < end else [],
                arrived=None if keep is None else partial(keep.fill, index, lease),
            )
            tickets.append(self._collectives.submit(operation))
        return _GatherFetch(lease, tickets)

    def _lease(self, shard: Shard) -> Lease:
        nbytes = shard.full.weight_bytes
        lease = self._resources.arena.try_lease(nbytes, from_top=self._from_top(nbytes))
        if lease is not None:
            return lease
        if not self._told:
            self._told = True
            logger.warning(
                "views of weights that were used before keep their memory, so unit '%s' takes %s more than "
                "memory.device; this warning appears once",
                shard.full.name,
                format_bytes(nbytes),
            )
        return PinnedArena(nbytes).lease(nbytes, f"the weights of '{shard.full.name}'")

    def _own(self, home: WeightsHome, index: int, mine: memoryview, after: Written) -> _Wait:
        group = home.groups[index]
        new = after.get(index, StateDestination(group))
        rests_in = new.rests_in
        if rests_in is not None:
            return partial(_copy, mine, rests_in.view(group.start, group.nbytes), new.written)
        store = self._resources.require_store()
        return store.read(group.stored(), mine, copy_index=new.copy_index, after=new.written).result

    def counts(self, home: WeightsHome) -> bool:
        return True

    def waits(self, home: WeightsHome) -> bool:
        return False

    def free(self, slot: Slot) -> None:
        slot.free()


class _SliceCopy:
    """Copy of this rank's slice of a unit's weights, in the division over G. The thread of the collectives fills and
    reads the copy.

    Attributes:
        shard: the slice.
        version: version of the weights that the copy has, or will have before the copy is first read; -1: no version
            yet.
    """

    def __init__(self, shard: Shard, space: ArenaRegion) -> None:
        self.shard = shard
        self.version = -1
        nbytes = shard.local.weight_bytes
        self._lease = space.lease(nbytes, f"a copy of the weights of '{shard.full.name}'") if nbytes else None

    def own(self, index: int, mine: memoryview) -> _Wait:
        """Return a function that copies the slice of a group to `mine`, which is the slice's place in a slot. The slice
        must not be empty."""
        return partial(_copy, mine, self._view(index))

    def fill(self, index: int, slot: Lease) -> None:
        """Fill the slice of a group from a slot that has all weights of the group."""
        begin, end = self.shard.weight_range(index, self.shard.cut.index)
        if begin < end:
            _copy(self._view(index), slot.view(begin, end - begin))

    def _view(self, index: int) -> memoryview:
        if self._lease is None:
            raise AssertionError("a copy of nothing")
        group = self.shard.local.groups[index]
        return self._lease.view(group.weight_offset, group.weight_bytes)


def _copy(to: memoryview, source: memoryview, written: Transfer | None = None) -> None:
    """Copy bytes.

    Args:
        to: target memory.
        source: source memory.
        written: transfer after which the source is complete; None when the source is already complete.
    """
    if written is not None:
        written.result()
    torch.frombuffer(to, dtype=torch.uint8).copy_(torch.frombuffer(source, dtype=torch.uint8))


class _GatherFetch(Fetch):
    def __init__(self, lease: Lease, tickets: Sequence[OperationFuture]) -> None:
        super().__init__()
        self._lease = lease
        self._tickets = tickets

    def wait(self) -> None:
        for ticket in self._tickets:
            ticket.wait()

    def finish(self) -> Slot:
        """Wait for the weights, and return their slot.

        Raises:
            PeerError: another rank failed. The memory is not given back, because a rank may still write to it.
        """
        for ticket in self._tickets:
            ticket.result()
        return self._slot()

    def _slot(self) -> Slot:
        return MaterializedHostSlot(self._lease)

    def _give_up(self) -> None:
        return
