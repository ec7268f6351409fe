"""Whether a model can go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from infinity.base.fork import refuse_in_forked_child
from infinity.errors import InfinityError


class Health:
    """The first failure after which a model refuses to go on, and whether the model was closed.

    Attributes:
        failure: None while there is none.
    """

    def __init__(self) -> None:
        self.failure: InfinityError | None = None
        self.closed = False

    def fail(self, error: InfinityError) -> None:
        """From now on every call raises."""
        self.failure = self.failure or error

    def close(self) -> None:
        """The model is closed."""
        self.closed = True

    def forget(self) -> None:
        """Let go of the failure: its traceback holds the frames that it passed, and with them the model."""
        self.failure = None

    @contextmanager
    def failing(self, *kinds: type[InfinityError]) -> Iterator[None]:
        """An error of one of these kinds that leaves the context is a failure of the model."""
        try:
            yield
        except kinds as error:
            self.fail(error)
            raise

    def require_open(self) -> None:
        """Raises InfinityError once the model is closed."""
        if self.closed:
            raise InfinityError("this model was closed (infinity.close); load it again to go on")

    def require_usable(self) -> None:
        """Raises ForkError in a forked child, InfinityError once the model is closed or has failed."""
        refuse_in_forked_child()
        self.require_open()
        if self.failure is not None:
            raise InfinityError(f"the states are damaged by an earlier failure: {self.failure}") from self.failure
