"""The sizes of a model that determine the computation of a step, and the memory for its activations."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn

from infinity.state.block_trace import BlockBytes, LinearBytes, blocks_of, trace_block

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names that configurations of mixtures of experts have for the field with the number of experts."""
_BLOCK_WIDTHS = 8
"""Number of tensors of the hidden width that exist while a block is recomputed.

They are norms, queries, outputs of attention and residuals.
"""


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
        block: memory for the activations of one block.
        looked_up: names of the parameters by which no activations are multiplied, such as embeddings.
    """

    products: float
    trained: float
    blocks: int
    width: int
    inner: int
    attention: float
    words: int
    itemsize: int
    block: BlockBytes
    looked_up: frozenset[str]


def shape_of(model: Any, sequences: int, length: int) -> ModelShape:
    """Return the shape of a model.

    Matrix products and attention count as work. Lookups in an embedding do not count.

    Args:
        model: the model.
        sequences: sequences of a micro-batch.
        length: tokens of a sequence.
    """
    looked_up = {each.weight for each in model.modules() if isinstance(each, nn.Embedding)}
    linears = (each for each in model.modules() if isinstance(each, nn.Linear))
    heads = {each._parameters.get("weight") for each in linears} & looked_up  # tied
    active, whole = active_share(model), _computed_whole(model)
    width, inner = widths(model)
    itemsize = max(parameter.itemsize for parameter in model.parameters())
    products = trained = 0.0
    left_out = set[str]()
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or (parameter in looked_up and parameter not in heads):
            left_out.add(name)
            continue
        numel = parameter.numel() * (active if ".experts." in name and parameter not in whole else 1.0)
        products += numel
        trained += numel if parameter.requires_grad else 0.0
    return ModelShape(
        products,
        trained,
        blocks=max(len(blocks_of(model)), 1),
        width=width,
        inner=inner,
        attention=_attention_width(model, width),
        words=max((weight.shape[0] for weight in looked_up), default=0),
        itemsize=itemsize,
        block=trace_block(model, sequences, length) or _estimate(model, itemsize, width, inner),
        looked_up=frozenset(left_out),
    )


def _estimate(model: nn.Module, itemsize: int, width: int, inner: int) -> BlockBytes:
    """Return an estimate of the memory for the activations of one block, from the widths of the block."""
    kept = LinearBytes(itemsize * _stacks(model), itemsize * (_BLOCK_WIDTHS * width + 3 * inner))
    # the gradients of the kept tensors need the same number of bytes
    return BlockBytes(LinearBytes(0, itemsize * width), kept, LinearBytes(2 * kept.fixed, 2 * kept.per_token))


def _stacks(model: nn.Module) -> int:
    """Return the number of elements of a block's stacks of experts, if the stacks have adapters.

    In the forward, PEFT adds the adapters to a copy of the stacks, which needs memory.
    """
    found: Counter[nn.Module] = Counter()
    layer: Any
    for layer in model.modules():
        if (key := getattr(layer, "parameter_name", None)) is not None:  # the module is a ParamWrapper of PEFT
            base = layer.get_base_layer()
            whole = base._parameters.get(key)  # a bank makes no copies, and has tiles
            found[base] += 0 if whole is None else whole.numel()
    return max(found.values(), default=0)


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


def active_share(model: Any) -> float:
    """Return the fraction of the experts in a mixture that one token uses."""
    config = getattr(model, "config", None)
    used = getattr(config, "num_experts_per_tok", None)
    there = next((found for key in _EXPERTS if (found := getattr(config, key, 0))), 0)
    return used / there if used and there else 1.0


def _computed_whole(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of the stacks of experts whose forward gets no routing, as in Llama 4.

    Such a forward computes every expert with every token.
    """
    return {
        parameter
        for module in model.modules()
        if any(each.dim() == 3 for each in module.parameters(recurse=False))
        and len(inspect.signature(module.forward).parameters) == 1
        for parameter in module.parameters(recurse=False)
    }


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
