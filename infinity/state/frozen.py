"""Which frozen parameters rest in 4 or 8 bits, and in which form (state/codec.py).

A weight that is not trained is encoded once, when it comes home, and decoded each time it is fetched. What is computed
with has the dtype of the parameter; only the home is smaller.

Embeddings, the head, norms, biases and adapters stay as they are: an encoded parameter has two dimensions or more and
belongs to a block of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from infinity.state.codec import Codec

FrozenName = Literal["auto", "bf16", "int8", "nf4"]

_NOT_ENCODED = (nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd, nn.LayerNorm, nn.GroupNorm)


_FORMS: dict[FrozenName, tuple[Codec, ...]] = {"int8": ("int8", "int8_rows"), "nf4": ("nf4", "nf4_fp32")}


class Given(NamedTuple):
    """The encoded form that a checkpoint has of a parameter.

    Attributes:
        read: gives it: uint8, as state/codec.py lays it out.
    """

    codec: Codec
    read: Callable[[], torch.Tensor]


_given: WeakIdKeyDictionary = WeakIdKeyDictionary()  # `==` of two parameters compares their values


def remember(parameter: nn.Parameter, codec: Codec, read: Callable[[], torch.Tensor]) -> None:
    """A checkpoint has this parameter in an encoded form. Args: read: as in Given."""
    _given[parameter] = Given(codec, read)


def given(parameter: nn.Parameter) -> Given | None:
    """What a checkpoint has of the parameter; None where that is not encoded."""
    found: Given | None = _given.get(parameter)
    return found


def forget(parameter: nn.Parameter) -> None:
    """The parameter may have other values than the checkpoint from now on."""
    _given.pop(parameter, None)


def pass_on(parameter: nn.Parameter, another: nn.Parameter) -> None:
    """Another parameter has the values of this one, in whatever dtype."""
    if (known := given(parameter)) is None:
        forget(another)
    else:
        _given[another] = known


def codecs_of(model: nn.Module, blocks: Collection[nn.Module], frozen: FrozenName) -> dict[nn.Parameter, Codec]:
    """The codecs of the parameters that rest encoded.

    Args:
        blocks: the modules that the model is made of, which are units.
        frozen: as the config has it. auto: what a checkpoint has encoded stays so, and nothing else is. Else what a
            checkpoint has in another form than this is decoded, and encoded anew.
    """
    if frozen == "bf16":
        return {}
    found: dict[nn.Parameter, Codec] = {}
    apart, embedded = _adapters(model), _embedded(model)
    for block in blocks:
        for module in block.modules():
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad or parameter.dim() < 2 or not parameter.is_floating_point():
                    continue
                if parameter in embedded:
                    continue
                known = given(parameter)
                if known is not None and (frozen == "auto" or known.codec in _FORMS[frozen]):
                    found[parameter] = known.codec
                elif frozen != "auto" and not isinstance(module, _NOT_ENCODED) and parameter not in apart:
                    found[parameter] = frozen
    return found


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
