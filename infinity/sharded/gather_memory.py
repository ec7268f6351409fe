"""Memory of the fetches of ranks that gather weights: what a fetch needs of it, and slots in host memory.

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
from typing import Protocol

import torch

from infinity.io.arena import Lease, PinnedArena
from infinity.io.engine import Transfer
from infinity.io.store import wait_all
from infinity.plan.policy import long_from_top
from infinity.ranks.collective_queue import OperationFuture
from infinity.ranks.operations import AllGather, SharedPlace
from infinity.sharded.mailboxes import Mailboxes
from infinity.sizes import format_bytes
from infinity.state.shard import Shard
from infinity.state.unit import Unit
from infinity.tiers.decoding import SlotDecoder
from infinity.tiers.resources import ModelResources
from infinity.tiers.slots import Fetch, MaterializedHostSlot, Slot

logger = logging.getLogger(__name__)

FillSlice = Callable[[int, memoryview], Callable[[], object]]
"""Function that starts to bring this rank's slice of a group to memory, and returns a function that waits for it."""

Arrival = Callable[[int, Lease], None]
"""Function that is called with a group that has arrived, and the host memory in which it is."""


class GatherMemory(Protocol):
    """Memory of one fetch. Life cycle: fill() for each group → begin() → gather() for each group → fetch().

    All ranks make the same fetches in the same order.
    """

    def fill(self, index: int, own: FillSlice) -> list[Callable[[], object]]:
        """Say how this rank's slice of a group comes to its place. Return functions that wait for the slice, which the
        thread of the collectives calls in this order."""

    def begin(self) -> None:
        """Start to bring the slices to their places, now or when there is room."""

    def gather(self, index: int) -> AllGather:
        """Return the gather of a group."""

    def arrived(self, index: int, keep: Arrival | None) -> None:
        """Take note, on the thread of the collectives, that a group has arrived. `keep` is called with the group."""

    def fetch(self, tickets: Sequence[OperationFuture]) -> Fetch:
        """Return the fetch that ends when these gathers have ended."""


class GatherMemories(Protocol):
    """Source of the memory of fetches."""

    def of(self, shard: Shard, *, near: bool) -> GatherMemory:
        """Return memory for the next fetch.

        Args:
            shard: this rank's slice of the unit, in the division over the ranks that gather.
            near: whether to gather over G; False: over W (AllGather).
        """

    def waits(self, unit: Unit) -> bool:
        """Return whether the next fetch of a unit must wait until earlier fetches are finished. The result is the same
        on all ranks."""


class HostMemories:
    """Memory for slots in host memory (GatherMemories).

    Args:
        resources: resources of the model.
        mailboxes: memory that all ranks share, of which ModelResources.transfers is a part; None if the ranks share no
            memory.
    """

    def __init__(self, resources: ModelResources, mailboxes: Mailboxes | None = None) -> None:
        self._resources = resources
        self._mailboxes = mailboxes
        self._from_top = long_from_top(resources.transfers.free_bytes)
        self._told = False
        self._encoded = None if resources.decoding is None else _EncodedBuffers(resources.decoding)

    def of(self, shard: Shard, *, near: bool) -> GatherMemory:
        slot, mailboxes = self._lease(shard.full), None if near else self._mailboxes
        if not shard.full.encoded_bytes:
            return _HostMemory(shard, near, slot, mailboxes)
        if self._encoded is None:
            raise AssertionError("encoded weights, and nothing to decode them with")
        return self._encoded.next(shard, near, slot, mailboxes)

    def _lease(self, unit: Unit) -> Lease:
        nbytes = unit.weight_bytes
        lease = self._resources.transfers.try_lease(nbytes, from_top=self._from_top(nbytes))
        if lease is not None:
            return lease
        if not self._told:
            self._told = True
            warn_of_views(unit)
        return PinnedArena(nbytes).lease(nbytes, f"the weights of '{unit.name}'")

    def waits(self, unit: Unit) -> bool:
        return False


def warn_of_views(unit: Unit) -> None:
    """Warn that a slot takes more than the planned memory."""
    logger.warning(
        "views of weights that were used before keep their memory, or the free memory is in pieces, so unit '%s' takes "
        "%s more than memory.device; this warning appears once",
        unit.name,
        format_bytes(unit.weight_bytes),
    )


class _HostMemory:
    """Memory of one fetch to a slot in host memory (GatherMemory).

    A slice is brought to its place in the slot, from which other ranks get it. A slice of an encoded group must not be
    read into the buffer before the buffer is free. It is read ahead into the part of the slot into which the group will
    be decoded.

    Args:
        shard, near: see GatherMemories.of.
        slot: memory of the slot.
        mailboxes: memory that all ranks share; None if this fetch does not use any.
        encoded: buffer for the encoded weights of the unit; None if the unit has none.
        decoder: decoder of the encoded weights.
        before: decodings that read the buffer `encoded` before.

    Attributes:
        decodings: the decodings of the encoded groups that have arrived.
    """

    def __init__(
        self,
        shard: Shard,
        near: bool,
        slot: Lease,
        mailboxes: Mailboxes | None,
        encoded: Lease | None = None,
        decoder: SlotDecoder | None = None,
        before: Sequence[Transfer] = (),
    ) -> None:
        self._shard = shard
        self._near = near
        self._slot = slot
        self._mailboxes = mailboxes
        self._encoded = encoded
        self._decoder = decoder
        self._before = before
        self._places: dict[int, int] = {}  # of this rank's slices in the shared memory, by group
        self.decodings: list[Transfer] = []

    def fill(self, index: int, own: FillSlice) -> list[Callable[[], object]]:
        begin, end = self._shard.weight_range(index, self._shard.cut.index)
        lease, group, nbytes = self._of(index), self._shard.full.groups[index], end - begin
        self._places[index] = 0  # another rank needs no place of an empty slice
        if not nbytes:
            return [self._wait_for_buffer]
        if lease is self._slot:
            self._places[index] = self._place(begin)
            return [own(index, lease.view(begin, nbytes))]
        if nbytes <= group.weight_bytes:
            self._places[index] = self._place(group.weight_offset)
            ahead = self._slot.view(group.weight_offset, nbytes)
        else:  # a form with a scale for each weight is longer at home than in a slot
            self._places[index] = -1
            ahead = PinnedArena(nbytes).lease(nbytes, f"a slice of the weights of '{self._shard.full.name}'").view()
        return [own(index, ahead), self._wait_for_buffer, partial(copy_bytes, lease.view(begin, nbytes), ahead)]

    def begin(self) -> None:
        return

    def gather(self, index: int) -> AllGather:
        ranges = [self._shard.weight_range(index, rank) for rank in range(self._shard.cut.count)]
        buffer = self._of(index).tensor()[ranges[0][0] : ranges[-1][1]]
        shared = None if self._mailboxes is None else SharedPlace(self._places[index], self._mailboxes)
        return AllGather(buffer, [last - first for first, last in ranges], self._near, shared)

    def arrived(self, index: int, keep: Arrival | None) -> None:
        lease, unit, group = self._of(index), self._shard.full, self._shard.full.groups[index]
        if keep is not None:
            keep(index, lease)
        if self._decoder is not None and lease is self._encoded:
            data = lease.view(unit.encoded_offset(index), group.home_bytes)
            future = self._decoder.start([group], data, self._slot.view(), [])
            self.decodings.append(Transfer(future, unit.name, "weight"))

    def fetch(self, tickets: Sequence[OperationFuture]) -> Fetch:
        return _HostFetch(tickets, self._slot, self.decodings)

    def _of(self, index: int) -> Lease:
        """Return the memory in which a group is gathered."""
        return self._slot if self._shard.full.groups[index].codec is None or self._encoded is None else self._encoded

    def _place(self, begin: int) -> int:
        return -1 if self._mailboxes is None else self._mailboxes.place(self._slot, begin)

    def _wait_for_buffer(self) -> None:
        """Wait until the weights that were in the buffer before are decoded."""
        for decoding in self._before:
            decoding.wait()


class _EncodedBuffers:
    """Two buffers that take turns ([Note: encoded weights of ranks])."""

    def __init__(self, decoder: SlotDecoder) -> None:
        self._decoder = decoder
        space = decoder.encoded_space
        self._buffers = [space.lease(space.nbytes // 2, "encoded weights of all ranks") for _ in range(2)]
        self._decodings: list[Sequence[Transfer]] = [(), ()]
        self._turn = 0

    def next(self, shard: Shard, near: bool, slot: Lease, mailboxes: Mailboxes | None) -> _HostMemory:
        """Return memory for the next fetch, which decodes into `slot`."""
        turn = self._turn = 1 - self._turn
        before = self._decodings[turn]
        memory = _HostMemory(shard, near, slot, mailboxes, self._buffers[turn], self._decoder, before)
        self._decodings[turn] = memory.decodings
        return memory


class GatherFetch(Fetch):
    """Weights on their way from all ranks.

    Args:
        tickets: tickets of the gathers.
    """

    def __init__(self, tickets: Sequence[OperationFuture]) -> None:
        super().__init__()
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

    def _give_up(self) -> None:
        return


class _HostFetch(GatherFetch):
    def __init__(self, tickets: Sequence[OperationFuture], slot: Lease, decodings: Sequence[Transfer]) -> None:
        super().__init__(tickets)
        self._lease = slot
        self._decodings = decodings

    def wait(self) -> None:
        super().wait()
        for decoding in self._decodings:
            decoding.wait()

    def _slot(self) -> Slot:
        wait_all(self._decodings)
        return MaterializedHostSlot(self._lease)


def copy_bytes(to: memoryview, source: memoryview, written: Transfer | None = None) -> None:
    """Copy bytes.

    Args:
        to: target memory.
        source: source memory.
        written: transfer after which the source is complete; None when the source is already complete.
    """
    if written is not None:
        written.result()
    torch.frombuffer(to, dtype=torch.uint8).copy_(torch.frombuffer(source, dtype=torch.uint8))
