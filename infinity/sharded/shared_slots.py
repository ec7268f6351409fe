"""Slots of weights that all ranks of a machine share (shared_homes.py).

On the CPU the shared memory itself is the slot. On a device, each rank copies the weights over its own link.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from infinity.base.interrupt import interruptible
from infinity.errors import PeerError
from infinity.io.engine import BackgroundWork
from infinity.ranks.collective_queue import CollectiveQueue
from infinity.ranks.watch import listed
from infinity.sharded.shared_homes import SharedHomes
from infinity.tiers.destination import Written
from infinity.tiers.home import WeightsHome
from infinity.tiers.slots import Fetch, Slot, SlotPool
from infinity.units.fetch_rules import SingleProcessFetchRules
from infinity.units.unit import OffloadedUnit

_POLL_S = 0.25


class SharedSlotPool:
    """Slots of complete units, filled from weights that all ranks share (SlotPool). A fetch is no collective.

    Args:
        slots: pool that fills slots from the homes of complete units.
        shared: the weights.
        local: homes of this rank's slices, by unit.
        collectives: queue of the collectives, which knows when a rank fails.
    """

    def __init__(
        self, slots: SlotPool, shared: SharedHomes, local: Sequence[WeightsHome], collectives: CollectiveQueue
    ) -> None:
        self._slots = slots
        self._shared = shared
        self._index = {id(home): index for index, home in enumerate(local)}
        self._collectives = collectives

    def start(self, home: WeightsHome, after: Written, version: int) -> Fetch | None:
        """Wait until all ranks have published their slices, and start to fetch the weights.

        Raises:
            PeerError: a rank failed, or did not publish its slice within the ranks' deadline.
        """
        self._collectives.act()
        index = self._index[id(home)]
        behind = self._shared.behind(index, version)
        if behind:
            with interruptible():
                self._wait(index, version, behind)
        return self._slots.start(self._shared.complete[index], {}, version)

    def _wait(self, index: int, version: int, ranks: Iterable[int]) -> None:
        began, deadline_s = time.monotonic(), self._collectives.deadline_s
        for rank in ranks:
            while not self._shared.wait(index, version, rank, _POLL_S):
                self._collectives.raise_if_broken()
                if time.monotonic() > began + deadline_s:
                    late = self._shared.behind(index, version)
                    name = self._shared.complete[index].name
                    raise PeerError(
                        f"rank{'s' * (len(late) > 1)} {listed(late)} did not update unit '{name}' within "
                        f"{deadline_s:g} s (ranks.deadline_s)",
                        tuple(late),
                    )

    def free(self, slot: Slot) -> None:
        slot.free()

    def counts(self, home: WeightsHome) -> bool:
        return self._slots.counts(self._complete(home))

    def waits(self, home: WeightsHome) -> bool:
        return self._slots.waits(self._complete(home))

    def changed(self, home: WeightsHome, version: int, after: Written) -> BackgroundWork:
        return self._shared.publish(self._index[id(home)], version, after)

    def _complete(self, home: WeightsHome) -> WeightsHome:
        return self._shared.complete[self._index[id(home)]]


class SharedFetchRules(SingleProcessFetchRules):
    """Fetch rules of ranks that share all weights (FetchRules): those of a single process, except for updates, which
    other ranks make, too."""

    keeps_slots = False

    def __init__(self, shared: SharedHomes) -> None:
        self._shared = shared

    def may_prefetch(self, unit: OffloadedUnit) -> bool:
        return super().may_prefetch(unit) and not self._shared.behind(unit.index, unit.version)
