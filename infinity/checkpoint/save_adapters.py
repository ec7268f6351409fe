"""Saving the adapters of a PEFT model: PEFT's own save_pretrained writes the files, and infinity supplies the values.

[Note: whose values are brought]
PEFT selects the tensors of an adapter from the state dict of the complete model, which may be larger than memory.
Therefore PEFT selects the tensors twice. In the first selection, all tensors are on the meta device, and only the names
of the selected tensors are used. In the second selection, when PEFT writes the files, the selected tensors in the state
dict have their values. The base model's weights are not read.
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
from infinity.checkpoint.atomic_directory import put, written_aside
from infinity.coordinator import registry
from infinity.coordinator.coordinator import Coordinator
from infinity.durable import module_buffers
from infinity.errors import ModelError
from infinity.runtime.gathered import gathered

Tensors = dict[str, torch.Tensor]

CONFIG_NAME = "adapter_config.json"
"""PEFT's file name of the adapter config."""


def is_peft_model(model: nn.Module) -> bool:
    """Return whether a model is a PEFT model.

    PEFT is not imported: a PEFT model can only exist if PEFT is imported already.
    """
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def to_save(model: nn.Module) -> Coordinator:
    """Return the coordinator of a model that is about to be saved.

    Raises:
        ModelError, InfinityError: the model cannot be saved now.
    """
    coordinator = registry.coordinator_of(model)
    coordinator.require_usable()
    coordinator.fetcher.require_untouched()
    return coordinator


def save_adapters(model: Any, target: Path) -> None:
    """Write the adapters of a PEFT model: adapter_config.json, adapter_model.safetensors and the model card.

    The default adapter is written to `target` itself. Every other adapter is written to a subdirectory with the
    adapter's name.

    Args:
        model: the PEFT model. The PEFT model, or the base model in it, is offloaded.
        target: the directory to write to.

    Raises:
        ModelError: no part of the model is offloaded, or PEFT computes a saved tensor from the base model's weights.
        InfinityError, SwapIOError, PeerError: as for save_pretrained.
    """
    roots = [module for module in model.modules() if registry.is_offloaded(module)]
    for root in roots or [model]:
        coordinator = to_save(root)

    def write() -> None:
        with _with_values(model, roots) as state:
            if coordinator.world.leads:
                _write(model, target, state)

    coordinator.world.lead(f"saving adapters to {target}", coordinator.steps, write, lambda: None)


def _write(model: Any, target: Path, state: Tensors) -> None:
    with written_aside(target, "saving to") as aside:
        if (target / "README.md").exists():  # PEFT updates an existing model card
            shutil.copy(target / "README.md", aside)
        inspect.unwrap(type(model).save_pretrained)(model, str(aside), state_dict=state)  # `infinity run` wraps it
        for path in aside.rglob("*.safetensors"):  # safetensors lets only the owner read its files
            path.chmod(0o644)
        put(aside, target, last=CONFIG_NAME)


@contextmanager
def _with_values(model: Any, roots: Sequence[nn.Module]) -> Iterator[Tensors]:
    """Yield the model's state dict: adapter tensors have their values, and all other parameters are on the meta
    device.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    state = {name: torch.empty(p.shape, dtype=p.dtype, device="meta") for name, p in parameters.items()}
    state |= dict(module_buffers.named(model))
    read = [p for module in _read_by_peft(model) for p in module.parameters()]
    with _gathered(roots, read):
        chosen = {id(tensor) for _, tensor in _picked(model, state)}
    wanted = {name: parameter for name, parameter in parameters.items() if id(state[name]) in chosen}
    with _gathered(roots, [*read, *wanted.values()]):
        state |= {name: _saved(parameter) for name, parameter in wanted.items()}
        for name, tensor in _picked(model, state):
            if tensor.is_meta:
                raise ModelError(
                    f"PEFT saves '{name}', and computes this tensor from weights that are in the store. Call "
                    "model.save_pretrained(directory) in `with infinity.gathered(model):`."
                )
        yield state


def _saved(parameter: nn.Parameter) -> torch.Tensor:
    """Return the value of a parameter to save: the master if the script had the parameter in fp32, otherwise the
    weight.
    """
    found = registry.find(parameter)
    if found is None or found[1].spec.name not in found[0].saved_wide:
        return parameter.detach()
    return exact_value(*found)


def _picked(model: Any, state: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    from peft import get_peft_model_state_dict

    for adapter in model.peft_config:
        yield from get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter).items()


def _read_by_peft(model: Any) -> Iterator[nn.Module]:
    """Yield the modules whose tensors PEFT reads directly, not from the state dict: copies of complete modules, and
    prompts.
    """
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("modules_to_save", "prompt_encoder"):
            yield module


@contextmanager
def _gathered(roots: Sequence[nn.Module], parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Gather the offloaded parameters among `parameters`, for the duration of the `with` block."""
    with ExitStack() as stack:
        for root in roots:
            coordinator = registry.coordinator_of(root)
            inside = [p for p in parameters if (place := registry.find(p)) is not None and place[0] is coordinator]
            if inside:
                stack.enter_context(gathered(root, *inside))
        yield
