"""Whether all weights of a model fit into memory at the same time."""

from __future__ import annotations

from torch import nn

from infinity.coordinator import registry


def nbytes_of(module: nn.Module) -> int:
    """Return the bytes of a module's parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def host_bytes_of(model: nn.Module) -> int:
    """Return the bytes of memory.host in the plan of an offloaded model."""
    return registry.coordinator_of(model).plan.budgets.limits.host


def fits_memory(model: nn.Module, module: nn.Module | None = None) -> bool:
    """Return whether memory.host has room for all weights of an offloaded model, or of one of its modules.

    For a model that is not offloaded, return True.
    """
    if not registry.is_offloaded(model):
        return True
    return nbytes_of(model if module is None else module) <= host_bytes_of(model)
