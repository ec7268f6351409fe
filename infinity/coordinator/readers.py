"""Who may read the weights of a model: its forward and backward passes, and whoever gathers them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from infinity.errors import ModelError
from infinity.units.released import in_backward


class Readers:
    """Invariant: while nobody may read, every parameter has the released class: the coordinator closes all when
    `nobody` has become true."""

    def __init__(self) -> None:
        self._in_forward = False
        self._in_backward = False
        self._end_if_dead: Callable[[], None] = lambda: None
        self._gathering = self._lending = 0
        self._others: list[weakref.WeakMethod[Callable[[], None]]] = []

    @property
    def passing(self) -> bool:
        """Whether a forward, or in this thread a backward pass of the model is under way."""
        return self._in_forward or in_backward()

    @property
    def may_read(self) -> bool:
        """Whether this thread may read parameters now."""
        return self._in_forward or self._gathering > 0 or in_backward()

    @property
    def nobody(self) -> bool:
        """Whether no thread may read parameters now."""
        return not (self._in_forward or self._in_backward or self._gathering)

    def forward_begins(self, end_if_dead: Callable[[], None]) -> None:
        """Args: end_if_dead: ends it, if something ended it that skips post-hooks (Ctrl-C)."""
        self._in_forward, self._in_backward, self._end_if_dead = True, False, end_if_dead

    def watch(self, end_if_dead: Callable[[], None]) -> None:
        """There are other calls that may read. Args: end_if_dead: ends them, if they are dead; it is not kept alive,
        as it may hold the frame of a dead call, and with that the model."""
        self._others.append(weakref.WeakMethod(end_if_dead))

    def forget_dead(self) -> None:
        """Before what no forward is under way for: gathering, a step, the end."""
        if self._in_forward:
            self._end_if_dead()
        self.forget_dead_others()

    def forget_dead_others(self) -> None:
        """Before a forward."""
        for each in self._others:
            if (end_if_dead := each()) is not None:
                end_if_dead()

    def forward_ends(self) -> None:
        self._in_forward = False

    def backward_begins(self) -> None:
        """In whichever thread; others may not close what it opens.

        Raises:
            ModelError: it would add to gradients that were gathered.
        """
        if self._lending:
            raise ModelError(
                "a backward pass inside `with infinity.gathered(..., grads=True)`: the gradients that were gathered "
                "would be those of before the pass. Leave the context first."
            )
        self._in_backward = True

    def backward_ends(self) -> None:
        """The outermost one."""
        self._in_backward = False

    @contextmanager
    def gathering(self, *, grads: bool = False) -> Iterator[None]:
        """In this context parameters of every unit may be read: they are brought as they are in a forward. Args: grads:
        gradients are gathered, too."""
        self._gathering += 1
        self._lending += grads
        try:
            yield
        finally:
            self._gathering -= 1
            self._lending -= grads

    def step_begins(self) -> None:
        """No pass is under way any more, whatever ended it.

        Raises:
            ModelError: in infinity.gathered a step would pass over the copies that were gathered; in a backward pass
                over the weights that what is left of the pass needs.
        """
        self.forget_dead()
        if in_backward():
            raise ModelError(
                "optimizer.step() in a backward pass, as of hooks that step an optimizer for each parameter "
                "(optimizer_in_bwd): the rest of the pass needs the weights. Make one optimizer for "
                "model.parameters(), and call its step() after backward(): gradients go to RAM during the pass, and "
                "updates begin during it, by themselves."
            )
        if self._gathering:
            raise ModelError(
                "optimizer.step() inside `with infinity.gathered(...)`: the weights that were gathered would be those "
                "of before the step. Leave the context first."
            )
        self._in_forward = self._in_backward = False
