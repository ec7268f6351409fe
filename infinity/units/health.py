"""Whether a model can go on."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

from infinity.base.fork import refuse_in_forked_child
from infinity.errors import InfinityError, PeerError
from infinity.ranks.world import World


class Health:
    """The first failure after which a model refuses to go on, and whether the model was closed.

    Attributes:
        failure: None while there is none.

    Args:
        world: the ranks, who are told of the failure.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._why_closed = "was closed (infinity.close); load it again to go on"
        self.failure: InfinityError | None = None
        self.closed = False

    def fail(self, error: InfinityError) -> None:
        """From now on every call raises."""
        self.failure = self.failure or error
        self._world.fail(error)

    def supersede(self) -> None:
        """The model is offloaded anew, and this is closed."""
        self._why_closed = "was offloaded anew since this forward pass: make the optimizer first, then run the forward"

    def close(self) -> None:
        """The model is closed."""
        self.closed = True

    def forget(self) -> None:
        """Let go of the failure: its traceback holds the frames that it passed, and with them the model."""
        self.failure = None

    def failing(self, *kinds: type[InfinityError]) -> AbstractContextManager[None]:
        """A context manager: an error of these kinds that leaves it is a failure of the model."""
        return _Failing(self, kinds)

    def require_open(self) -> None:
        """Raises InfinityError once the model is closed."""
        if self.closed:
            raise InfinityError(f"this model {self._why_closed}")

    def require_usable(self) -> None:
        """Raises ForkError in a forked child, InfinityError once the model is closed or has failed, PeerError where
        that was another rank's failure."""
        refuse_in_forked_child()
        self.require_open()
        if isinstance(self.failure, PeerError):
            raise self.failure.again()
        if self.failure is not None:
            raise InfinityError(f"the states are damaged by an earlier failure: {self.failure}") from self.failure


class _Failing:
    """A class, since a generator would cost each landing of a gradient twice as much."""

    __slots__ = ("_health", "_kinds")

    def __init__(self, health: Health, kinds: tuple[type[InfinityError], ...]) -> None:
        self._health = health
        self._kinds = kinds

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, self._kinds):
            self._health.fail(error)
