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

The memory of a fetch, on the CPU or on a device, is in gather_memory.py and device_gather_memory.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from infinity.io.arena import ArenaRegion, Lease
from infinity.ranks.collective_queue import CollectiveQueue
from infinity.ranks.operations import CollectiveOperation
from infinity.sharded.gather_memory import Arrival, FillSlice, GatherMemories, copy_bytes
from infinity.state.shard import Shard
from infinity.tiers.destination import StateDestination, Written
from infinity.tiers.home import WeightsHome
from infinity.tiers.resources import ModelResources
from infinity.tiers.slots import Fetch, Slot


class GatheredSlotPool:
    """Slots of a model whose units are divided over ranks (SlotPool).

    Args:
        resources: resources of the model.
        collectives: queue of the collectives of the ranks.
        shards: this rank's shards, by unit.
        memories: source of the memory of fetches.
    """

    def __init__(
        self,
        resources: ModelResources,
        collectives: CollectiveQueue,
        shards: Sequence[Shard],
        memories: GatherMemories,
    ) -> None:
        self._resources = resources
        self._collectives = collectives
        self._memories = memories
        self._shards = {id(homes.weights): shard for homes, shard in zip(resources.units, shards, strict=True)}
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
        if copy is not None and copy.version == version:
            return self._gather(copy.shard, copy.own, near=True)

        def own(index: int, mine: memoryview) -> Callable[[], object]:
            return self._own(home, index, mine, after)

        fetch = self._gather(shard, own, near=False, keep=copy)
        if copy is not None:
            copy.version = version
        return fetch

    def _gather(self, shard: Shard, own: FillSlice, *, near: bool, keep: _SliceCopy | None = None) -> Fetch:
        """Start to gather weights.

        Args:
            shard: this rank's slice in the division over the ranks that gather.
            own: function that starts to bring this rank's slice of a group to its place, and returns a function that
                waits for the slice.
            near: whether to gather over G; False: over W.
            keep: copy that is filled from the gathered weights; None: no copy is filled.
        """
        memory = self._memories.of(shard, near=near)
        arrived: Arrival | None = None if keep is None else keep.fill
        groups = range(len(shard.full.groups))
        waits = [memory.fill(index, own) for index in groups]
        memory.begin()
        tickets = [
            self._collectives.submit(
                CollectiveOperation(
                    memory.gather(index),
                    shard.full.index,
                    f"unit '{shard.full.name}'",
                    after=waits[index],
                    arrived=partial(memory.arrived, index, arrived),
                )
            )
            for index in groups
        ]
        return memory.fetch(tickets)

    def _own(self, home: WeightsHome, index: int, mine: memoryview, after: Written) -> Callable[[], object]:
        group = home.groups[index]
        new = after.get(index, StateDestination(group))
        rests_in = new.rests_in
        if rests_in is not None:
            return partial(copy_bytes, mine, rests_in.view(group.start, group.nbytes), new.written)
        store = self._resources.require_store()
        return store.read(group.stored(), mine, copy_index=new.copy_index, after=new.written).result

    def counts(self, home: WeightsHome) -> bool:
        return True

    def waits(self, home: WeightsHome) -> bool:
        return self._memories.waits(self._shards[id(home)].full)

    def changed(self, home: WeightsHome, version: int, after: Written) -> None:
        return

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
        nbytes = shard.local.home_bytes
        self._lease = space.lease(nbytes, f"a copy of the weights of '{shard.full.name}'") if nbytes else None

    def own(self, index: int, mine: memoryview) -> Callable[[], object]:
        """Return a function that copies the slice of a group to `mine`, which is the slice's place in a slot. The slice
        must not be empty."""
        return partial(copy_bytes, mine, self._view(index))

    def fill(self, index: int, slot: Lease) -> None:
        """Fill the slice of a group from a slot that has all weights of the group."""
        begin, end = self.shard.weight_range(index, self.shard.cut.index)
        if begin < end:
            copy_bytes(self._view(index), slot.view(begin, end - begin))

    def _view(self, index: int) -> memoryview:
        if self._lease is None:
            raise AssertionError("a copy of nothing")
        groups = self.shard.local.groups
        return self._lease.view(sum(group.home_bytes for group in groups[:index]), groups[index].home_bytes)
