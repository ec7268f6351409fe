"""Scripts that torchrun starts several times: infinity takes the place of DistributedDataParallel."""

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
from infinity.runtime.deferred import is_deferred


def replace_ddp(patches: Patches) -> None:
    """From now on DistributedDataParallel(model) of a model that is, or is to be, offloaded is that model: its ranks
    share weights and states, and average gradients, without a wrapper. Its `module` is itself. Other models are
    wrapped as ever."""

    class Bypassed(DistributedDataParallel):
        def __new__(cls, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not _is_ours(module):
                return super().__new__(cls)
            module.__dict__["module"] = module  # which scripts save; not among the modules of the model
            return module

    for place in (torch.nn.parallel, torch.nn.parallel.distributed):
        patches.put(place, "DistributedDataParallel", Bypassed)


def replace_generating(patches: Patches, generation: ModuleType) -> None:
    """From now on ranks whose sequences have ended go on with the others' in `generate`: the forward of each needs the
    weights of all."""

    def generate(original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("synced_gpus") is None and has_others() and _is_ours(model):
            kwargs["synced_gpus"] = True
        return original(model, *args, **kwargs)

    patches.wrap(generation.GenerationMixin, "generate", generate)


def _is_ours(module: nn.Module) -> bool:
    """Whether a module is offloaded, a part of it is, or it is a part of one that is; or will be at its first use."""
    offloaded = any(registry.is_offloaded(each) for each in module.modules())
    return offloaded or is_deferred(module) or any(registry.find(each) is not None for each in module.parameters())


def ranks_of(model: nn.Module) -> int:
    """How many ranks train a model together; 1 for one that is not offloaded."""
    return registry.coordinator_of(model).world.size if registry.is_offloaded(model) else 1
