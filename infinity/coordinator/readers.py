"""Readers of a model's weights: its forward and backward passes, and gathering contexts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from infinity.errors import ModelError
from infinity.units.released_parameters import in_backward


class ParameterReaders:
    """Forwards, backwards and contexts that may read parameters now.

    Invariant: while nothing may read, every parameter has the released class. The coordinator closes all parameters
    when `nobody` becomes true.
    """

    def __init__(self) -> None:
        self._in_forward = False
        self._in_backward = False
        self._end_if_dead: Callable[[], None] = lambda: None
        self._gathering = self._lending = 0
        self._others: list[weakref.WeakMethod[Callable[[], None]]] = []

    @property
    def passing(self) -> bool:
        """Whether a forward of the model is under way, or a backward pass in this thread."""
        return self._in_forward or in_backward()

    @property
    def may_read(self) -> bool:
        """Whether this thread may read parameters now."""
        return self._in_forward or self._gathering > 0 or in_backward()

    @property
    def nobody(self) -> bool:
        """Whether no thread may read parameters now."""
        return not (self._in_forward or self._in_backward or self._gathering)

    def begin_reading(self, end_if_dead: Callable[[], None]) -> None:
        """Begin a forward.

        Args:
            end_if_dead: function that ends the forward if the forward was interrupted by an event that skips
                post-hooks, such as Ctrl-C.
        """
        self._in_forward, self._in_backward, self._end_if_dead = True, False, end_if_dead

    def watch(self, end_if_dead: Callable[[], None]) -> None:
        """Register a function that ends interrupted calls of another kind. Such calls may read parameters.

        Args:
            end_if_dead: method that ends the calls that an exception interrupted. Only a weak reference to the method
                is kept. A strong reference could keep the frame of such a call alive, and with the frame the model.
        """
        self._others.append(weakref.WeakMethod(end_if_dead))

    def forget_dead(self) -> None:
        """End the calls that an exception interrupted.

        The coordinator calls this method before gathering, before a step and before it closes the model.

        No forward may be in progress at these moments.
        """
        if self._in_forward:
            self._end_if_dead()
        self.forget_dead_others()

    def forget_dead_others(self) -> None:
        """Before a forward, end interrupted calls with the functions that `watch` registered."""
        for each in self._others:
            if (end_if_dead := each()) is not None:
                end_if_dead()

    def end_reading(self) -> None:
        self._in_forward = False

    def backward_begins(self) -> None:
        """Begin a backward, in any thread. Until it ends, other threads must not forbid reads of parameters.

        Raises:
            ModelError: the backward would add to gathered gradients.
        """
        if self._lending:
            raise ModelError(
                "a backward pass inside `with infinity.gathered(..., grads=True)`: the gathered gradients would "
                "still have the values from before the pass. Leave the context first."
            )
        self._in_backward = True

    def backward_ends(self) -> None:
        """End the outermost backward."""
        self._in_backward = False

    @contextmanager
    def gathering(self, *, grads: bool = False) -> Iterator[None]:
        """Return a context in which parameters of every unit may be read. Units are fetched as in a forward.

        Args:
            grads: whether gradients are gathered, too.
        """
        self._gathering += 1
        self._lending += grads
        try:
            yield
        finally:
            self._gathering -= 1
            self._lending -= grads

    def step_begins(self) -> None:
        """End all forwards and backwards before a step, including interrupted forwards and backwards.

        Raises:
            ModelError: the step is inside infinity.gathered, and would make the gathered copies stale; or the step is
                inside a backward pass that still needs the weights.
        """
        self.forget_dead()
        if in_backward():
            raise ModelError(
                "optimizer.step() was called in a backward pass, for example by hooks that step one optimizer for each "
                "parameter (optimizer_in_bwd). The remaining part of the pass needs the weights. Make one optimizer "
                "for model.parameters(), and call its step() after backward(): infinity moves gradients to RAM and "
                "begins updates during the pass by itself."
            )
        if self._gathering:
            raise ModelError(
                "optimizer.step() inside `with infinity.gathered(...)`: the gathered weights would still have the "
                "values from before the step. Leave the context first."
            )
        self._in_forward = self._in_backward = False
