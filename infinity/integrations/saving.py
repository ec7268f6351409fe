"""Replacement of `save_pretrained` on an offloaded model by a method that writes one shard at a time."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

from torch import nn

from infinity.checkpoint.save_pretrained import save_pretrained
from infinity.coordinator import registry
from infinity.integrations.distributed_data_parallel import ranks_of
from infinity.runtime.deferred_parameters import is_deferred
from infinity.runtime.guards import UncopyableHook

_ONLY_THEIRS = (
    "state_dict",
    "variant",
    "selected_adapters",
    "save_embedding_layers",
    "path_initial_model_for_weight_conversion",
)
"""Arguments of save_pretrained with which transformers or PEFT saves the model without infinity.
"""
_OF_THE_HUB = ("token", "private", "commit_message", "commit_description", "create_pr", "revision", "tags")
_METHOD = "save_pretrained"


def give_saving(model: nn.Module) -> None:
    """Make `save_pretrained` of an offloaded model write one shard at a time.

    If the model's class has no save_pretrained, do nothing.
    """
    if hasattr(type(model), _METHOD):
        object.__setattr__(model, _METHOD, _SavePretrained(model))


def take_saving(model: nn.Module) -> None:
    """Make `model.save_pretrained` the method of the model's class again."""
    model.__dict__.pop(_METHOD, None)


class _SavePretrained(UncopyableHook):
    """The replacement of a model's save_pretrained. It has only a weak reference to the model."""

    def __init__(self, model: nn.Module) -> None:
        self._of = weakref.ref(model)

    def __call__(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        model: Any = self._of()
        ours = registry.is_offloaded(model) and not is_deferred(model)
        if not ours or args or any(kwargs.get(name) is not None for name in _ONLY_THEIRS):
            # the libraries' method may call state_dict(), which gathers the weights
            return type(model).save_pretrained(model, directory, *args, **kwargs)
        leads = kwargs.get("is_main_process", True)
        if not leads and ranks_of(model) == 1:
            return None
        size = kwargs.get("max_shard_size")
        save_pretrained(model, directory, **({} if size is None else {"max_shard_size": str(size)}))
        if leads and kwargs.get("push_to_hub"):
            options = {name: kwargs[name] for name in _OF_THE_HUB if name in kwargs}
            model.push_to_hub(kwargs.get("repo_id") or Path(directory).name, **options)
        return None
