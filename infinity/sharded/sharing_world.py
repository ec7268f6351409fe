"""Ranks that share all weights: rank 0 can use the weights without the other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from infinity.ranks.collective_queue import CollectiveQueue
from infinity.ranks.world import MultiRankWorld


class SharingWorld(MultiRankWorld):
    """World of ranks that share all weights."""

    gathers = False

    def __init__(self, collectives: CollectiveQueue) -> None:
        super().__init__(collectives)
        self._led: Counter[str] = Counter()

    def lead(self, what: str, prepare: Callable[[], None], finish: Callable[[], None]) -> None:
        """Do the work of rank 0. Rank 0 may call this alone.

        If another rank calls this for the n-th time with the same `what`, it waits until rank 0 has ended its n-th such
        call. So if all ranks call this, they wait for rank 0. If rank 0 calls this alone, no rank waits.
        """
        if self.leads:
            try:
                prepare()
                finish()
            finally:
                self.collectives.did(what)
            return
        self._led[what] += 1
        self.collectives.wait_done(what, self._led[what])

    def join_remaining_gathers(self, parts: Iterable[list[Any]]) -> None:
        return
