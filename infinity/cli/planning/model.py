"""The model for which a plan is made, and the computation of one step of the model."""

from __future__ import annotations

import difflib
import importlib.util
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.cli.planning.prediction import StepWork
from infinity.cli.planning.public_models import PRESETS
from infinity.errors import ConfigError, ModelError
from infinity.quoting import quoted, raised
from infinity.state.codec import Codec
from infinity.state.frozen_codecs import remember

_LOGITS_BYTES = 1 << 30
"""Upper bound of the bytes of memory for a loss that is computed in chunks.

The logits of one chunk are in memory in fp32, with their gradients.
"""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names that configurations of mixtures of experts have for the field with the number of experts."""
_BLOCK_WIDTHS = 8
"""Number of tensors of the hidden width that exist while a block is recomputed.

They are norms, queries, outputs of attention and residuals.
"""


@dataclass(frozen=True)
class BatchShape:
    """The batch of one step: sequences per micro-batch, their length, micro-batches per pass, and passes per step."""

    sequences: int
    length: int
    micro_batches: int = 1
    passes: int = 1

    @property
    def tokens(self) -> int:
        """Number of tokens in a micro-batch."""
        return self.sequences * self.length

    @property
    def count(self) -> int:
        """Number of micro-batches in a step."""
        return self.micro_batches * self.passes


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
    from infinity.checkpoint.load import load_config_of
    from infinity.checkpoint.quantized_files import codec_text, without_quantization

    said = None
    if name in PRESETS:
        from transformers import AutoConfig

        config = AutoConfig.for_model(PRESETS[name].kind, **PRESETS[name].values)
    else:
        _require_place(name)
        found = {} if revision is None else {"revision": revision}
        given = load_config_of(name, trust_remote_code=trust_remote_code, **found)
        said, config = codec_text(name, given), without_quantization(given)
    model = on_meta(name, config, dtype, trust_remote_code=trust_remote_code)
    if said is not None:
        _rest_encoded(model, *said)
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


def _rest_encoded(model: nn.Module, codec: Codec, skipped: tuple[str, ...]) -> None:
    """Mark the linear layers of the model's blocks as encoded in the checkpoint.

    A layer is not encoded if its name contains one of the strings in `skipped`, because transformers does not encode it
    either.
    """
    left_out = {module for name, module in model.named_modules() if any(f".{part}." in f".{name}." for part in skipped)}

    def read() -> torch.Tensor:
        raise AssertionError("a plan reads no weights")

    for linear in _linears(model):
        if linear in left_out:
            continue
        remember(linear.get_parameter("weight"), codec, read)


def adapt(model: nn.Module, rank: int) -> None:
    """Freeze a model and add the adapters that --lora would add.

    PEFT adds adapters to linear layers. PEFT also adds adapters to stacks of experts, which it treats as linear layers.

    Raises:
        ConfigError: PEFT is not installed, or the model has no such layers.
    """
    from infinity.cli.finetuned_model import ALL_LINEAR, NEEDS_PEFT

    if importlib.util.find_spec("peft") is None:
        raise ConfigError(NEEDS_PEFT)
    from peft import LoraConfig, inject_adapter_in_model

    dtype = next(model.parameters()).dtype
    lora = LoraConfig(r=rank, target_modules=ALL_LINEAR, task_type="CAUSAL_LM")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inject_adapter_in_model(lora, model, low_cpu_mem_usage=True)
    except ValueError as error:
        raise ConfigError(f"--lora: PEFT finds no layers for adapters ({raised(error)})") from error
    for parameter in model.parameters():
        if parameter.requires_grad:  # PEFT creates the adapters in fp32 on the meta device
            parameter.data = parameter.to(dtype)


def _linears(model: nn.Module) -> list[nn.Module]:
    """Return the linear layers of a model's blocks."""
    blocks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inside = dict.fromkeys(each for block in blocks for each in block.modules())
    return [each for each in inside if isinstance(each, nn.Linear) or type(each).__name__ == "Conv1D"]


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that determine the computation of a step.

    Attributes:
        products: number of elements of all weights by which the activations of a token are multiplied.
        trained: number of elements of `products` that are trained.
        blocks: number of blocks.
        width: width of the activations between blocks.
        inner: largest width inside a block.
        attention: width of a block's queries (see `_attention_width`).
        words: size of the vocabulary.
        itemsize: bytes of one element of a weight.
        stacks: number of elements of a block's stacks of experts, if the stacks have adapters. In the forward, PEFT
            adds the adapters to a copy of the stacks, which needs memory.
    """

    products: float
    trained: float
    blocks: int
    width: int
    inner: int
    attention: float
    words: int
    itemsize: int
    stacks: int


def shape_of(model: Any) -> ModelShape:
    """Return the shape of a model.

    Matrix products and attention count as work. Lookups in an embedding do not count.
    """
    looked_up = {each.weight for each in model.modules() if isinstance(each, nn.Embedding)}
    linears = (each for each in model.modules() if isinstance(each, nn.Linear))
    heads = {each._parameters.get("weight") for each in linears} & looked_up  # tied
    active = _active_share(model)
    width, inner = widths(model)
    products = trained = 0.0
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or (parameter in looked_up and parameter not in heads):
            continue
        numel = parameter.numel() * (active if ".experts." in name else 1.0)
        products += numel
        trained += numel if parameter.requires_grad else 0.0
    return ModelShape(
        products,
        trained,
        blocks=_blocks(model),
        width=width,
        inner=inner,
        attention=_attention_width(model, width),
        words=max((weight.shape[0] for weight in looked_up), default=0),
        itemsize=max(parameter.itemsize for parameter in model.parameters()),
        stacks=_stacks(model),
    )


def _stacks(model: nn.Module) -> int:
    """Return ModelShape.stacks of the block with the largest stacks."""
    found: Counter[nn.Module] = Counter()
    layer: Any
    for layer in model.modules():
        if (key := getattr(layer, "parameter_name", None)) is not None:  # the module is a ParamWrapper of PEFT
            base = layer.get_base_layer()
            found[base] += base.get_parameter(key).numel()
    return max(found.values(), default=0)


def work_of(shape: ModelShape, batch: BatchShape, *, recompute: bool, vertical: bool) -> StepWork:
    """Return the computation of a model's step, and the device memory of its activations."""
    attention = 2.0 * batch.length * shape.attention * shape.blocks
    once = (2 * shape.products + attention) * batch.tokens * batch.count
    again = once if recompute else 0.0
    backward = again + (2 * shape.products + 2 * shape.trained + 2 * attention) * batch.tokens * batch.count
    kept = shape.itemsize * shape.blocks * batch.tokens * shape.width * (batch.micro_batches if vertical else 1)
    block = shape.itemsize * batch.tokens * (_BLOCK_WIDTHS * shape.width + 3 * shape.inner)
    stacks = shape.itemsize * shape.stacks  # the gradients of the stacks need the same number of bytes
    if not recompute:
        kept += shape.blocks * (block + stacks) * (batch.micro_batches if vertical else 1)
    logits = min(_LOGITS_BYTES, 8 * batch.tokens * shape.words)
    return StepWork(
        flops=once + backward,
        tokens=batch.tokens * batch.count,
        landings=batch.count,
        peak_bytes=kept + 2 * (block + stacks) + logits,
    )


def _attention_width(model: Any, width: int) -> float:
    """Return the width of a block's queries.

    From this width follows the work of attention's two matrix products per token. Half of each product is masked.

    Args:
        model: the model.
        width: width of the activations between blocks.
    """
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    heads = getattr(config, "num_attention_heads", None) or 0
    each = getattr(config, "head_dim", None) or (width // heads if heads else 0)
    rope = getattr(config, "qk_rope_head_dim", None)
    if rope:  # in latent attention the values are narrower than the queries
        each = (getattr(config, "qk_nope_head_dim", 0) + rope + getattr(config, "v_head_dim", each)) / 2
    return float(heads * each or width)


def _blocks(model: nn.Module) -> int:
    """Return the number of blocks: the length of the longest module list that is not inside a block."""
    lists: list[int] = []

    def walk(module: nn.Module) -> None:
        if isinstance(module, nn.ModuleList):
            lists.append(len(module))
            return
        for child in module.children():
            walk(child)

    walk(model)
    return max(lists, default=1)


def _active_share(model: Any) -> float:
    """Return the fraction of the experts in a mixture that one token uses."""
    config = getattr(model, "config", None)
    used = getattr(config, "num_experts_per_tok", None)
    there = next((found for key in _EXPERTS if (found := getattr(config, key, 0))), 0)
    return used / there if used and there else 1.0


def widths(model: nn.Module) -> tuple[int, int]:
    """Return the width of the activations between blocks, and the largest width inside a block."""
    looked_up = {each.weight for each in model.modules() if isinstance(each, nn.Embedding)}
    width = next((weight.shape[1] for weight in looked_up), 0)
    words = max((weight.shape[0] for weight in looked_up), default=0)
    sizes = [
        size
        for parameter in model.parameters()
        if parameter.dim() >= 2 and parameter not in looked_up
        for size in parameter.shape[-2:]
        if size != words
    ]
    return width or max(sizes, default=1024), max(sizes, default=4096)
