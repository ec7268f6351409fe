"""The window of ranks that gather weights through memory that they share.

The weights rest in the store of each rank, or in its RAM. Each rank brings its slice to the window, and all ranks copy
it from there. On the CPU the window has this rank's slots. A slice is read to its place in the slot, and other ranks
copy it to their slots. On a device the window has this rank's slices of two fetches, and all ranks copy them to slots
on their devices.
"""

from __future__ import annotations

from collections.abc import Sequence

from infinity.base.accelerator import Accelerator
from infinity.io.arena import ArenaRegion
from infinity.io.store import Extent
from infinity.plan.layout import UnitLayout
from infinity.ranks.shared_memory import SharedMemory
from infinity.ranks.world import World
from infinity.sharded.shared_arena import SharedArena, part
from infinity.sizes import PAGE_BYTES, round_up
from infinity.state.shard import RankPartition
from infinity.tiers.home import WeightsHome
from infinity.tiers.weights_memory import OwnWeightsMemory


class SharedWindow:
    """The window (WeightsMemory). All ranks make this object at the same time.

    The homes of weights are in memory of this process.

    Args:
        memory: the memory, which this object closes.
        cut: number of this rank, and of ranks.
        world: the ranks.
        exchange_bytes: bytes of this rank's gradients on their way to other ranks.
        transfer_bytes: bytes of the window.

    Attributes:
        shared: the shared memory.
        mailboxes: exchanges between the ranks.
        gradients: memory for this rank's gradients on their way to other ranks.

    Raises:
        NotAvailableError: there is too little memory. All ranks raise an error.
        PeerError: another rank failed.
    """

    def __init__(
        self, memory: SharedMemory, cut: RankPartition, world: World, exchange_bytes: int, transfer_bytes: int
    ) -> None:
        own_bytes = round_up(exchange_bytes, PAGE_BYTES) + round_up(transfer_bytes, PAGE_BYTES)
        self.shared = shared = SharedArena(memory, cut, world, 0, own_bytes)
        self._homes = OwnWeightsMemory()
        self.mailboxes = shared.mailboxes
        self.gradients = part(shared.own, exchange_bytes, "gradients between ranks").space()
        slots = part(shared.own, transfer_bytes, "weights of all ranks")
        self._transfers = slots.space()
        world.each("taking the shared memory", lambda: shared.populate(slots))

    def open(self, layout: UnitLayout, extents: Sequence[Extent | None], resting: ArenaRegion) -> WeightsHome:
        return self._homes.open(layout, extents, resting)

    def transfers(self, arena: ArenaRegion) -> ArenaRegion:
        return self._transfers

    def pin(self, accelerator: Accelerator) -> str:
        return self.shared.pin(accelerator, [])

    def close(self) -> None:
        return

    def give_back(self) -> None:
        self.shared.give_back()
