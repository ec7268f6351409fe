"""Health of a model: whether the model can still be used."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

from infinity.base.fork import refuse_in_forked_child
from infinity.errors import InfinityError, PeerError
from infinity.ranks.world import World


class Health:
    """The first failure after which a model refuses every call, and whether the model was closed.

    Attributes:
        failure: first failure; None before a failure.

    Args:
        world: ranks that are told of the failure.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._why_closed = "was closed (infinity.close); load it again to continue"
        self.failure: InfinityError | None = None
        self.closed = False

    def fail(self, error: InfinityError) -> None:
        """Record a failure and tell the other ranks. From now on every call raises."""
        self.failure = self.failure or error
        self._world.fail(error)

    def supersede(self) -> None:
        """Record that the model is being offloaded again; this closes the present instance."""
        self._why_closed = "was offloaded again after this forward pass: make the optimizer first, then run the forward"

    def close(self) -> None:
        """Record that the model is closed."""
        self.closed = True

    def forget(self) -> None:
        """Drop the failure: its traceback keeps frames alive, and the frames keep the model alive."""
        self.failure = None

    def failing(self, *kinds: type[InfinityError]) -> AbstractContextManager[None]:
        """Return a context manager that records an error of these kinds as a failure of the model."""
        return _Failing(self, kinds)

    def require_open(self) -> None:
        """Check that the model is open.

        Raises:
            InfinityError: the model is closed.
        """
        if self.closed:
            raise InfinityError(f"this model {self._why_closed}")

    def require_usable(self) -> None:
        """Check that the model can be used in this process.

        Raises:
            ForkError: this process is a forked child.
            InfinityError: the model is closed or has failed.
            PeerError: another rank failed.
        """
        refuse_in_forked_child()
        self.require_open()
        if isinstance(self.failure, PeerError):
            raise self.failure.again()
        if self.failure is not None:
            raise InfinityError(f"the states are damaged by an earlier failure: {self.failure}") from self.failure


class _Failing:
    """Context manager of `Health.failing`. A generator instead would double the cost of each landing of a gradient."""

    __slots__ = ("_health", "_kinds")

    def __init__(self, health: Health, kinds: tuple[type[InfinityError], ...]) -> None:
        self._health = health
        self._kinds = kinds

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, self._kinds):
            self._health.fail(error)
