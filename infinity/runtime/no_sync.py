"""`model.no_sync()`, as DistributedDataParallel has it: backward passes that are not the last one before a step."""

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


class NoSync(Guard):
    """`model.no_sync` of an offloaded model. Keeps nothing alive."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = weakref.ref(coordinator)

    def __call__(self) -> AbstractContextManager[None]:
        coordinator = self._coordinator()
        if coordinator is None:
            raise InfinityError("the model this no_sync was of is gone")
        return coordinator.accumulating()


def give_no_sync(model: nn.Module, coordinator: Coordinator) -> None:
    """Put `no_sync` on a model that has none of its own."""
    if not hasattr(model, "no_sync"):
        object.__setattr__(model, "no_sync", NoSync(coordinator))
