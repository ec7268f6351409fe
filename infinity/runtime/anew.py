"""A model that is changed after it was offloaded, and before its first step, is offloaded anew.

[Note: where the values come from]
Adapters are attached, parameters are frozen or unfrozen, and the embeddings resized: what rests where is planned for
another model then. The store is of no use to the new plan, and the disk may have no room for both. So the values are
read again from the checkpoint that the model was loaded from. Those that no file has are copied to RAM first, if
memory.host has room for them: parameters of a model that was in memory when it was offloaded, and those that were
changed in infinity.gathered(write=True) since. New parameters are in memory anyway.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from infinity.coordinator import registry
from infinity.coordinator.coordinator import Coordinator
from infinity.coordinator.registry import TooLateError
from infinity.runtime.deferred import Read, defer_again
from infinity.runtime.gathered import gathered
from infinity.runtime.guards import Guard
from infinity.sizes import format_bytes

logger = logging.getLogger(__name__)


class Hook(Protocol):
    """What was put on a model or one of its modules."""

    def remove(self) -> None: ...


_hooks: weakref.WeakKeyDictionary[nn.Module, Sequence[Hook]] = weakref.WeakKeyDictionary()
_readable: weakref.WeakKeyDictionary[nn.Module, Mapping[str, Read]] = weakref.WeakKeyDictionary()


def can_be_read(model: nn.Module, reads: Mapping[str, Read]) -> None:
    """For as long as the model is offloaded, the values that it was offloaded with can be read again. Args: reads: by
    the names of the parameters."""
    _readable[model] = reads


def can_be_removed(model: nn.Module, hooks: Sequence[Hook]) -> None:
    """These are the hooks of a model beside those of its parameters."""
    _hooks[model] = hooks


def take_back(model: nn.Module) -> None:
    """The model is as it was before it was offloaded, with what was put into it since, and its parameters are deferred
    ones.

    Raises:
        TooLateError: it was trained; or its values are in no file, and too large for memory.host. Nothing was done.
    """
    coordinator = registry.coordinator_of(model)
    coordinator.forget_dead()
    with coordinator.locked():
        _require_untrained(model, coordinator)
        values = _values(model, coordinator)
        logger.info("the model is changed after it was offloaded: it is offloaded anew")
        coordinator.close(discard=True)
    registry.leave(model)
    for hook in _hooks.pop(model):
        hook.remove()
    for parameter, place in coordinator.places():
        coordinator.units[place.unit.index].views.hide()
        defer_again(parameter, place.spec.name, values[place.spec.name])


class Resize(Guard):
    """`resize_token_embeddings` of an offloaded transformers model."""

    def __init__(self, model: nn.Module) -> None:
        self._of = weakref.ref(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self._of()
        return registry.offload_anew(model, lambda: type(model).resize_token_embeddings(model, *args, **kwargs))


_WAY_OUT = (
    "Adapters are attached, parameters frozen or unfrozen and embeddings resized before the first optimizer is made, "
    "or before infinity.offload: give defer=True to infinity.load_pretrained, change the model, then call "
    "infinity.offload(model, config)."
)


def _require_untrained(model: nn.Module, coordinator: Coordinator) -> None:
    if not coordinator.untrained:
        raise TooLateError(
            f"this {type(model).__name__} was changed after it was offloaded, so it is to be offloaded anew, and that "
            f"is not possible any more: it has an optimizer or gradients, or goes on with a run. {_WAY_OUT}"
        )


def _values(model: nn.Module, coordinator: Coordinator) -> dict[str, Read | torch.Tensor]:
    """The values of all offloaded parameters, by their names."""
    reads = {name: read for name, read in _readable.get(model, {}).items() if name not in coordinator.rewritten}
    nowhere = {place.spec.name: parameter for parameter, place in coordinator.places() if place.spec.name not in reads}
    nbytes = sum(parameter.numel() * parameter.element_size() for parameter in nowhere.values())
    limit = coordinator.plan.budgets.limits.host
    if nbytes > limit:
        raise TooLateError(
            f"this {type(model).__name__} was changed after it was offloaded from memory. To offload it anew takes "
            f"{format_bytes(nbytes)} of RAM, and memory.host is {format_bytes(limit)}. {_WAY_OUT}"
        )
    copies: dict[str, Read | torch.Tensor] = {}
    for name, parameter in nowhere.items():
        with gathered(model, parameter):
            copies[name] = parameter.detach().to("cpu", copy=True)
    return {**reads, **copies}
