"""infinity.gathered and infinity.state_dict: access to the weights of an offloaded model for other code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from infinity.access.gathering import Gathering
from infinity.coordinator import registry
from infinity.coordinator.coordinator import Coordinator
from infinity.errors import ConfigError, ModelError
from infinity.runtime.saved_tensors import SavedTensors
from infinity.runtime.tiles import tiles_in
from infinity.state.layer_tiles import LayerTile


def gathered(
    model: nn.Module, *modules: nn.Module | nn.Parameter, write: bool = False, grads: bool = False
) -> AbstractContextManager[None]:
    """Put copies of the weights into the parameters of modules in this context, so that other code can read them.

    Use this for `.data`, state_dict and norms, and for code that knows nothing of infinity (EMA, weight logging,
    sending weights to an inference engine, peft's merge_and_unload):

        with infinity.gathered(model, model.lm_head):
            norm = model.lm_head.weight.norm()

        for module in model.model.layers:  # a model larger than memory, one block after the other
            with infinity.gathered(model, module, write=True):
                module.mlp.down_proj.weight.mul_(0.5)

        with infinity.gathered(model, model.lm_head, grads=True):  # between backward and step
            model.lm_head.weight.grad.clamp_(-1.0, 1.0)

    If no part of the model is offloaded, the context does nothing. The copies are on the device of the model, and take
    memory in addition to the plan's memory. A parameter that is not gathered is fetched while an operation reads the
    parameter, but reading its `.data` raises. If the context ends with an exception, all changes are lost.

    Args:
        model: the model that infinity.offload or load_pretrained returned.
        modules: modules or parameters of the model; none: the whole model.
        write: whether changes are kept. At the end, parameters whose bits changed are written to the store, and their
            masters become exactly the new values. The moments are not changed. Without `write` every change is lost at
            the end, and a warning names a changed parameter.
        grads: whether `.grad` becomes a copy of the gradient, in the parameter's dtype; allowed only between backward
            and step. At the end, changed copies become the gradients of the step, with or without `write`. A parameter
            whose `.grad` is None at the end has no gradient.

    Raises:
        PlanError: there is no memory for the copies.
        ConfigError: `model` is not a module, or another argument is neither a module nor a parameter.
        ModelError: `model` is a part of an offloaded model; a module does not belong to `model`; `write` or `grads` in
            a forward or backward pass; `write` for parameters that an outer context gathered; `grads` without
            gradients. At the end: a shape or dtype changed; or a frozen weight changed, and several generations of the
            run share its values.
        NotAvailableError: `grads` with several ranks.
        InfinityError, SwapIOError: an error that a forward pass can raise, too. At the end: the store could not be
            written.
    """
    _require_model(model)
    named = [parameter for module in (model, *modules) for parameter in _parameters_of(module)]
    if not any(registry.find(parameter) for parameter in named):
        return nullcontext()
    coordinator = registry.coordinator_of(model)
    coordinator.require_usable()
    coordinator.forget_dead()
    coordinator.require_untouched()
    if coordinator.passing:
        _refuse_changes(write=write, grads=grads)
    wanted: dict[int, list[str]] = {}
    for module in modules or (model,):
        for parameter in _parameters_of(module):
            index, name = _find(coordinator, parameter, module)
            names = wanted.setdefault(index, [])
            if name not in names:
                names.append(name)
    saved = None
    if not coordinator.passing:
        hooks = SavedTensors(coordinator)
        saved = torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack)
    return Gathering(coordinator, wanted, saved, write=write, grads=grads)


def not_gathered(model: nn.Module, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters that no open context of infinity.gathered has replaced by copies."""
    coordinator, found = registry.coordinator_of(model), []
    for parameter in parameters:
        index, name = _find(coordinator, parameter, parameter)
        if name not in coordinator.units[index].gathered:
            found.append(parameter)
    return found


def _require_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        given = "a parameter" if isinstance(model, nn.Parameter) else type(model).__name__
        raise ConfigError(
            f"infinity.gathered takes the offloaded model first, not {given}: write "
            "infinity.gathered(model, parameter), with any number of its modules and parameters"
        )


def _refuse_changes(*, write: bool, grads: bool) -> None:
    """Check that a context in a forward or backward pass changes nothing."""
    if write:
        raise ModelError(
            "infinity.gathered(..., write=True) in a forward or backward pass, which reads the weights. Write "
            "weights before or after the pass."
        )
    if grads:
        raise ModelError(
            "infinity.gathered(..., grads=True) in a forward or backward pass, which may add gradients. Enter the "
            "context between backward() and optim.step()."
        )


def _parameters_of(module: nn.Module | nn.Parameter) -> list[nn.Parameter]:
    if isinstance(module, nn.Module):
        return list(module.parameters())
    if isinstance(module, nn.Parameter):
        return [module]
    raise ConfigError(
        f"infinity.gathered takes modules and parameters of the model, not {type(module).__name__}; write "
        "infinity.gathered(model, *several)"
    )


def _find(coordinator: Coordinator, parameter: nn.Parameter, module: nn.Module | nn.Parameter) -> tuple[int, str]:
    found = registry.find(parameter)
    if found is None or found[0] is not coordinator:
        raise ModelError(
            f"infinity.gathered: a parameter of {type(module).__name__} {tuple(parameter.shape)} does not belong to "
            "this offloaded model"
        )
    return found[1].unit.index, found[1].spec.name


def state_dict(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the names and values of `model.state_dict()`, with one value in memory at a time.

    The model may be larger than memory. Each parameter and persistent buffer is copied to the device of the model, and
    the copy is freed when the caller drops it. If several names belong to one parameter, each name gets its own copy.
    `get_extra_state` is not called.

        for name, tensor in infinity.state_dict(model):
            client.update(name, tensor)

    Raises:
        ModelError: the model is not offloaded.
        SwapIOError: the store could not be read.
    """
    coordinator = registry.coordinator_of(model)
    coordinator.require_usable()
    coordinator.forget_dead()
    coordinator.require_untouched()
    return _tensors(model, coordinator)


def _tensors(model: nn.Module, coordinator: Coordinator) -> Iterator[tuple[str, torch.Tensor]]:

    def value_of(parameter: nn.Parameter, module: nn.Module) -> torch.Tensor:
        index, _ = _find(coordinator, parameter, module)
        with coordinator.locked(), coordinator.taking([index]), torch.no_grad():
            return parameter.detach().clone()

    for prefix, module in model.named_modules(remove_duplicate=False):
        if tiles := tiles_in(module):
            for name in tiles[0]._parameters:
                parts = [value_of(part, tile) for tile in tiles if (part := tile._parameters[name]) is not None]
                if parts:
                    yield _join(prefix, name), torch.cat(parts)
        for name, parameter in module._parameters.items():
            if parameter is not None and not isinstance(module, LayerTile):
                yield _join(prefix, name), value_of(parameter, module)
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield _join(prefix, name), buffer.detach().clone()


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
