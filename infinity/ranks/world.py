"""What a process says to the others that train one model with it. A process that is alone has `Alone`, so that nobody
asks whether there are others.

All ranks make the same calls in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from infinity.errors import ConfigError, InfinityError, ModelError, PeerError, PlanError, ResumeError
from infinity.ranks.exchange import Exchange

_SIGN_OF_LIFE_S = 10.0
_SAME_CLASS = {each.__name__: each for each in (ConfigError, ModelError, PlanError, ResumeError)}
"""Errors that are of the same class on every rank."""


class World(ABC):
    """The ranks, each with its share of a batch.

    Attributes:
        rank: this process among them.
        size: their number.
    """

    rank: int
    size: int

    @property
    def leads(self) -> bool:
        """Whether this process does what is done once for all ranks."""
        return self.rank == 0

    @abstractmethod
    def tell(self, what: str, told: Any) -> list[Any]:
        """Wait until all ranks are here, and hear what each of them tells, in JSON. Raises PeerError.

        Args:
            what: the ranks are at; the same on all of them, but for a path at its end.
        """

    @abstractmethod
    def each(self, what: str, act: Callable[[], Any]) -> list[Any]:
        """Do something on all ranks. Returns what `act` returned on each, which JSON can hold. An error of one rank is
        raised on all, and the ranks can go on.

        Raises:
            InfinityError: one that names the rank where `act` failed, of the class that `act` raised there where that
                is ConfigError, ModelError, PlanError or ResumeError; here what it raised.
            PeerError: a rank is not there any more, or is at something else.
        """

    def once(self, what: str, act: Callable[[], None]) -> None:
        """Have rank 0 do something once for all ranks. Raises as each()."""
        self.each(what, act if self.leads else lambda: None)

    @abstractmethod
    def once_slow(self, what: str, act: Callable[[], None]) -> None:
        """Like once(), for work that may take longer than ranks wait for each other."""

    @abstractmethod
    def gather_rest(self, parts: Iterable[list[Any]]) -> None:
        """Go through parts that all ranks gather, also where this one cannot go on."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Tell all ranks that this one cannot go on. Does not raise."""

    @abstractmethod
    def close(self) -> bool:
        """Leave the others. Idempotent. Returns whether no rank touches memory of this one any more."""


class Alone(World):
    """One process."""

    rank, size = 0, 1

    def tell(self, what: str, told: Any) -> list[Any]:
        return [told]

    def each(self, what: str, act: Callable[[], Any]) -> list[Any]:
        return [act()]

    def once_slow(self, what: str, act: Callable[[], None]) -> None:
        act()

    def gather_rest(self, parts: Iterable[list[Any]]) -> None:
        return

    def fail(self, error: BaseException) -> None:
        return

    def close(self) -> bool:
        return True


class Among(World):
    """One of several ranks, or of one that behaves like several."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.rank, self.size = exchange.rank, exchange.world

    def tell(self, what: str, told: Any) -> list[Any]:
        return self.exchange.tell(what, told)

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
                raise _SAME_CLASS.get(kind, InfinityError)(f"rank {rank}: {problem}")
        return [found for *_, found in told]

    def once_slow(self, what: str, act: Callable[[], None]) -> None:
        with ThreadPoolExecutor(1, "infinity-led") as apart:
            doing = apart.submit(act) if self.leads else None

            def is_done() -> bool:
                return doing is None or not wait([doing], _SIGN_OF_LIFE_S).not_done

            while not self.tell(what, is_done())[0]:
                pass
            self.each(what, lambda: None if doing is None else doing.result())

    def gather_rest(self, parts: Iterable[list[Any]]) -> None:
        for part in parts:
            part.clear()

    def fail(self, error: BaseException) -> None:
        self.exchange.fail(error)

    def close(self) -> bool:
        return self.exchange.close()
