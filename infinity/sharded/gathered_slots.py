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

[Note: encoded weights of ranks]
The ranks gather the bytes of encoded weights in a buffer, and each rank decodes them into its slot. Two buffers take
turns, in the order of the fetches. Before anything is written to a buffer, the thread of the collectives waits until
the weights that were in the buffer before are decoded. This is local work and always ends, so the ranks need not agree
about it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch

from infinity.io.arena import ArenaRegion, Lease, PinnedArena
from infinity.io.engine import Transfer
from infinity.io.store import wait_all
from infinity.plan.policy import long_from_top
from infinity.ranks.collective_queue import CollectiveQueue, OperationFuture
from infinity.ranks.operations import AllGather, CollectiveOperation
from infinity.sizes import format_bytes
from infinity.state.shard import Shard
from infinity.state.unit import Unit
from infinity.tiers.decoding import SlotDecoder
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
        self._encoded = None if resources.decoding is None else _EncodedBuffers(resources.decoding)
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
        memory = self._memory(shard)
        if copy is not None and copy.version == version:
            return self._gather(memory, copy.shard, near=True, own=copy.own)

        def own(index: int, mine: memoryview) -> _Wait:
            return self._own(home, index, mine, after)

        fetch = self._gather(memory, shard, near=False, own=own, keep=copy)
        if copy is not None:
            copy.version = version
        return fetch

    def _gather(
        self,
        memory: _GatherMemory,
        shard: Shard,
        *,
        near: bool,
        own: Callable[[int, memoryview], _Wait],
        keep: _SliceCopy | None = None,
    ) -> Fetch:
        """Start to gather weights.

        Args:
            memory: memory of the slot, and of the encoded weights.
            shard: this rank's slice in the division over the ranks that gather.
            near: whether to gather over G; False: over W.
            own: function that starts to bring this rank's slice of a group to its place, and returns a function that
                waits for the slice.
            keep: copy that is filled from the gathered weights; None: no copy is filled.
        """
        tickets = []
        for index in range(len(shard.full.groups)):
            ranges = [shard.weight_range(index, rank) for rank in range(shard.cut.count)]
            (begin, end), lease = ranges[shard.cut.index], memory.of(shard.full, index)
            operation = CollectiveOperation(
                AllGather(lease.tensor()[ranges[0][0] : ranges[-1][1]], [last - first for first, last in ranges], near),
                shard.full.index,
                f"unit '{shard.full.name}'",
                after=self._filled(memory, shard, index, own) if begin < end else [memory.wait_for_buffer],
                arrived=partial(memory.arrived, shard.full, index, keep),
            )
            tickets.append(self._collectives.submit(operation))
        return _GatherFetch(memory, tickets)

    def _filled(
        self, memory: _GatherMemory, shard: Shard, index: int, own: Callable[[int, memoryview], _Wait]
    ) -> list[Callable[[], object]]:
        """Start to bring this rank's slice of a group to its place. Return the functions that wait for the slice.

        A slice of an encoded group must not be read into the buffer before the buffer is free. It is read ahead into
        the part of the slot into which the group will be decoded.
        """
        begin, end = shard.weight_range(index, shard.cut.index)
        lease, group, nbytes = memory.of(shard.full, index), shard.full.groups[index], end - begin
        if lease is not memory.encoded:
            return [own(index, lease.view(begin, nbytes))]
        if nbytes <= group.weight_bytes:
            ahead = memory.slot.view(group.weight_offset, nbytes)
        else:  # a form with a scale for each weight is longer at home than in a slot
            ahead = PinnedArena(nbytes).lease(nbytes, f"a slice of the weights of '{shard.full.name}'").view()
        return [own(index, ahead), memory.wait_for_buffer, partial(_copy, lease.view(begin, nbytes), ahead)]

    def _memory(self, shard: Shard) -> _GatherMemory:
        """Return memory for the weights of a unit, and for the encoded weights if it has any."""
        slot = self._lease(shard)
        if not shard.full.encoded_bytes:
            return _GatherMemory(slot)
        if self._encoded is None:
            raise AssertionError("encoded weights, and nothing to decode them with")
        return self._encoded.next(slot)

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

    def changed(self, home: WeightsHome, version: int, after: Written) -> None:
        return

    def free(self, slot: Slot) -> None:
        slot.free()


class _GatherMemory:
    """Memory of one fetch.

    Attributes:
        slot: memory of the slot.
        encoded: buffer for the encoded weights of the unit; None if the unit has none.
        decodings: the decodings of the encoded groups that have arrived.

    Args:
        decoder: decoder of the encoded weights.
        before: decodings that read the buffer `encoded` before.
    """

    def __init__(
        self,
        slot: Lease,
        encoded: Lease | None = None,
        decoder: SlotDecoder | None = None,
        before: Sequence[Transfer] = (),
    ) -> None:
        self.slot = slot
        self.encoded = encoded
        self.decodings: list[Transfer] = []
        self._decoder = decoder
        self._before = before

    def of(self, unit: Unit, index: int) -> Lease:
        """Return the memory in which a group is gathered."""
        return self.slot if unit.groups[index].codec is None or self.encoded is None else self.encoded

    def wait_for_buffer(self) -> None:
        """Wait until the weights that were in the buffer before are decoded."""
        for decoding in self._before:
            decoding.wait()

    def arrived(self, unit: Unit, index: int, keep: _SliceCopy | None) -> None:
        """Copy this rank's slice of a group that has arrived, and start to decode the group if it is encoded.

        Args:
            unit: the complete unit.
            index: index of the group.
            keep: the copy; None: no slice is copied.
        """
        lease, group = self.of(unit, index), unit.groups[index]
        if keep is not None:
            keep.fill(index, lease)
        if self._decoder is not None and lease is self.encoded:
            data = lease.view(unit.encoded_offset(index), group.home_bytes)
            future = self._decoder.start([group], data, self.slot.view(), [])
            self.decodings.append(Transfer(future, unit.name, "weight"))


class _EncodedBuffers:
    """Two buffers that take turns ([Note: encoded weights of ranks])."""

    def __init__(self, decoder: SlotDecoder) -> None:
        self._decoder = decoder
        space = decoder.encoded_space
        self._buffers = [space.lease(space.nbytes // 2, "encoded weights of all ranks") for _ in range(2)]
        self._decodings: list[Sequence[Transfer]] = [(), ()]
        self._turn = 0

    def next(self, slot: Lease) -> _GatherMemory:
        """Return memory for the next fetch, which decodes into `slot`."""
        self._turn = 1 - self._turn
        memory = _GatherMemory(slot, self._buffers[self._turn], self._decoder, self._decodings[self._turn])
        self._decodings[self._turn] = memory.decodings
        return memory


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
        groups = self.shard.local.groups
        return self._lease.view(sum(group.home_bytes for group in groups[:index]), groups[index].home_bytes)


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
    def __init__(self, memory: _GatherMemory, tickets: Sequence[OperationFuture]) -> None:
        super().__init__()
        self._memory = memory
        self._tickets = tickets

    def wait(self) -> None:
        for ticket in self._tickets:
            ticket.wait()
        for decoding in self._memory.decodings:
            decoding.wait()

    def finish(self) -> Slot:
        """Wait for the weights, and return their slot.

        Raises:
            PeerError: another rank failed. The memory is not given back, because a rank may still write to it.
        """
        for ticket in self._tickets:
            ticket.result()
        wait_all(self._memory.decodings)
        return self._slot()

    def _slot(self) -> Slot:
        return MaterializedHostSlot(self._memory.slot)

    def _give_up(self) -> None:
        return
