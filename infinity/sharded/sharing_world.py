"""Ranks that share all weights: rank 0 can use the weights without the other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from infinity.ranks.collective_queue import CollectiveQueue
from infinity.ranks.world import MultiRankWorld, same_class


class SharingWorld(MultiRankWorld):
    """World of ranks that share all weights."""

    gathers = False

    def __init__(self, collectives: CollectiveQueue) -> None:
        super().__init__(collectives)
        self._called: Counter[tuple[str, int]] = Counter()

    def lead(self, what: str, at: int, prepare: Callable[[], None], finish: Callable[[], None]) -> None:
        """Do the work of rank 0. Rank 0 may call this alone.

        Another rank that calls this waits for the call of rank 0 with the same `what` and `at`, and raises its error.
        `what` may differ between ranks from its first "/" on. In that case the rank waits for any call of rank 0 with
        the same beginning and the same `at`.

        Raises:
            InfinityError: rank 0 failed. The error has the class that World.each gives it.
            PeerError: a rank failed, or rank 0 has left and has not called this.
        """
        if not self.leads:
            self._called[what, at] += 1
            kind, text = self.collectives.wait_for_work(what, at, self._called[what, at])
            if kind:
                raise same_class(kind)(f"rank 0: {text}")
            return
        self.collectives.tell_work(what, at)
        try:
            prepare()
            finish()
        except BaseException as error:
            self.collectives.tell_work(what, at, ended=(type(error).__name__, str(error)))
            raise
        self.collectives.tell_work(what, at, ended=("", ""))

    def join_remaining_gathers(self, parts: Iterable[list[Any]]) -> None:
        return
