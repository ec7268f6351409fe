"""Methods that are added to an offloaded model: `no_sync()`, as in DistributedDataParallel, and `zero_grad()`."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from infinity.coordinator import registry
from infinity.coordinator.coordinator import Coordinator
from infinity.errors import InfinityError
from infinity.runtime.guards import UncopyableHook


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Begin no speculative update in this context: backward passes only add to the gradients.

    The first backward pass after the context is expected to be the last one before the step, so updates begin during
    this backward pass:

        for batch in batches[:-1]:
            with model.no_sync():
                model(**batch).loss.backward()
        model(**batches[-1]).loss.backward()
        optim.step()

    The context changes the time at which updates begin, but no bit of the result. Without the context, and without the
    optimizer's `accumulation_steps=`, each step is expected to have as many backward passes as the step before.

    Raises:
        ModelError: the model was never offloaded.
        InfinityError: the model was closed.
    """
    return registry.coordinator_of(model).accumulating()


class _ModelMethod(UncopyableHook):
    """A method of an offloaded model. This object does not keep the model alive."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._of = weakref.ref(coordinator)

    @property
    def _coordinator(self) -> Coordinator:
        coordinator = self._of()
        if coordinator is None:
            raise InfinityError("the model of this method no longer exists")
        return coordinator


class NoSyncMethod(_ModelMethod):
    def __call__(self) -> AbstractContextManager[None]:
        return self._coordinator.accumulating()


_NOTHING = nn.Module()
"""Module without parameters, so that torch's zero_grad has nothing to do."""


class ZeroGradMethod(_ModelMethod):
    """Method that sets all gradients to None, in the same way as the optimizer's zero_grad.

    The gradients become None even with `set_to_none=False`. If the model's class overrides zero_grad, the override is
    called afterwards.

    Args:
        model: the offloaded model; this object does not keep it alive.
    """

    def __init__(self, coordinator: Coordinator, model: nn.Module) -> None:
        super().__init__(coordinator)
        self._model = weakref.ref(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._coordinator.zero_grad(self._coordinator.places())
        model = self._model()
        if model is None or type(model).zero_grad is nn.Module.zero_grad:
            model = _NOTHING
        return type(model).zero_grad(model, *args, **kwargs)


class MethodHandle:
    """Handle of a method that was added to a model. Its `remove` removes the method from the model."""

    def __init__(self, model: nn.Module, name: str, method: UncopyableHook) -> None:
        self._of = weakref.ref(model)
        self._name = name
        self._method = method
        object.__setattr__(model, name, method)

    def remove(self) -> None:
        model = self._of()
        if model is not None and model.__dict__.get(self._name) is self._method:
            object.__delattr__(model, self._name)


def give_methods(model: nn.Module, coordinator: Coordinator) -> list[MethodHandle]:
    """Add the methods to a model; add `no_sync` only if the model has no method of this name."""
    given = [MethodHandle(model, "zero_grad", ZeroGradMethod(coordinator, model))]
    if not hasattr(model, "no_sync"):
        given.append(MethodHandle(model, "no_sync", NoSyncMethod(coordinator)))
    return given
