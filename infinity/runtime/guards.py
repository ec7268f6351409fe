"""What would pass placeholders on as if they were weights works or raises: state_dict and load_state_dict gather the
weights; deepcopy and pickling raise."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from torch import nn
from torch.utils.hooks import RemovableHandle

from infinity.coordinator import registry
from infinity.errors import ReleasedParameterError
from infinity.runtime.gathered import gathered, not_gathered
from infinity.sizes import format_bytes


def _refuse(what: str, why: str = "would see placeholders: its weights are in the store") -> NoReturn:
    raise ReleasedParameterError(
        f"{what} of an offloaded model {why}. To write it, use "
        "infinity.save_pretrained(model, directory); to read or change weights use infinity.state_dict(model) or "
        "`with infinity.gathered(model, module):`. A copy of the model is made before infinity.offload, or is "
        "another plain model: in infinity.gathered, give it model.state_dict()."
    )


class Guard:
    """A hook object that refuses to be copied or pickled, and so does the module that holds it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        _refuse("deepcopy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse("pickling")


class _Hook(Guard):
    """A hook that is a method of another object (torch puts attributes on hooks, which a method cannot have)."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._call(*args, **kwargs)


class _Gathers:
    """Gatherings that are open, by module. One that an exception left open is closed by the next call."""

    def __init__(self, model: nn.Module) -> None:
        self._of = weakref.ref(model)
        self._open: dict[int, AbstractContextManager[None]] = {}

    @property
    def _model(self) -> nn.Module:
        model = self._of()
        if model is None:
            _refuse("state_dict() of a part", "needs the whole model, which no longer exists")
        return model

    def _enter(self, module: nn.Module, context: AbstractContextManager[None]) -> None:
        context.__enter__()
        self._open[id(module)] = context

    def _leave(self, module: nn.Module) -> None:
        context = self._open.pop(id(module), None)
        if context is not None:
            context.__exit__(None, None, None)


class _StateDict(_Gathers):
    """The tensors of a state_dict are copies of all weights of the module, which memory.host must have room for."""

    def before(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._leave(module)
        if self._open:
            return  # a module above this one is being read
        self._require_room(module)
        self._enter(module, gathered(self._model, module))

    def after(self, module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
        self._leave(module)

    def _require_room(self, module: nn.Module) -> None:
        nbytes = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
        limit = registry.coordinator_of(self._model).plan.budgets.limits.host
        if nbytes > limit:
            _refuse(
                "state_dict()",
                f"would take {format_bytes(nbytes)} of RAM, and memory.host is {format_bytes(limit)}",
            )


class _LoadStateDict(_Gathers):
    """One module after the other is gathered and written back."""

    def before(self, module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        self._leave(module)
        if local_metadata.get("assign_to_params_buffers"):
            _refuse("load_state_dict(assign=True)", "would replace its parameters; leave assign=True out")
        own = not_gathered(self._model, module.parameters(recurse=False))
        if own:
            self._enter(module, gathered(self._model, *own, write=True))

    def after(self, module: nn.Module, incompatible_keys: Any) -> None:
        self._leave(module)


def guard(model: nn.Module) -> list[RemovableHandle]:
    """Put the guards on every module that has parameters below it."""
    state_dict, load = _StateDict(model), _LoadStateDict(model)
    before_read, after_read = _Hook(state_dict.before), _Hook(state_dict.after)
    before_load, after_load = _Hook(load.before), _Hook(load.after)
    handles: list[RemovableHandle] = []
    for module in model.modules():
        if next(module.parameters(), None) is not None:
            handles.append(module.register_state_dict_pre_hook(before_read))
            handles.append(module.register_state_dict_post_hook(after_read))
        if next(module.parameters(recurse=False), None) is not None:
            handles.append(module.register_load_state_dict_pre_hook(before_load))
            handles.append(module.register_load_state_dict_post_hook(after_load))
    return handles
