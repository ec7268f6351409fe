"""The layers that `--lora` adapts: PEFT's choice, without the experts and the router of a mixture of experts."""

from __future__ import annotations

from typing import Any

from torch import nn

from infinity.errors import ConfigError
from infinity.runtime.experts import why_no_bank

ALL_LINEAR = "all-linear"
"""PEFT's name for all linear layers except the head. In a mixture of experts, the name includes experts and routers."""


_OF_EXPERTS = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Names of linear layers that PEFT takes for names of experts in a model that has experts, also in its other layers."""


def targets(model: Any, *, experts: bool) -> dict[str, Any]:
    """Return the arguments of PEFT's LoraConfig that choose the layers with adapters.

    Args:
        model: a model of transformers.
        experts: whether the stacks of experts get adapters.

    Raises:
        ConfigError: the stacks of experts would get adapters, and the model has none.
    """
    stacks = stacks_of(model)
    if not stacks:
        if experts:
            raise ConfigError("--lora-experts: the model has no stacks of experts. Leave the option out.")
        return {"target_modules": ALL_LINEAR}
    head = model.get_output_embeddings()
    linear = {_leaf(name) for name, each in model.named_modules() if isinstance(each, nn.Linear) and each is not head}
    routers = {name for name in linear if "gate" in name or "router" in name}
    found: dict[str, Any] = {"target_modules": sorted(linear - _OF_EXPERTS - routers)}
    if experts:
        keys = {f"{_leaf(name)}.{key}" for name, module in stacks.items() for key in _stacks_in(module)}
        found["target_parameters"] = sorted(keys)
    return found


def stacks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model that have stacks of experts, by name."""
    return {name: module for name, module in model.named_modules() if why_no_bank(module) is not None}


def share_of_experts(model: nn.Module) -> float:
    """Return the fraction of a model's parameters that are in stacks of experts."""
    stacks = sum(each.numel() for module in stacks_of(model).values() for each in module.parameters())
    return stacks / sum(each.numel() for each in model.parameters())


def _stacks_in(module: nn.Module) -> list[str]:
    return [key for key, each in module._parameters.items() if each is not None and each.dim() == 3]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
