"""Side tables: from a parameter to its place, from a model to its ledger. Nothing is planted on tensors or modules."""

from __future__ import annotations

import sys
import weakref

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from infinity.errors import ModelError
from infinity.schedule.gradients import Place
from infinity.schedule.ledger import Ledger

_places: WeakIdKeyDictionary = WeakIdKeyDictionary()
_ledgers: weakref.WeakKeyDictionary[nn.Module, Ledger] = weakref.WeakKeyDictionary()


def enter(model: nn.Module, ledger: Ledger) -> None:
    """Record an offloaded model; its ledger is closed when the model is collected, or at exit."""
    _ledgers[model] = ledger
    for parameter, place in ledger.places():
        _places[parameter] = (ledger, place)
    weakref.finalize(model, _end, ledger, weakref.ref(model))


def _end(ledger: Ledger, model: weakref.ref[nn.Module]) -> None:
    """The model is collected, or the process ends while it lives: then an exception may have ended its loop."""
    for parameter, _ in ledger.places():
        _places.pop(parameter, None)  # the entry holds the ledger, and so its own key
    for handle in ledger.hooks:
        handle.remove()  # a parameter's hooks hold the ledger where the garbage collector cannot see it
    ledger.hooks.clear()
    ledger.close(broken=model() is not None and getattr(sys, "last_value", None) is not None)


def find(parameter: nn.Parameter) -> tuple[Ledger, Place] | None:
    """Where a parameter is, or None when it is not offloaded."""
    found: tuple[Ledger, Place] | None = _places.get(parameter)
    return found


def ledger_of(model: nn.Module) -> Ledger:
    """Raises ModelError when `model` itself was not offloaded."""
    ledger = _ledgers.get(model)
    if ledger is None:
        raise ModelError(
            f"this {type(model).__name__} is not offloaded: call infinity.offload or load_pretrained first"
        )
    return ledger


def ledgers() -> list[Ledger]:
    """Of all offloaded models that are alive."""
    return list(_ledgers.values())


def is_offloaded(model: nn.Module) -> bool:
    return model in _ledgers
