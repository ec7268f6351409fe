"""Side tables from parameters to their places and from models to their coordinators.

Nothing is stored on tensors or modules themselves. When an optimizer is made, `reoffload_if_changed` detects whether a
model has changed since it was offloaded.
"""

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
from infinity.coordinator.structure import ModelStructure
from infinity.errors import ModelError, ReoffloadError
from infinity.state.unit import ParameterPlace

logger = logging.getLogger(__name__)

Reoffload = Callable[[nn.Module, Callable[[], Any] | None], Any]


@dataclass(frozen=True)
class _OffloadedModel:
    """Entry of an offloaded model.

    Attributes:
        coordinator: coordinator of the model.
        hooks: hooks on the model's parameters.
        reoffload: function that changes the model, offloads the model again and returns the result of the change.
        structure: structure of the model when it was offloaded.
        end: finalizer that runs when the model is collected.
    """

    coordinator: Coordinator
    hooks: Sequence[RemovableHandle]
    reoffload: Reoffload
    structure: ModelStructure
    end: weakref.finalize[..., nn.Module]


_entered = [0]
_places: WeakIdKeyDictionary = WeakIdKeyDictionary()
_models: weakref.WeakKeyDictionary[nn.Module, _OffloadedModel] = weakref.WeakKeyDictionary()


def enter(
    model: nn.Module,
    coordinator: Coordinator,
    hooks: Sequence[RemovableHandle],
    reoffload: Reoffload,
    structure: ModelStructure,
) -> None:
    """Record an offloaded model. Its coordinator is closed when the model is collected, or at exit.

    Args:
        model: the model.
        coordinator: coordinator of the model.
        hooks: hooks on the model's parameters.
        reoffload: function as in _OffloadedModel; it must not keep the model alive.
        structure: structure as in _OffloadedModel; it must not keep the model alive.
    """
    _entered[0] += 1
    end = weakref.finalize(model, _end, coordinator, hooks, weakref.ref(model))
    _models[model] = _OffloadedModel(coordinator, hooks, reoffload, structure, end)
    for parameter, place in coordinator.places():
        _places[parameter] = (coordinator, place)


def entered() -> int:
    """Return how many models were offloaded in this process so far."""
    return _entered[0]


def leave(model: nn.Module) -> None:
    """Undo `enter`, for a model whose coordinator is closed."""
    offloaded = _models.pop(model)
    offloaded.end.detach()
    _forget(offloaded.coordinator, offloaded.hooks)


def _forget(coordinator: Coordinator, hooks: Sequence[RemovableHandle]) -> None:
    for parameter, _ in coordinator.places():
        _places.pop(parameter, None)  # the entry refers to the coordinator, and so keeps its own key alive
    for handle in hooks:
        handle.remove()  # a parameter's hooks keep the coordinator alive; the garbage collector does not see them


def _end(coordinator: Coordinator, hooks: Sequence[RemovableHandle], model: weakref.ref[nn.Module]) -> None:
    """Close a model that is garbage-collected, or that still exists when the process ends.

    If the process ends, an exception may have ended the model's loop.
    """
    _forget(coordinator, hooks)
    coordinator.close(broken=model() is not None and getattr(sys, "last_value", None) is not None)
    give_back_signals()


def give_back_signals() -> None:
    """Restore the signal handlers if no model is offloaded any more."""
    if all(coordinator.closed for coordinator in coordinators()):
        interrupt.give_back()


def find(parameter: nn.Parameter) -> tuple[Coordinator, ParameterPlace] | None:
    """Return the coordinator and the place of a parameter; None when the parameter is not offloaded."""
    found: tuple[Coordinator, ParameterPlace] | None = _places.get(parameter)
    return found


def coordinator_of(model: nn.Module) -> Coordinator:
    """Return the coordinator of an offloaded model, or of the only offloaded model inside a module (as with PEFT).

    Raises:
        ModelError: there is no offloaded model, or there are several inside the module.
    """
    inside = [model] if model in _models else [module for module in model.modules() if module in _models]
    if len(inside) != 1:
        raise ModelError(
            f"this {type(model).__name__} is not offloaded: call infinity.offload or load_pretrained first"
        )
    return _models[inside[0]].coordinator


def model_of(coordinator: Coordinator) -> nn.Module | None:
    """Return the model of a coordinator; None once the model was collected, or offloaded again."""
    return next((model for model, of in _models.items() if of.coordinator is coordinator), None)


def coordinators() -> list[Coordinator]:
    """Return the coordinators of all offloaded models that are alive."""
    return [offloaded.coordinator for offloaded in _models.values()]


def is_offloaded(model: nn.Module) -> bool:
    return model in _models


def reoffload(model: nn.Module, change: Callable[[], Any]) -> Any:
    """Change an offloaded model while its parameters are deferred, and offload the model again.

    Raises:
        ReoffloadError: the model cannot be offloaded again. The message says what to do, and nothing was changed.
        others: the errors of infinity.offload and of `change`.
    """
    return _models[model].reoffload(model, change)


def reoffload_if_changed(parameters: Iterable[object]) -> None:
    """Offload changed models again, before an optimizer of these parameters is made.

    A changed model has parameters that were replaced, frozen, unfrozen or moved to other modules since the model was
    offloaded. Only models that have some of these parameters are checked.

    Raises:
        ReoffloadError: trained parameters have no states, and the model cannot be offloaded again. The message says
            what to do.
        others: the errors of infinity.offload.
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
            offloaded.reoffload(model, None)
        except ReoffloadError as error:
            if replaced or any(trained and not planned.get(parameter) for parameter, trained in now.items()):
                raise
            logger.info("frozen parameters keep their optimizer states: %s", error)
