"""The model for which a plan is made."""

from __future__ import annotations

import difflib
import importlib.util
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.quantized_files import QuantizationMethod
from infinity.cli.planning.public_models import PRESETS
from infinity.errors import ConfigError, ModelError
from infinity.quoting import quoted, raised
from infinity.runtime.experts import why_no_bank
from infinity.state.codec import Codec
from infinity.state.frozen_codecs import CheckpointEncoding, remember


def build(name: str, dtype: torch.dtype, *, trust_remote_code: bool = False, revision: str | None = None) -> Any:
    """Build the model on the meta device, so that its parameters have no values.

    Args:
        name: a preset, a directory with at least a config.json, or a hub id as for `infinity finetune --model`. From
            the hub only the configuration is downloaded.
        dtype: dtype of the weights.
        trust_remote_code: whether to run the Python files that come with the model.
        revision: revision of the hub's model.

    Raises:
        ConfigError, ModelError: there is no such model, or a plan for the model is not possible.
    """
    from infinity.checkpoint.load_pretrained import load_config_of
    from infinity.checkpoint.quantization_config import method_of, without_quantization

    method = None
    if name in PRESETS:
        from transformers import AutoConfig

        config = AutoConfig.for_model(PRESETS[name].kind, **PRESETS[name].values)
    else:
        _require_place(name)
        found = {} if revision is None else {"revision": revision}
        given = load_config_of(name, trust_remote_code=trust_remote_code, **found)
        method, config = method_of(name, given), without_quantization(given)
    model = on_meta(name, config, dtype, trust_remote_code=trust_remote_code)
    if method is not None:
        _rest_encoded(model, method)
    return model


def _require_place(name: str) -> None:
    """Raise ConfigError for a name that can be neither a directory nor a hub id."""
    if not Path(name).expanduser().is_dir() and ("/" not in name or name.count("/") > 1):
        near = difflib.get_close_matches(name.lower(), PRESETS, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{quoted(name)} is neither a directory nor one of {', '.join(PRESETS)}{hint}")


def on_meta(name: str, config: Any, dtype: torch.dtype, *, trust_remote_code: bool = False) -> Any:
    """Build a causal language model from its configuration. Its parameters have no values.

    Args:
        name: the user's name of the model, for errors.
        config: the configuration of transformers.
        dtype: dtype of the weights.
        trust_remote_code: run the Python files that come with the model.

    Raises:
        ConfigError, ModelError: transformers has no such model, or cannot build it.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        except Exception as error:  # the model's own code may raise any exception
            if type(config) not in AutoModelForCausalLM._model_mapping and not trust_remote_code:
                kind = getattr(config, "model_type", "")
                why = f"{name}: transformers has no causal language model of type {quoted(kind)}"
                raise ConfigError(why) from error
            raise ModelError(f"{name}: transformers cannot make a model from its config: {raised(error)}") from error


def _rest_encoded(model: nn.Module, method: QuantizationMethod) -> None:
    """Mark the parameters of the model's blocks that are encoded in the checkpoint: weights of linear layers, and
    stacks of matrices.

    Raises:
        ModelError: the model is quantized in a way that cannot be read.
    """
    blocks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inside = {each for block in blocks for each in block.modules()}

    def read() -> torch.Tensor:
        raise AssertionError("a plan reads no weights")

    def encoding(codec: Codec) -> CheckpointEncoding:
        return CheckpointEncoding(codec, read, lambda begin, end: encoding(codec))

    for name, module in model.named_modules():
        if module not in inside:
            continue
        for own, parameter in module.named_parameters(prefix=name, recurse=False):
            is_weight = own == f"{name}.weight" and _is_linear(module)
            if not is_weight and (parameter.dim() < 3 or why_no_bank(module) is None):
                continue
            if (codec := method.codec_of(own, parameter.shape)) is not None:
                remember(parameter, encoding(codec))


def adapt(model: nn.Module, rank: int, *, experts: bool) -> None:
    """Freeze a model and add the adapters that --lora would add, with those of --lora-experts if `experts` is True.

    Raises:
        ConfigError: PEFT is not installed, or the model has no such layers.
    """
    from infinity.cli.adapter_targets import targets
    from infinity.cli.finetuned_model import NEEDS_PEFT

    if importlib.util.find_spec("peft") is None:
        raise ConfigError(NEEDS_PEFT)
    from peft import LoraConfig, inject_adapter_in_model

    dtype = next(model.parameters()).dtype
    lora = LoraConfig(r=rank, task_type="CAUSAL_LM", **targets(model, experts=experts))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inject_adapter_in_model(lora, model, low_cpu_mem_usage=True)
    except ValueError as error:
        raise ConfigError(f"--lora: PEFT finds no layers for adapters ({raised(error)})") from error
    for parameter in model.parameters():
        if parameter.requires_grad:  # PEFT creates the adapters in fp32 on the meta device
            parameter.data = parameter.to(dtype)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
