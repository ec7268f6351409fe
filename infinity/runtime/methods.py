"""The methods of an offloaded model: `no_sync()`, as DistributedDataParallel has it, and `zero_grad()`."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager

from torch import nn

from infinity.coordinator import registry
from infinity.coordinator.coordinator import Coordinator
from infinity.errors import InfinityError
from infinity.runtime.guards import Guard


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Backward passes in this context only add to the gradients; no update speculates in them. The first one outside
    is taken for the last before the step, so that updates begin during it:

        for batch in batches[:-1]:
            with model.no_sync():
                model(**batch).loss.backward()
        model(**batches[-1]).loss.backward()
        optim.step()

    It decides when updates begin, never a bit of the result. Without it, and without `accumulation_steps=` of the
    optimizer, each step is expected to have as many passes as the one before.

    Raises:
        ModelError: the model was never offloaded.
        InfinityError: it was closed.
    """
    return registry.coordinator_of(model).accumulating()


class _Method(Guard):
    """A method of an offloaded model. Keeps nothing alive."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._of = weakref.ref(coordinator)

    @property
    def _coordinator(self) -> Coordinator:
        coordinator = self._of()
        if coordinator is None:
            raise InfinityError("the model that this method was of is gone")
        return coordinator


class NoSync(_Method):
    def __call__(self) -> AbstractContextManager[None]:
        return self._coordinator.accumulating()


class ZeroGrad(_Method):
    """Forgets all gradients, as the optimizer's zero_grad does: they are set to None also with
    `set_to_none=False`."""

    def __call__(self, set_to_none: bool = True) -> None:
        self._coordinator.zero_grad(self._coordinator.places())


class Given:
    """A method that was put on a model."""

    def __init__(self, model: nn.Module, name: str, method: Guard) -> None:
        self._of = weakref.ref(model)
        self._name = name
        self._method = method
        object.__setattr__(model, name, method)

    def remove(self) -> None:
        model = self._of()
        if model is not None and model.__dict__.get(self._name) is self._method:
            object.__delattr__(model, self._name)


def give_methods(model: nn.Module, coordinator: Coordinator) -> list[Given]:
    """Put the methods on a model: `no_sync` on one that has none of its own."""
    given = [Given(model, "zero_grad", ZeroGrad(coordinator))]
    if not hasattr(model, "no_sync"):
        given.append(Given(model, "no_sync", NoSync(coordinator)))
    return given
