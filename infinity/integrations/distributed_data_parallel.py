"""Replacement of DistributedDataParallel, for scripts that torchrun starts on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from infinity.coordinator import registry
from infinity.integrations.patches import Patches
from infinity.ranks.ranks import has_others
from infinity.runtime.deferred_parameters import is_deferred


def replace_ddp(patches: Patches) -> None:
    """Make DistributedDataParallel(model) return the model itself, if the model is or will be offloaded.

    infinity itself divides weights and states among the ranks, and averages the gradients. The attribute `module` of
    the model is the model itself. Other models are wrapped as usual.
    """

    class BypassedDistributedDataParallel(DistributedDataParallel):
        def __new__(cls, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not _is_ours(module):
                return super().__new__(cls)
            module.__dict__["module"] = module  # scripts save model.module; in __dict__ it is not a submodule
            return module

    for place in (torch.nn.parallel, torch.nn.parallel.distributed):
        patches.put(place, "DistributedDataParallel", BypassedDistributedDataParallel)


def replace_generating(patches: Patches, generation: ModuleType) -> None:
    """Make each rank continue in `generate` until all ranks are done, even if its own sequences have ended.

    A forward on one rank needs the weights of all ranks, unless the ranks share all weights.
    """

    def generate(original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("synced_gpus") is None and has_others() and _fetches_together(model):
            kwargs["synced_gpus"] = True
        return original(model, *args, **kwargs)

    patches.wrap(generation.GenerationMixin, "generate", generate)


def _fetches_together(model: nn.Module) -> bool:
    offloaded = [module for module in model.modules() if registry.is_offloaded(module)]
    if not offloaded:
        return _is_ours(model)
    return any(registry.coordinator_of(module).world.gathers for module in offloaded)


def _is_ours(module: nn.Module) -> bool:
    """Return whether a module is offloaded, will be offloaded at its first use, contains an offloaded module, or is a
    part of an offloaded module.
    """
    offloaded = any(registry.is_offloaded(each) for each in module.modules())
    return offloaded or is_deferred(module) or any(registry.find(each) is not None for each in module.parameters())


def ranks_of(model: nn.Module) -> int:
    """Return the number of ranks that train a model together; 1 for a model that is not offloaded."""
    return registry.coordinator_of(model).world.size if registry.is_offloaded(model) else 1
