"""Communication of a process with the other processes that train the same model.

A process that trains alone uses `SingleProcessWorld`, so that no code must ask whether there are other processes. All
ranks make the same calls in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from infinity.errors import ConfigError, InfinityError, ModelError, PeerError, PlanError, ResumeError
from infinity.quoting import raised
from infinity.ranks.collective_queue import CollectiveQueue

_SIGN_OF_LIFE_S = 10.0
_SAME_CLASS: dict[str, type[InfinityError]] = {
    each.__name__: each for each in (ConfigError, ModelError, PlanError, ResumeError)
}
"""Errors that World.each raises with the same class on every rank, by the name of the class."""


def same_class(name: str) -> type[InfinityError]:
    """Return the class of the error that a rank raises after an error with this class's name on another rank."""
    return _SAME_CLASS.get(name, InfinityError)


class World(ABC):
    """All ranks of a run, each of which trains on a part of the batch.

    Attributes:
        rank: number of this process.
        size: number of ranks.
        gathers: whether a fetch of weights is a collective, which all ranks must make together.
    """

    rank: int
    size: int
    gathers: bool = False

    @property
    def leads(self) -> bool:
        """Whether this process does the work that is done once for all ranks."""
        return self.rank == 0

    def act(self) -> None:
        """Count an act of this rank that the other ranks need not make. They wait longer for a rank that goes on."""
        return

    @abstractmethod
    def tell(self, what: str, told: Any) -> list[Any]:
        """Wait until all ranks make this call, and return the JSON value of each rank. Raises PeerError.

        Args:
            what: description of the common activity. It must be the same on all ranks, except for a path at its end.
            told: JSON value of this rank.
        """

    @abstractmethod
    def each(self, what: str, act: Callable[[], Any]) -> list[Any]:
        """Call a function on all ranks, and return the results of all ranks. The results must be JSON values.

        An error of the function on one rank is raised on all ranks. After the error the ranks can continue.

        Args:
            what: description of the common activity, the same on all ranks.
            act: function to call.

        Raises:
            InfinityError: `act` failed on another rank, and the message names this rank. The error has the class of the
                other rank's error if this class is ConfigError, ModelError, PlanError or ResumeError. If `act` failed
                on this rank, this rank raises its own error.
            PeerError: a rank has ended, or makes another call.
        """

    def once(self, what: str, act: Callable[[], None]) -> None:
        """Call a function only on rank 0. All ranks wait for it. Raises the errors of each()."""
        self.each(what, act if self.leads else lambda: None)

    @abstractmethod
    def once_slow(self, what: str, act: Callable[[], None]) -> None:
        """Do the work of once(), for a function that may take longer than the ranks' deadline."""

    @abstractmethod
    def lead(self, what: str, at: int, prepare: Callable[[], None], finish: Callable[[], None]) -> None:
        """Do work of rank 0 that reads weights. The other ranks wait for rank 0.

        Args:
            what: description of the work. It must be the same on all ranks, except for a path at its end.
            at: number of steps so far, the same on all ranks.
            prepare: function that reads weights. If fetches are collectives, all ranks call it; otherwise rank 0 does.
            finish: function that only rank 0 calls afterwards. It may take longer than the ranks' deadline.

        Raises:
            The errors of each().
        """

    @abstractmethod
    def join_remaining_gathers(self, parts: Iterable[list[Any]]) -> None:
        """Take part in the remaining gathers of a loop that all ranks run, even if this rank cannot continue."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Tell all ranks that this rank cannot continue. Does not raise."""

    @abstractmethod
    def explain(self, error: RuntimeError) -> PeerError:
        """Return why a collective outside of infinity has failed, with the error of the rank at fault if it is known.

        All ranks then know that the run ends.
        """

    @abstractmethod
    def close(self) -> bool:
        """Leave the other ranks. Return whether other ranks no longer use this rank's memory. A second call does
        nothing."""


class SingleProcessWorld(World):
    """World of one process."""

    rank, size = 0, 1

    def tell(self, what: str, told: Any) -> list[Any]:
        return [told]

    def each(self, what: str, act: Callable[[], Any]) -> list[Any]:
        return [act()]

    def once_slow(self, what: str, act: Callable[[], None]) -> None:
        act()

    def lead(self, what: str, at: int, prepare: Callable[[], None], finish: Callable[[], None]) -> None:
        prepare()
        finish()

    def join_remaining_gathers(self, parts: Iterable[list[Any]]) -> None:
        return

    def fail(self, error: BaseException) -> None:
        return

    def explain(self, error: RuntimeError) -> PeerError:
        return PeerError(raised(error))

    def close(self) -> bool:
        return True


class MultiRankWorld(World):
    """World of several ranks; in tests also of a single rank."""

    gathers = True

    def __init__(self, collectives: CollectiveQueue) -> None:
        self.collectives = collectives
        self.rank, self.size = collectives.rank, collectives.world

    def act(self) -> None:
        self.collectives.act()

    def tell(self, what: str, told: Any) -> list[Any]:
        return self.collectives.tell(what, told)

    def each(self, what: str, act: Callable[[], Any]) -> list[Any]:
        failed, mine = None, None
        try:
            mine = act()
        except PeerError:
            raise
        except Exception as error:
            failed = error
        told = self.tell(what, [type(failed).__name__, str(failed), mine])
        if failed is not None:
            raise failed
        for rank, (kind, problem, _) in enumerate(told):
            if kind != "NoneType":
                raise same_class(kind)(f"rank {rank}: {problem}")
        return [found for *_, found in told]

    def once_slow(self, what: str, act: Callable[[], None]) -> None:
        with ThreadPoolExecutor(1, "infinity-led") as apart:
            doing = apart.submit(act) if self.leads else None

            def is_done() -> bool:
                return doing is None or not wait([doing], _SIGN_OF_LIFE_S).not_done

            while not self.tell(what, is_done())[0]:
                pass
            self.each(what, lambda: None if doing is None else doing.result())

    def lead(self, what: str, at: int, prepare: Callable[[], None], finish: Callable[[], None]) -> None:
        self.each(what, prepare)
        self.once_slow(f"the end of {what}", finish)

    def join_remaining_gathers(self, parts: Iterable[list[Any]]) -> None:
        for part in parts:
            part.clear()

    def fail(self, error: BaseException) -> None:
        self.collectives.fail(error)

    def explain(self, error: RuntimeError) -> PeerError:
        return self.collectives.explain(error, "a collective outside of infinity")

    def close(self) -> bool:
        return self.collectives.close()
