"""Repeated offloading of a model that was changed after it was offloaded and before its first step.

[Note: where the values come from]
Attaching adapters, freezing or unfreezing parameters and resizing the embeddings make a new plan necessary. The new
plan cannot use the old store, and the disk may have no room for two stores. The values are therefore read again from
the files from which they were loaded, if these files are unchanged. These other values are copied to RAM before the old
store is removed, in the full precision of their masters; memory.host must have room for them:

* the parameters of a model that was in memory when it was offloaded;
* parameters that transformers converted when it loaded them;
* parameters that were changed in infinity.gathered(write=True) after the model was offloaded.

Until the model is offloaded again, the copies take memory in addition to the plan's memory. New parameters are already
in memory.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from infinity.access.exact import exact_bytes, exact_value
from infinity.base.interrupt import interrupts_deferred
from infinity.coordinator import registry
from infinity.coordinator.coordinator import Coordinator
from infinity.errors import ReoffloadError
from infinity.runtime.deferred_parameters import RereadableSource, ValueReader, defer_again
from infinity.runtime.guards import UncopyableHook
from infinity.runtime.memory_fit import host_bytes_of
from infinity.sizes import format_bytes

logger = logging.getLogger(__name__)

Value = ValueReader | torch.Tensor


class HookHandle(Protocol):
    """Handle of a hook on a model or on one of its modules."""

    def remove(self) -> None: ...


_handles: weakref.WeakKeyDictionary[nn.Module, Sequence[HookHandle]] = weakref.WeakKeyDictionary()
_readers: weakref.WeakKeyDictionary[nn.Module, Mapping[str, ValueReader]] = weakref.WeakKeyDictionary()


def remember_readers(model: nn.Module, readers: Mapping[str, ValueReader]) -> None:
    """Remember the readers of a model's initial values, by parameter name, while the model is offloaded."""
    _readers[model] = readers


def as_it_was(model: nn.Module, name: str, parameter: nn.Parameter) -> torch.Tensor:
    """Return the value of a frozen parameter as it was loaded, if its file is unchanged and the parameter was not
    written to.

    Otherwise return the present value of the parameter, which must be in memory.
    """
    reader = _readers.get(model, {}).get(name)
    written = name in registry.coordinator_of(model).rewritten
    return parameter.detach() if reader is None or written or not _UnchangedFiles()(reader) else reader()


def remember_handles(model: nn.Module, handles: Sequence[HookHandle]) -> None:
    """Remember the hooks of a model, except those of its parameters."""
    _handles[model] = handles


def undo_offload(model: nn.Module, require_possible: Callable[[], None] = lambda: None) -> None:
    """Defer all parameters of an offloaded model again, including parameters that were added after the model was
    offloaded.

    Args:
        model: an offloaded model that was not trained.
        require_possible: function that raises if the model cannot be offloaded again.

    Raises:
        ReoffloadError: the model was trained; or the values that can be read from no file are too large for
            memory.host. Nothing was changed.
        others: errors of `require_possible`. Nothing was changed.
        SwapIOError: the store could not be read. Nothing was changed.
    """
    coordinator = registry.coordinator_of(model)
    coordinator.forget_dead()
    with coordinator.locked():
        _require_untrained(model, coordinator)
        require_possible()
        values = _values(model, coordinator)
        logger.info("the model was changed after it was offloaded: it is offloaded again")
        with interrupts_deferred():
            _let_go(model, coordinator, values)


def _let_go(model: nn.Module, coordinator: Coordinator, values: Mapping[str, Value]) -> None:
    """Close the coordinator, and defer the parameters whose names are in `values`. All other parameters are no longer
    in the model."""
    try:
        coordinator.supersede()
        coordinator.close(discard=True)
    finally:
        registry.leave(model)
        for handle in _handles.pop(model):
            handle.remove()
        for parameter, place in coordinator.places():
            coordinator.units[place.unit.index].hide()
            if place.spec.name in values:
                defer_again(parameter, place.spec.name, values[place.spec.name])
        registry.give_back_signals()


class ResizeMethod(UncopyableHook):
    """Method `resize_token_embeddings` of an offloaded transformers model."""

    def __init__(self, model: nn.Module) -> None:
        self._of = weakref.ref(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self._of()
        return registry.reoffload(model, lambda: type(model).resize_token_embeddings(model, *args, **kwargs))


_WAY_OUT = (
    "Attach adapters, freeze or unfreeze parameters and resize embeddings before the first optimizer is made, "
    "or before infinity.offload: give defer=True to infinity.load_pretrained, change the model, then call "
    "infinity.offload(model, config)."
)


def _require_untrained(model: nn.Module, coordinator: Coordinator) -> None:
    why = coordinator.why_not_reoffload()
    if why:
        raise ReoffloadError(
            f"this {type(model).__name__} was changed after it was offloaded, and cannot be offloaded again: {why}. "
            f"{_WAY_OUT}"
        )


def _values(model: nn.Module, coordinator: Coordinator) -> dict[str, Value]:
    """Return the value or the reader of each offloaded parameter that the model still has, by name."""
    same = _UnchangedFiles()
    known = {name: reader for name, reader in _readers.get(model, {}).items() if name not in coordinator.rewritten}
    there = {id(parameter) for parameter in model.parameters()}
    places = {place.spec.name: place for parameter, place in coordinator.places() if id(parameter) in there}
    values: dict[str, Value] = {name: known[name] for name in places if name in known and same(known[name])}
    nowhere = [place for name, place in places.items() if name not in values]
    nbytes, limit = sum(exact_bytes(coordinator, place) for place in nowhere), host_bytes_of(model)
    if nbytes > limit:
        raise ReoffloadError(
            f"this {type(model).__name__} was changed after it was offloaded, and its values cannot be read again from "
            f"files. To offload it again takes {format_bytes(nbytes)} of RAM, and memory.host is "
            f"{format_bytes(limit)}: raise memory.host to the former. Or: {_WAY_OUT}"
        )
    return values | {place.spec.name: exact_value(coordinator, place) for place in nowhere}


class _UnchangedFiles:
    """Function that returns whether the files of a value are unchanged since they were first read. Each source is
    checked only once."""

    def __init__(self) -> None:
        self._asked: dict[int, bool] = {}

    def __call__(self, reader: ValueReader) -> bool:
        source = reader.source
        if id(source) not in self._asked:
            self._asked[id(source)] = isinstance(source, RereadableSource) and source.unchanged()
        return self._asked[id(source)]
