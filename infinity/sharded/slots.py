"""Weights that are put together from the slices of all ranks, each time they are used, in host memory.

[Note: gathering]
A fetch is a collective: every rank begins the same fetches in the same order, whatever it has room for at that moment
and however far its updates are. So a fetch never waits for memory: where views that somebody holds keep the memory of a
slot that was given up, the next slot takes memory of its own for a while. What must come first on this rank alone (the
update of its slice, the read of it) is waited for by the thread of the exchange.

[Note: the secondary partition]
Where weights are gathered over fewer ranks than states are sharded over (G ⊂ W), each rank keeps a copy of its slice
among the ranks of G, in RAM. The first fetch after an update gathers over W and fills the copies; the fetches after
that gather over G. Which of the two a fetch does follows from the version of the weights, so it is the same on every
rank. (Wang et al., ZeRO++, 2023, §3.2, whose secondary partition this is; with G = one rank it is ZeRO-2.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch

from infinity.io.arena import Lease, PinnedArena, Space
from infinity.io.engine import Transfer
from infinity.plan.policy import long_from_top
from infinity.ranks.exchange import Exchange, Ticket
from infinity.ranks.operations import Gather, Operation
from infinity.sizes import format_bytes
from infinity.state.shard import Shard
from infinity.tiers.destination import Destination, Written
from infinity.tiers.home import WeightsHome
from infinity.tiers.resources import Resources
from infinity.tiers.slots import CopiedSlot, Fetch, Slot

logger = logging.getLogger(__name__)

_Wait = Callable[[], object]
"""Waits until this rank's slice is in its place (Operation.after)."""


class GatheredSlots:
    """The slots of a model whose units are cut over ranks (SlotPool).

    Args:
        shards: by unit.
    """

    def __init__(self, resources: Resources, exchange: Exchange, shards: Sequence[Shard]) -> None:
        self._resources = resources
        self._exchange = exchange
        self._shards = {id(homes.weights): shard for homes, shard in zip(resources.units, shards, strict=True)}
        self._from_top = long_from_top(resources.arena.free_bytes)
        self._told = False
        self._copies: dict[int, _Copy] = {}
        near = resources.plan.peers.near
        if near is not None:  # the same on all ranks, of which some may have a slice of nothing
            for homes, shard in zip(resources.units, shards, strict=True):
                if not shard.unit.stays:
                    self._copies[id(homes.weights)] = _Copy(near.of(shard.unit), resources.secondary)

    def start(self, home: WeightsHome, after: Written, version: int) -> Fetch:
        """Never None: see [Note: gathering]. Raises PeerError: the exchange is broken."""
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
        keep: _Copy | None = None,
    ) -> Fetch:
        """Args: own: what brings this rank's slice of a group to its place; keep: takes what has come."""
        tickets = []
        for index, group in enumerate(shard.unit.groups):
            begin, end = shard.weight_range(index, shard.cut.index)
            slices = [
                last - first for first, last in (shard.weight_range(index, rank) for rank in range(shard.cut.count))
            ]
            buffer = lease.tensor()[group.weight_offset : group.weight_offset + group.weight_bytes]
            operation = Operation(
                Gather(buffer, slices, near),
                shard.unit.index,
                f"unit '{shard.unit.name}'",
                after=[own(index, lease.view(begin, end - begin))] if begin < end else [],
                arrived=None if keep is None else partial(keep.fill, index, lease),
            )
            tickets.append(self._exchange.submit(operation))
        return _GatherFetch(lease, tickets)

    def _lease(self, shard: Shard) -> Lease:
        nbytes = shard.unit.weight_bytes
        lease = self._resources.arena.try_lease(nbytes, from_top=self._from_top(nbytes))
        if lease is not None:
            return lease
        if not self._told:
            self._told = True
            logger.warning(
                "views of weights that were used before keep their memory, so unit '%s' takes %s beyond memory.device; "
                "this is said once",
                shard.unit.name,
                format_bytes(nbytes),
            )
        return PinnedArena(nbytes).lease(nbytes, f"the weights of '{shard.unit.name}'")

    def _own(self, home: WeightsHome, index: int, mine: memoryview, after: Written) -> _Wait:
        group = home.groups[index]
        new = after.get(index, Destination(group))
        rests_in = new.rests_in
        if rests_in is not None:
            return partial(_copy, mine, rests_in.view(group.start, group.nbytes), new.written)
        store = self._resources.require_store()
        return store.read(group.stored(), mine, copy=new.copy, after=new.written).result

    def counts(self, home: WeightsHome) -> bool:
        return True

    def waits(self, home: WeightsHome) -> bool:
        return False

    def free(self, slot: Slot) -> None:
        slot.free()


class _Copy:
    """This rank's slice, among the ranks of G, of the weights of a unit. Filled and read on the thread of the exchange.

    Attributes:
        shard: the slice.
        version: of the weights it has, or will have before anybody reads it; -1: none yet.
    """

    def __init__(self, shard: Shard, space: Space) -> None:
        self.shard = shard
        self.version = -1
        nbytes = shard.local.weight_bytes
        self._lease = space.lease(nbytes, f"a copy of the weights of '{shard.unit.name}'") if nbytes else None

    def own(self, index: int, mine: memoryview) -> _Wait:
        """Args: mine: the place of a group's slice, of which there is something."""
        return partial(_copy, mine, self._view(index))

    def fill(self, index: int, slot: Lease) -> None:
        """Args: slot: has all weights of a group."""
        begin, end = self.shard.weight_range(index, self.shard.cut.index)
        if begin < end:
            _copy(self._view(index), slot.view(begin, end - begin))

    def _view(self, index: int) -> memoryview:
        if self._lease is None:
            raise AssertionError("a copy of nothing")
        group = self.shard.local.groups[index]
        return self._lease.view(group.weight_offset, group.weight_bytes)


def _copy(to: memoryview, source: memoryview, written: Transfer | None = None) -> None:
    """Args: written: when the source has its new values; None: now."""
    if written is not None:
        written.result()
    torch.frombuffer(to, dtype=torch.uint8).copy_(torch.frombuffer(source, dtype=torch.uint8))


class _GatherFetch(Fetch):
    def __init__(self, lease: Lease, tickets: Sequence[Ticket]) -> None:
        super().__init__()
        self._lease = lease
        self._tickets = tickets

    def wait(self) -> None:
        for ticket in self._tickets:
            ticket.wait()

    def finish(self) -> Slot:
        """Raises PeerError; the memory stays where it is, as a rank may still write to it."""
        for ticket in self._tickets:
            ticket.result()
        return self._slot()

    def _slot(self) -> Slot:
        return CopiedSlot(self._lease)

    def _give_up(self) -> None:
        return
