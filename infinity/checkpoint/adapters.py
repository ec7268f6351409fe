"""The adapters of a PEFT model, written by PEFT's own save_pretrained, to which their values are given.

[Note: whose values are brought]
PEFT picks what belongs to an adapter out of the state dict of the whole model, which may be larger than memory. So it
picks twice: first out of tensors on the meta device, which tells their names, and then, when it writes, out of a state
dict in which these have values. The base model's weights stay where they are.
"""

from __future__ import annotations

import inspect
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.access.exact import exact_value
from infinity.checkpoint.aside import put, written_aside
from infinity.coordinator import registry
from infinity.coordinator.coordinator import Coordinator
from infinity.durable import buffers
from infinity.errors import ModelError
from infinity.runtime.gathered import gathered

Tensors = dict[str, torch.Tensor]

CONFIG_NAME = "adapter_config.json"
"""PEFT's name of the file that says what adapters are of."""


def is_peft_model(model: nn.Module) -> bool:
    """Whether it is one of PEFT's models. PEFT is imported already if it is."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def to_save(model: nn.Module) -> Coordinator:
    """The coordinator of a model that is to be saved. Raises ModelError, InfinityError where it cannot be saved now."""
    coordinator = registry.coordinator_of(model)
    coordinator.require_usable()
    coordinator.room.require_untouched()
    return coordinator


def save_adapters(model: Any, target: Path) -> None:
    """Write adapter_config.json, adapter_model.safetensors and the model card of a PEFT model; an adapter that is not
    the default one goes into a directory of its name.

    Args:
        model: it, or the model that it adapts, is offloaded.

    Raises:
        ModelError: nothing of it is offloaded; or PEFT makes what it writes of the base model's weights.
        InfinityError, SwapIOError, PeerError: as save_pretrained.
    """
    roots = [module for module in model.modules() if registry.is_offloaded(module)]
    for root in roots or [model]:
        coordinator = to_save(root)
    with _with_values(model, roots) as state:
        coordinator.world.once(f"saving adapters to {target}", lambda: _write(model, target, state))


def _write(model: Any, target: Path, state: Tensors) -> None:
    with written_aside(target, "saving to") as aside:
        if (target / "README.md").exists():  # PEFT changes a model card that is there
            shutil.copy(target / "README.md", aside)
        inspect.unwrap(type(model).save_pretrained)(model, str(aside), state_dict=state)  # infinity run wraps it
        for path in aside.rglob("*.safetensors"):  # which safetensors makes for its owner only
            path.chmod(0o644)
        put(aside, target, last=CONFIG_NAME)


@contextmanager
def _with_values(model: Any, roots: Sequence[nn.Module]) -> Iterator[Tensors]:
    """The state dict of the model: what belongs to an adapter with its values, the rest on the meta device."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    state = {name: torch.empty(p.shape, dtype=p.dtype, device="meta") for name, p in parameters.items()}
    state |= dict(buffers.named(model))
    read = [p for module in _read_by_peft(model) for p in module.parameters()]
    with _gathered(roots, read):
        chosen = {id(tensor) for _, tensor in _picked(model, state)}
    wanted = {name: parameter for name, parameter in parameters.items() if id(state[name]) in chosen}
    with _gathered(roots, [*read, *wanted.values()]):
        state |= {name: _saved(parameter) for name, parameter in wanted.items()}
        for name, tensor in _picked(model, state):
            if tensor.is_meta:
                raise ModelError(
                    f"PEFT makes '{name}', which it writes, of weights that are in the store. Call "
                    "model.save_pretrained(directory) in `with infinity.gathered(model):`."
                )
        yield state


def _saved(parameter: nn.Parameter) -> torch.Tensor:
    """A value as it is saved: of one that the script had in fp32, the master."""
    found = registry.find(parameter)
    if found is None or found[1].spec.name not in found[0].saved_wide:
        return parameter.detach()
    coordinator, place = found
    coordinator.fence()
    return exact_value(coordinator, place)


def _picked(model: Any, state: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    from peft import get_peft_model_state_dict

    for adapter in model.peft_config:
        yield from get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter).items()


def _read_by_peft(model: Any) -> Iterator[nn.Module]:
    """Modules that PEFT asks itself, whatever state dict it is given: copies of whole modules, and prompts."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("modules_to_save", "prompt_encoder"):
            yield module


@contextmanager
def _gathered(roots: Sequence[nn.Module], parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """In it these parameters have their values; those that are not offloaded have them anyway."""
    with ExitStack() as stack:
        for root in roots:
            coordinator = registry.coordinator_of(root)
            inside = [p for p in parameters if (place := registry.find(p)) is not None and place[0] is coordinator]
            if inside:
                stack.enter_context(gathered(root, *inside))
        yield
