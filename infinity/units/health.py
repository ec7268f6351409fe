"""Health of a model: whether the model can still be used."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

from infinity.base.fork import refuse_in_forked_child
from infinity.errors import InfinityError, PeerError
from infinity.ranks.world import World


class ModelHealth:
    """Record of the first failure of a model, after which the model refuses every call, and of whether the model was
    closed.

    Attributes:
        failure: first failure; None before a failure.

    Args:
        world: the ranks, which are told of the failure.
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
        """Record that the model is being offloaded again, which closes the present coordinator."""
        self._why_closed = "was offloaded again after this forward pass: make the optimizer first, then run the forward"

    def close(self) -> None:
        """Record that the model is closed."""
        self.closed = True

    def forget(self) -> None:
        """Drop the reference to the failure, because its traceback keeps frames alive, and these frames keep the model
        alive."""
        self.failure = None

    def failing(self, *kinds: type[InfinityError]) -> AbstractContextManager[None]:
        """Return a context. If an error of these kinds ends the context, the error is recorded as a failure of the
        model."""
        return _FailureRecorder(self, kinds)

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


class _FailureRecorder:
    """Context manager of `ModelHealth.failing`. This is a class, because a generator would double the cost of landing a
    gradient."""

    __slots__ = ("_health", "_kinds")

    def __init__(self, health: ModelHealth, kinds: tuple[type[InfinityError], ...]) -> None:
        self._health = health
        self._kinds = kinds

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, self._kinds):
            self._health.fail(error)
