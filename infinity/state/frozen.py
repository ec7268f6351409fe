"""Frozen weights that rest in 4 or 8 bits: which parameters, in which form, and the way into that form and back.

A weight that is not trained is encoded once, when it comes home, and decoded each time it is fetched. What is computed
with has the dtype of the parameter; only the home is smaller.

| codec | bits of a weight | form |
|---|---|---|
| nf4 | 4.13 | bitsandbytes' NF4: blocks of 64, scales in 8 bits (nested) |
| nf4_fp32 | 4.5 | the same with fp32 scales; only as a checkpoint has it |
| int8 | 8.25 | infinity's own: linear, blocks of 64 with bf16 scales |
| int8_rows | 8 | bitsandbytes' LLM.int8: a scale for each row; only as a checkpoint has it |

Embeddings, the head, norms, biases and adapters stay as they are: an encoded parameter has two dimensions or more and
belongs to a block of the model.

Source: NF4 and nested scales: Dettmers et al., QLoRA (arXiv 2305.14314), §3; their bits: bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from infinity import _native
from infinity.errors import ModelError
from infinity.state.dtypes import native_name

Codec = _native.WeightCodec
FrozenName = Literal["auto", "bf16", "int8", "nf4"]

_NOT_ENCODED = (nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd, nn.LayerNorm, nn.GroupNorm)


class Given(NamedTuple):
    """The encoded form that a checkpoint has of a parameter.

    Attributes:
        read: gives it: uint8, encoded_bytes of the parameter.
    """

    codec: Codec
    read: Callable[[], torch.Tensor]


_given: WeakKeyDictionary[nn.Parameter, Given] = WeakKeyDictionary()


def remember(parameter: nn.Parameter, codec: Codec, read: Callable[[], torch.Tensor]) -> None:
    """A checkpoint has this parameter in an encoded form. Args: read: as in Given."""
    _given[parameter] = Given(codec, read)


def given(parameter: nn.Parameter) -> Given | None:
    """What a checkpoint has of the parameter; None where that is not encoded."""
    return _given.get(parameter)


def codecs_of(model: nn.Module, blocks: Collection[nn.Module], frozen: FrozenName) -> dict[nn.Parameter, Codec]:
    """The codecs of the parameters that rest encoded.

    Args:
        blocks: the modules that the model is made of, which are units.
        frozen: as the config has it. auto: what a checkpoint has encoded stays so, and nothing else is.
    """
    if frozen == "bf16":
        return {}
    found: dict[nn.Parameter, Codec] = {}
    apart = _adapters(model)
    for block in blocks:
        for module in block.modules():
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad or parameter.dim() < 2 or not parameter.is_floating_point():
                    continue
                known = given(parameter)
                if known is not None:
                    found[parameter] = known.codec
                elif frozen != "auto" and not isinstance(module, _NOT_ENCODED) and parameter not in apart:
                    found[parameter] = frozen
    return {parameter: codec for parameter, codec in found.items() if parameter not in _embedded(model)}


def _adapters(model: nn.Module) -> set[nn.Parameter]:
    """What PEFT put beside layers: where a layer has a `base_layer`, all but that."""
    found: set[nn.Parameter] = set()
    for module in model.modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, nn.Module):
            found.update(set(module.parameters()) - set(base.parameters()))
    return found


def _embedded(model: nn.Module) -> set[nn.Parameter]:
    kinds = nn.Embedding | nn.EmbeddingBag
    return {parameter for module in model.modules() if isinstance(module, kinds) for parameter in module.parameters()}


def row_numel(shape: torch.Size) -> int:
    """Elements of a row, which has one scale in int8_rows."""
    return int(shape[-1])


def encoded_bytes(codec: Codec, shape: torch.Size) -> int:
    """Bytes of the encoded form of a parameter."""
    return _native.encoded_weight_bytes(codec, shape.numel(), row_numel(shape))


def encode(name: str, value: torch.Tensor, codec: Codec, into: memoryview, pool: _native.ThreadPool) -> None:
    """Encode a parameter.

    Args:
        value: flat, contiguous, on the CPU; fp32, bf16 or fp16.
        into: encoded_bytes.

    Raises:
        ModelError: it has Inf or NaN, which no code stands for; or the codec is one that only checkpoints have.
    """
    if codec not in ("nf4", "int8"):
        raise ModelError(f"'{name}': {codec} is a form that only checkpoints have; set frozen: nf4 or int8")
    into[:] = bytes(len(into))
    parts = {
        part: into[begin : begin + nbytes]
        for part, (begin, nbytes) in _native.weight_parts(codec, value.numel(), 0).items()
    }
    scales = torch.empty(len(parts["scales"])) if codec == "nf4" else None  # a byte for each
    try:
        _native.encode_weights(
            value.view(torch.uint8).numpy(),
            native_name(value.dtype),
            "nf4_fp32" if codec == "nf4" else codec,
            parts["codes"],
            parts["scales"] if scales is None else scales.numpy(),
            pool,
        )
    except ValueError as error:
        raise ModelError(
            f"parameter '{name}' cannot be kept as {codec}: {error}. Set frozen: bf16, or mend the checkpoint."
        ) from None
    if scales is not None:
        offset = scales.mean()  # as bitsandbytes takes it, whose bits these are
        torch.frombuffer(parts["offset"], dtype=torch.float32).copy_(offset)
        _native.nest_scales(scales.numpy(), float(offset), parts["scales"], parts["nested_scales"])


def decode(
    data: torch.Tensor, codec: Codec, shape: torch.Size, dtype: torch.dtype, pool: _native.ThreadPool | None = None
) -> torch.Tensor:
    """The values of a parameter, [*shape]. Args: data: uint8, encoded_bytes."""
    value = torch.empty(shape, dtype=dtype)
    _native.decode_weights(
        data.numpy(),
        codec,
        value.numel(),
        row_numel(shape),
        value.reshape(-1).view(torch.uint8).numpy(),
        native_name(dtype),
        pool or _native.ThreadPool(1),
    )
    return value
