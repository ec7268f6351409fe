"""Side tables: from a parameter to its place, from a model to its coordinator. Tensors and modules stay as they are."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence

from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from infinity.base import interrupt
from infinity.coordinator.coordinator import Coordinator
from infinity.errors import ModelError
from infinity.state.unit import Place

_places: WeakIdKeyDictionary = WeakIdKeyDictionary()
_coordinators: weakref.WeakKeyDictionary[nn.Module, Coordinator] = weakref.WeakKeyDictionary()
_ends: weakref.WeakKeyDictionary[nn.Module, weakref.finalize[..., nn.Module]] = weakref.WeakKeyDictionary()


def enter(model: nn.Module, coordinator: Coordinator, hooks: Sequence[RemovableHandle]) -> None:
    """Record an offloaded model; its coordinator is closed when the model is collected, or at exit.

    Args:
        hooks: on it and on its parameters.
    """
    _coordinators[model] = coordinator
    for parameter, place in coordinator.places():
        _places[parameter] = (coordinator, place)
    _ends[model] = weakref.finalize(model, _end, coordinator, hooks, weakref.ref(model))


def leave(model: nn.Module) -> None:
    """Forget a model whose coordinator is closed, with its hooks: it is as one that was never offloaded."""
    _ends.pop(model)()
    del _coordinators[model]


def _end(coordinator: Coordinator, hooks: Sequence[RemovableHandle], model: weakref.ref[nn.Module]) -> None:
    """The model is collected, or the process ends while it lives: then an exception may have ended its loop."""
    for parameter, _ in coordinator.places():
        _places.pop(parameter, None)  # the entry holds the coordinator, and so its own key
    for handle in hooks:
        handle.remove()  # a parameter's hooks hold the coordinator where the garbage collector cannot see it
    coordinator.close(broken=model() is not None and getattr(sys, "last_value", None) is not None)
    give_back_signals()


def give_back_signals() -> None:
    """Give the signal handlers back when no model is offloaded any more."""
    if all(coordinator.closed for coordinator in coordinators()):
        interrupt.give_back()


def find(parameter: nn.Parameter) -> tuple[Coordinator, Place] | None:
    """Where a parameter is, or None when it is not offloaded."""
    found: tuple[Coordinator, Place] | None = _places.get(parameter)
    return found


def coordinator_of(model: nn.Module) -> Coordinator:
    """Raises ModelError when `model` itself was not offloaded."""
    coordinator = _coordinators.get(model)
    if coordinator is None:
        raise ModelError(
            f"this {type(model).__name__} is not offloaded: call infinity.offload or load_pretrained first"
        )
    return coordinator


def coordinators() -> list[Coordinator]:
    """Of all offloaded models that are alive."""
    return list(_coordinators.values())


def is_offloaded(model: nn.Module) -> bool:
    return model in _coordinators
