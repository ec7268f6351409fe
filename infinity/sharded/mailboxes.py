"""Exchange of gradients and weights through memory that all ranks of a machine share, without sockets.

[Note: one exchange]
The headers of an operation tell all ranks where the pieces of each rank are in the shared memory (ranks/headers.py).
Two counters of each rank, which count exchanges, order the copies:

    my pieces are complete → `ready` advanced → for each other rank: its `ready` awaited, its piece for me copied →
    `copied` advanced → `copied` of all other ranks awaited → my pieces may be written again

All ranks make the same exchanges in the same order, which the queue of the collectives has checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from infinity import _native
from infinity.io.arena import Lease, PinnedArena
from infinity.ranks.operations import PieceCopies
from infinity.state.shard import RankPartition

_POLL_S = 0.25


class Mailboxes:
    """Exchanges of this rank (SharedExchange).

    Args:
        arena: the shared memory.
        counters: two counters for each rank.
        cut: number of this rank, and of ranks.
    """

    def __init__(self, arena: PinnedArena, counters: _native.SharedCounters, cut: RankPartition) -> None:
        self._arena = arena
        self._counters = counters
        self._rank, self._count = cut.index, cut.count
        self._done = 0

    def place(self, lease: Lease, begin: int) -> int:
        """Return the place in the shared memory of byte `begin` of a lease; -1 if the lease is elsewhere."""
        return lease.offset + begin if lease.is_in(self._arena.memory) else -1

    def exchange(
        self,
        places: Sequence[int],
        pieces: Sequence[torch.Tensor],
        copies: PieceCopies,
        check: Callable[[], None],
    ) -> None:
        """Receive pieces from other ranks, and wait until all ranks have received theirs (SharedExchange)."""
        self._done = (self._done + 1) % 2**32
        self._counters.advance(self._ready(self._rank), self._done)
        for step in range(self._count):
            rank = (self._rank + step) % self._count  # so that not all ranks read the same memory at the same time
            self._wait(self._ready(rank), check)
            piece = pieces[rank]
            if piece.numel():
                source = self._arena.memory.view(places[rank], piece.numel())
                copies.copy(piece, torch.frombuffer(source, dtype=torch.uint8))
        copies.wait(check)
        self._counters.advance(self._copied(self._rank), self._done)
        for rank in range(self._count):
            self._wait(self._copied(rank), check)

    def _wait(self, counter: int, check: Callable[[], None]) -> None:
        while not self._counters.wait(counter, self._done, _POLL_S):
            check()

    def _ready(self, rank: int) -> int:
        return 2 * rank

    def _copied(self, rank: int) -> int:
        return 2 * rank + 1
