"""Memory that all ranks of a machine have mapped, and its parts.

[Note: the shared memory]

    counters │ memory in common │ memory of rank 0 │ memory of rank 1 │ …

There are two counters for each rank, for the exchanges (mailboxes.py), and one for the ranks that have closed. The
memory in common has the weights, if the ranks share these (shared_homes.py). The memory of a rank has its gradients on
their way to other ranks and, if the ranks gather weights, the slices that it passes to other ranks (shared_window.py).
All ranks read all memory. A rank writes to its own memory, and to its slices of the weights.

A page belongs to the NUMA node of the rank that first writes it, which is its owner.
"""

from __future__ import annotations

from collections.abc import Callable

from infinity import _native
from infinity.base.accelerator import Accelerator
from infinity.errors import NotAvailableError
from infinity.io.arena import ArenaRegion, Lease, PinnedArena
from infinity.ranks.shared_memory import SharedMemory
from infinity.ranks.world import World
from infinity.sharded.mailboxes import Mailboxes
from infinity.sizes import PAGE_BYTES, format_bytes, round_up
from infinity.state.shard import RankPartition

COUNTER_BYTES = 64


class SharedArena:
    """The shared memory, as this rank has mapped it. All ranks make it at the same time.

    Args:
        memory: the memory, which this object closes.
        cut: number of this rank, and of ranks.
        world: the ranks.
        common_bytes: bytes of the memory in common, the same on all ranks.
        own_bytes: bytes of this rank's memory.

    Attributes:
        arena: the mapping.
        common: the memory in common.
        own: this rank's memory.
        mailboxes: exchanges between the memory of all ranks.

    Raises:
        NotAvailableError: there is too little memory. All ranks raise an error.
        PeerError: another rank failed.
    """

    def __init__(
        self, memory: SharedMemory, cut: RankPartition, world: World, common_bytes: int, own_bytes: int
    ) -> None:
        counters = round_up((2 * cut.count + 1) * COUNTER_BYTES, PAGE_BYTES)
        sizes: list[int] = world.tell("dividing the shared memory", own_bytes)
        nbytes = counters + common_bytes + sum(sizes)
        try:
            memory.size(nbytes)
            self.arena = PinnedArena(nbytes, fd=memory.fileno())
        finally:
            memory.close()
        self._world = world
        self._cut = cut
        self._counters = _native.SharedCounters(self.arena.lease(counters, "the counters of the ranks").view())
        common = part(self.arena, common_bytes, "memory in common")
        parts = [part(self.arena, nbytes, f"memory of rank {rank}") for rank, nbytes in enumerate(sizes)]
        self.common = common.space()
        self._mine = parts[cut.index]
        self.own = self._mine.space()
        self.mailboxes = Mailboxes(self.arena, self._counters, cut)
        self._ends = [each.offset + each.nbytes for each in parts if each.nbytes]

    def populate(self, lease: Lease) -> None:
        """Take memory for the pages of a lease.

        Raises:
            NotAvailableError: there is too little memory.
        """
        self.take(lambda: self.arena.memory.populate(lease.offset, lease.nbytes))

    def take(self, populate: Callable[[], None]) -> None:
        """Take memory for pages. Args: populate: function that does it, and raises OSError.

        Raises:
            NotAvailableError: there is too little memory.
        """
        try:
            populate()
        except OSError as error:
            raise NotAvailableError(
                f"there is no memory for this rank's share of {format_bytes(self.arena.nbytes)} that the ranks share "
                f"({error.strerror}). Lower memory.host, or set ranks.wire: gloo."
            ) from error

    def pin(self, accelerator: Accelerator, ends: list[int]) -> str:
        """Pin the shared memory (PinnedArena.pin). All ranks call this.

        The ranks pin one after the other, because two registrations of the same pages at the same time may fail. Each
        rank has taken its own memory before, on its own NUMA node.

        Args:
            accelerator: the device that copies.
            ends: offsets in the memory in common at which a registration may end.

        Raises:
            PeerError: another rank failed.
        """
        self._world.each("taking this rank's part of the shared memory", lambda: self.populate(self._mine))
        refused = ""
        for turn in range(self._cut.count):
            self._world.tell("pinning the shared memory", turn)
            if turn == self._cut.index:  # this may take minutes; with each piece the other ranks wait longer
                refused = self.arena.pin(accelerator, ends=[*ends, *self._ends], pinned=self._world.act)
        return refused

    def give_back(self) -> None:
        """Free the memory, even while references to it exist, once all ranks have called this.

        If a rank never calls this, the memory is freed when the last process has let go of it.
        """
        self.arena.unpin()
        if self._counters.add(2 * self._cut.count) == self._cut.count - 1:
            self.arena.give_all_back()


def part(space: ArenaRegion, nbytes: int, what: str) -> Lease:
    """Lease a part of the shared memory until it is freed; it may be empty."""
    return space.lease(nbytes, what) if nbytes else Lease(space, 0, 0)
