"""Guards for operations that would read placeholders in place of the weights. state_dict and load_state_dict gather the
weights, and deepcopy and pickling raise."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from infinity.base.interrupt import uninterruptible
from infinity.coordinator import registry
from infinity.coordinator.coordinator import Coordinator
from infinity.errors import ModelError, ReleasedParameterError
from infinity.runtime.caller_frame import CallerFrame
from infinity.runtime.gathered import gathered, not_gathered
from infinity.runtime.memory_fit import fits_memory, host_bytes_of, nbytes_of
from infinity.sizes import format_bytes

H = TypeVar("H", bound=Any)


def _refuse(what: str, why: str = "would see placeholders: its weights are in the store") -> NoReturn:
    raise ReleasedParameterError(
        f"{what} of an offloaded model {why}. To write it, use infinity.save_pretrained(model, directory); to read or "
        "change weights use infinity.state_dict(model) or `with infinity.gathered(model, module):`. Copy the model "
        "before infinity.offload, or load the weights into another plain model: "
        "other.load_state_dict(model.state_dict())."
    )


class UncopyableHook:
    """Hook object that raises when it is copied or pickled. Copying or pickling a module with this hook therefore
    raises, too."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        _refuse("deepcopy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse("pickling")


def not_compiled(hook: type[H]) -> type[H]:
    """Exclude hooks of this class from torch.compile, which ends its graph before such a hook.

    The import of torch's compiler takes seconds, so a hook uses the compiler only if other code has imported it.
    """
    call: Any = hook.__call__

    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return call(*args, **kwargs)
        hook.__call__ = torch.compiler.disable(call)
        return hook.__call__(*args, **kwargs)

    run.__dict__["_torchdynamo_disable"] = True  # the mark that torch.compiler.disable sets on its result
    hook.__call__ = run
    return hook


class _MethodHook(UncopyableHook):
    """Hook that calls a method of another object. torch sets attributes on hooks, and a method cannot have
    attributes."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._call(*args, **kwargs)


class _OpenGatherings:
    """Contexts of infinity.gathered that are open, by module. Each context belongs to a call of the module's state_dict
    or load_state_dict.

    If an exception ended the call, the next operation closes the context and drops its changes ([Note: calls that die]
    in caller_frame.py).

    Args:
        beyond: names of functions that run between the hooks and the call; see CallerFrame.
    """

    def __init__(self, model: nn.Module, *beyond: str) -> None:
        self._of = weakref.ref(model)
        self._beyond = beyond
        self._open: dict[int, tuple[CallerFrame, AbstractContextManager[None]]] = {}
        self._lock = threading.RLock()

    @property
    def _model(self) -> nn.Module:
        model = self._of()
        if model is None:
            _refuse("state_dict() of a part", "needs the whole model, which no longer exists")
        return model

    def _enter(self, module: nn.Module, context: AbstractContextManager[None]) -> None:
        call = CallerFrame(self._beyond)
        context.__enter__()
        self._open[id(module)] = call, context

    def _require_this_thread(self, what: str) -> None:
        """Raise ModelError if another thread has a context open, because two threads would close each other's
        contexts."""
        if not all(call.of_this_thread for call, _ in self._open.values()):
            raise ModelError(f"{what} of this model is running in another thread; wait until it ends")

    def _leave(self, module: nn.Module) -> None:
        found = self._open.pop(id(module), None)
        if found is not None:
            found[1].__exit__(None, None, None)

    @uninterruptible
    def end_if_dead(self) -> None:
        for key, (call, context) in list(self._open.items()):
            if not call.runs:
                del self._open[key]
                context.__exit__(GeneratorExit, None, None)


class _StateDictHooks(_OpenGatherings):
    """Contexts of infinity.gathered for state_dict. state_dict returns copies of all weights of the module, and the
    copies must fit memory.host."""

    def before(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        with self._lock:
            self.end_if_dead()
            self._require_this_thread("state_dict()")
            if self._open:
                return  # the state_dict of a module that contains this module is in progress
            self._require_room(module)
            self._enter(module, gathered(self._model, module))

    def after(self, module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
        self._leave(module)

    def _require_room(self, module: nn.Module) -> None:
        if not fits_memory(self._model, module):
            nbytes, limit = format_bytes(nbytes_of(module)), format_bytes(host_bytes_of(self._model))
            _refuse("state_dict()", f"would take {nbytes} of RAM, and memory.host is {limit}")


class _LoadStateDictHooks(_OpenGatherings):
    """Contexts of infinity.gathered for load_state_dict: one module after the other is gathered and written back."""

    def before(self, module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        with self._lock:
            self.end_if_dead()
            self._require_this_thread("load_state_dict()")
            self._open_own(module, local_metadata)

    def _open_own(self, module: nn.Module, local_metadata: Any) -> None:
        if local_metadata.get("assign_to_params_buffers"):
            _refuse("load_state_dict(assign=True)", "would replace its parameters; leave assign=True out")
        named = [registry.find(parameter) for parameter in module.parameters(recurse=False)]
        registry.coordinator_of(self._model).give_masters(found[1].spec.name for found in named if found is not None)
        own = not_gathered(self._model, module.parameters(recurse=False))
        if own:
            self._enter(module, gathered(self._model, *own, write=True))

    def after(self, module: nn.Module, incompatible_keys: Any) -> None:
        self._leave(module)


def guard(model: nn.Module, coordinator: Coordinator) -> list[RemovableHandle]:
    """Install the guards on every module that has parameters of its own or in its submodules."""
    # _load_from_state_dict ends before its hooks run
    state_dict, load = _StateDictHooks(model), _LoadStateDictHooks(model, "_load_from_state_dict")
    for each in (state_dict, load):
        coordinator.watch_readers(each.end_if_dead)
    before_read, after_read = _MethodHook(state_dict.before), _MethodHook(state_dict.after)
    before_load, after_load = _MethodHook(load.before), _MethodHook(load.after)
    handles: list[RemovableHandle] = []
    for module in model.modules():
        if next(module.parameters(), None) is not None:
            handles.append(module.register_state_dict_pre_hook(before_read))
            handles.append(module.register_state_dict_post_hook(after_read))
        if next(module.parameters(recurse=False), None) is not None:
            handles.append(module.register_load_state_dict_pre_hook(before_load))
            handles.append(module.register_load_state_dict_post_hook(after_load))
    return handles
