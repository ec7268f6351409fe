"""Who may read the weights of a model: its forward and backward passes, and whoever gathers them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch import nn

from infinity.base.interrupt import whole
from infinity.errors import ModelError, ReleasedParameterError
from infinity.state.released import USE_GATHERED, in_backward
from infinity.state.unit import Unit
from infinity.units.room import Residents


class Readers:
    """Opens and closes the parameters of a model (released.py). Its public methods may be called from any thread.

    Invariant: while nobody may read, every parameter has the released class.

    Args:
        units, parameters: of the model.
        acquire, release, locked: the coordinator's methods of these names.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        parameters: Sequence[dict[str, nn.Parameter]],
        acquire: Callable[[int], None],
        release: Callable[[int], None],
        locked: Callable[[], AbstractContextManager[Residents]],
    ) -> None:
        self._owners = {
            id(parameter): (unit, name)
            for unit, named in zip(units, parameters, strict=True)
            for name, parameter in named.items()
        }
        self._acquire = acquire
        self._release = release
        self._locked = locked
        self._in_forward = False
        self._in_backward = False
        self._end_if_dead: Callable[[], None] = lambda: None
        self._gathering = 0

    @property
    def passing(self) -> bool:
        """Whether a forward, or in this thread a backward pass of the model is under way."""
        return self._in_forward or in_backward()

    @property
    def _may_read(self) -> bool:
        return self._in_forward or self._gathering > 0 or in_backward()

    @whole
    def forward_begins(self, end_if_dead: Callable[[], None]) -> None:
        """Args: end_if_dead: ends it, if this thread began it and something ended it that skips post-hooks (Ctrl-C)."""
        self._in_forward, self._in_backward, self._end_if_dead = True, False, end_if_dead

    @whole
    def forget_dead_forward(self) -> None:
        """Before what no forward is under way for: gathering, a step, the end."""
        if self._in_forward:
            self._end_if_dead()

    def backward_begins(self) -> None:
        """In whichever thread; others may not close what it opens."""
        self._in_backward = True

    @whole
    def forward_ends(self) -> None:
        self._in_forward = False
        self._close()

    def site_left(self) -> None:
        """A module of the model was called; perhaps alone, outside the forward of any module above it."""
        self._close()

    @whole
    def backward_ends(self) -> None:
        """The outermost one."""
        self._in_backward = False
        self._close()

    def _close(self) -> None:
        if not (self._in_forward or self._in_backward or self._gathering):
            with self._locked() as residents:
                residents.close_all()

    @contextmanager
    def taking(self, indices: Iterable[int]) -> Iterator[None]:
        """These units have their values in this context, and stay."""
        taken: list[int] = []
        try:
            for index in indices:
                self._acquire(index)
                taken.append(index)
            yield
        finally:
            for index in taken:
                self._release(index)
            self._close()

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """In this context parameters of every unit may be read: they are brought as they are in a forward."""
        self._gathering += 1
        try:
            yield
        finally:
            self._gathering -= 1
            self._close()

    @whole
    def step_begins(self) -> None:
        """No pass is under way any more, whatever ended it.

        Raises:
            ModelError: in infinity.gathered a step would pass over the copies that were gathered.
        """
        if self._gathering:
            raise ModelError(
                "optimizer.step() inside `with infinity.gathered(...)`: the weights that were gathered would be those "
                "of before the step. Leave the context first."
            )
        self.forget_dead_forward()
        self._in_forward = self._in_backward = False
        self._close()

    # -- what released parameters ask (released.Lender) ---------------------------------------------------------------

    @contextmanager
    def lend(self, parameters: Sequence[nn.Parameter], use: str) -> Iterator[None]:
        units = {unit.index: unit for unit, _ in (self._owners[id(parameter)] for parameter in parameters)}
        if not self._may_read:
            raise ReleasedParameterError(
                f"{use} uses parameter '{self.name_of(parameters[0])}' outside the model's forward, while the values "
                f"of unit '{next(iter(units.values())).name}' are in the store. {USE_GATHERED}"
            )
        with self.taking(units):
            yield

    def name_of(self, parameter: nn.Parameter) -> str:
        return self._owners[id(parameter)][1]
