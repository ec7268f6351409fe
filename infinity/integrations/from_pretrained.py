"""Loading of models by `from_pretrained`. The weights stay in their files until the model is offloaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from infinity.checkpoint.load_pretrained import on_meta
from infinity.errors import ModelError
from infinity.integrations.patches import Patches
from infinity.integrations.quantization import form_of, is_left_to_transformers
from infinity.integrations.script_run import ScriptRun
from infinity.runtime.deferred_parameters import defer
from infinity.runtime.offload import move_buffers

logger = logging.getLogger(__name__)

_NOT_OURS = ("state_dict", "tp_plan", "distributed_config", "gguf_file")
"""Arguments of from_pretrained with which transformers loads the model without infinity.
"""
_OF_PLACES = (
    "device_map",
    "max_memory",
    "offload_folder",
    "offload_state_dict",
    "low_cpu_mem_usage",
    "quantization_config",
)
"""Arguments of from_pretrained that say where weights are stored, and in which form. infinity removes these arguments.
"""


def replace_loading(run: ScriptRun, patches: Patches) -> None:
    """Make transformers load models without their weights, and register the models in which PEFT wraps a model."""
    patches.when_imported(
        "transformers.modeling_utils",
        lambda module: patches.wrap(module.PreTrainedModel, "from_pretrained", _from_pretrained(run)),
    )

    def wrapping(peft: ModuleType) -> None:
        patches.wrap(peft.PeftModel, "__init__", _wrapping(run))
        _replace_preparing(run, patches, peft)

    patches.when_imported("peft", wrapping)

    def placed(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        # while torch compiles a model, each slice of a ModuleList is a new module
        if not torch.compiler.is_compiling():
            run.placed(parent, child)

    patches.add(register_module_module_registration_hook(placed).remove)


def _from_pretrained(run: ScriptRun) -> Callable[..., Any]:
    def load(original: Callable[..., Any], cls: Any, path: Any = None, *args: Any, **kwargs: Any) -> Any:
        path = kwargs.pop("pretrained_model_name_or_path", path)
        theirs = path is None or args or any(kwargs.get(name) is not None for name in _NOT_OURS)
        quantization = kwargs.get("quantization_config")
        if theirs or _is_to_disk(kwargs.get("device_map")) or is_left_to_transformers(quantization):
            # the model is loaded for infinity.checkpoint.load_pretrained, or without infinity
            return original(cls, path, *args, **kwargs)
        form_of(quantization)  # an error must be raised before the model is loaded
        with_info = kwargs.pop("output_loading_info", False)
        for name in _OF_PLACES:
            kwargs.pop(name, None)
        dtype = kwargs.pop("dtype", None) or kwargs.pop("torch_dtype", None) or "auto"
        kwargs["output_loading_info"] = with_info
        try:
            model, source, info = on_meta(cls, str(path), dtype, run.scratch(), kwargs, as_plain=True)
        except ModelError as error:
            if isinstance(error.__cause__, OSError | ValueError):
                raise error.__cause__ from error  # scripts expect an error of this type if the model does not exist
            raise
        defer(model, source, run.device)
        move_buffers(model, run.device)
        run.loaded(model)
        run.forms.loaded(model, quantization, run.config)
        return (model, info) if with_info else model

    return load


def _is_to_disk(device_map: Any) -> bool:
    """Return whether this is the device_map that infinity.checkpoint.load_pretrained uses.

    Such a device_map may keep some parameters in memory.
    """
    return isinstance(device_map, dict) and device_map.get("") == "disk"


def _wrapping(run: ScriptRun) -> Callable[..., None]:
    def init(original: Callable[..., None], self: nn.Module, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        run.undo_evaluation(model)  # the model may have been offloaded for an evaluation
        original(self, model, *args, **kwargs)
        run.wrapped(model, self)

    return init


def _replace_preparing(run: ScriptRun, patches: Patches, peft: ModuleType) -> None:
    """Replace PEFT's prepare_model_for_kbit_training.

    The original function casts all weights except bitsandbytes' own to fp32, which would read all weights into memory.
    """
    for module in (peft, peft.utils, peft.utils.other):
        patches.wrap(module, "prepare_model_for_kbit_training", _preparing(run))


def _preparing(run: ScriptRun) -> Callable[..., Any]:
    def prepare(
        original: Callable[..., Any],
        model: Any,
        use_gradient_checkpointing: bool = True,
        gradient_checkpointing_kwargs: dict[str, Any] | None = None,
        **others: Any,
    ) -> Any:
        if not run.models_in(model):
            return original(model, use_gradient_checkpointing, gradient_checkpointing_kwargs, **others)
        model.requires_grad_(False)
        if use_gradient_checkpointing:
            how = {"use_reentrant": False} | (gradient_checkpointing_kwargs or {})
            if how["use_reentrant"]:
                model.enable_input_require_grads()
            if hasattr(model, "activation_checkpointing_enable"):
                model.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
            else:  # the first versions of transformers 5 have this name for the method
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
        logger.warning("infinity: prepare_model_for_kbit_training: the weights are frozen, and keep their dtype")
        return model

    return prepare
