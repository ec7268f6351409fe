"""Side tables: from a parameter to its place, from a model to its coordinator. Tensors and modules stay as they are.

What changed of a model since it was offloaded shows here, too, when an optimizer is made (`keep_up`)."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from infinity.base import interrupt
from infinity.coordinator.coordinator import Coordinator
from infinity.coordinator.structure import Structure
from infinity.errors import ModelError, TooLateError
from infinity.state.unit import Place

logger = logging.getLogger(__name__)

Anew = Callable[[nn.Module, Callable[[], Any] | None], Any]


@dataclass(frozen=True)
class _Offloaded:
    """Attributes:
    hooks: on the model's parameters.
    anew: changes the model and offloads it once more; returns what the change returns.
    structure: the model's, when it was offloaded.
    end: what happens when the model is collected.
    """

    coordinator: Coordinator
    hooks: Sequence[RemovableHandle]
    anew: Anew
    structure: Structure
    end: weakref.finalize[..., nn.Module]


_entered = [0]
_places: WeakIdKeyDictionary = WeakIdKeyDictionary()
_models: weakref.WeakKeyDictionary[nn.Module, _Offloaded] = weakref.WeakKeyDictionary()


def enter(
    model: nn.Module,
    coordinator: Coordinator,
    hooks: Sequence[RemovableHandle],
    anew: Anew,
    structure: Structure,
) -> None:
    """Record an offloaded model; its coordinator is closed when the model is collected, or at exit.

    Args:
        hooks: on its parameters.
        anew, structure: as _Offloaded; do not keep the model alive.
    """
    _entered[0] += 1
    end = weakref.finalize(model, _end, coordinator, hooks, weakref.ref(model))
    _models[model] = _Offloaded(coordinator, hooks, anew, structure, end)
    for parameter, place in coordinator.places():
        _places[parameter] = (coordinator, place)


def entered() -> int:
    """How many models were offloaded in this process so far."""
    return _entered[0]


def leave(model: nn.Module) -> None:
    """Undo `enter`, for a model whose coordinator is closed."""
    offloaded = _models.pop(model)
    offloaded.end.detach()
    _forget(offloaded.coordinator, offloaded.hooks)


def _forget(coordinator: Coordinator, hooks: Sequence[RemovableHandle]) -> None:
    for parameter, _ in coordinator.places():
        _places.pop(parameter, None)  # the entry holds the coordinator, and so its own key
    for handle in hooks:
        handle.remove()  # a parameter's hooks hold the coordinator where the garbage collector cannot see it


def _end(coordinator: Coordinator, hooks: Sequence[RemovableHandle], model: weakref.ref[nn.Module]) -> None:
    """The model is collected, or the process ends while it lives: then an exception may have ended its loop."""
    _forget(coordinator, hooks)
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
    """Of an offloaded model, or of the one offloaded model in a module that was put around it, as PEFT does.

    Raises:
        ModelError: neither is offloaded.
    """
    inside = [model] if model in _models else [module for module in model.modules() if module in _models]
    if len(inside) != 1:
        raise ModelError(
            f"this {type(model).__name__} is not offloaded: call infinity.offload or load_pretrained first"
        )
    return _models[inside[0]].coordinator


def model_of(coordinator: Coordinator) -> nn.Module | None:
    """None once the model was collected, or offloaded anew."""
    return next((model for model, of in _models.items() if of.coordinator is coordinator), None)


def coordinators() -> list[Coordinator]:
    """Of all offloaded models that are alive."""
    return [offloaded.coordinator for offloaded in _models.values()]


def is_offloaded(model: nn.Module) -> bool:
    return model in _models


def offload_anew(model: nn.Module, change: Callable[[], Any]) -> Any:
    """Change an offloaded model while its parameters are deferred ones, and offload it once more.

    Raises:
        TooLateError: it cannot be; says what to do, and nothing was changed.
        others: as infinity.offload, and as `change`.
    """
    return _models[model].anew(model, change)


def keep_up(parameters: Iterable[object]) -> None:
    """An optimizer of these parameters is to be made: a model that has some of them, and was given others or had some
    frozen, unfrozen or moved to other modules since it was offloaded, is offloaded anew.

    Raises:
        TooLateError: parameters that are trained now have no states, and the model cannot be offloaded anew; says what
        to do.
        others: as infinity.offload.
    """
    wanted = {id(each) for each in parameters}
    for model, offloaded in list(_models.items()):
        if offloaded.coordinator.closed or wanted.isdisjoint(map(id, model.parameters())):
            continue
        now = {id(parameter): parameter.requires_grad for parameter in model.parameters()}
        planned = {id(parameter): place.group.trainable for parameter, place in offloaded.coordinator.places()}
        replaced = offloaded.structure.changed()
        kept = offloaded.coordinator.keeps_room and now.keys() == planned.keys()
        fits = kept and all(planned[parameter] or not trained for parameter, trained in now.items())
        if (now == planned or fits) and not replaced:
            continue
        try:
            offloaded.anew(model, None)
        except TooLateError as error:
            if replaced or any(trained and not planned.get(parameter) for parameter, trained in now.items()):
                raise
            logger.info("frozen parameters keep their optimizer states: %s", error)
