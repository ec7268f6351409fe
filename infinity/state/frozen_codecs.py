"""Choice of the frozen parameters that are kept at home in 4 or 8 bits, and of their encoded form (state/codec.py).

A weight that is not trained is encoded only once, when it is first stored at home, and decoded each time it is fetched.
The model computes with the decoded weight, in the dtype of the parameter. Only the home takes less memory.

An encoded parameter has two dimensions or more and belongs to a block of the model. Embeddings, the head, norms, biases
and adapters are not encoded.
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


class CheckpointEncoding(NamedTuple):
    """Encoded form in which a checkpoint contains a parameter.

    Attributes:
        codec: the form.
        read: function that returns the encoded bytes as uint8, in the layout of state/codec.py.
        rows: function that returns the encoded form of rows [begin, end) of a stack of matrices; None for a matrix.
    """

    codec: Codec
    read: Callable[[], torch.Tensor]
    rows: Callable[[int, int], CheckpointEncoding] | None = None


_given: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by identity: `==` of two parameters compares their values


def remember(parameter: nn.Parameter, known: CheckpointEncoding | None) -> None:
    """Record that a checkpoint contains this parameter in an encoded form; None: forget the form."""
    if known is None:
        forget(parameter)
    else:
        _given[parameter] = known


def remember_rows(parameter: nn.Parameter, part: nn.Parameter, begin: int, end: int) -> None:
    """Record the encoded form of rows [begin, end) of a parameter for the parameter that has these rows."""
    known = encoded_form(parameter)
    if known is not None and known.rows is not None:
        remember(part, known.rows(begin, end))


def encoded_form(parameter: nn.Parameter) -> CheckpointEncoding | None:
    """Return the parameter's encoded form in the checkpoint; None if the checkpoint does not have the parameter in
    encoded form."""
    found: CheckpointEncoding | None = _given.get(parameter)
    return found


def forget(parameter: nn.Parameter) -> None:
    """Forget the encoded form, because the parameter's values may no longer be those of the checkpoint."""
    _given.pop(parameter, None)


def pass_on(parameter: nn.Parameter, another: nn.Parameter) -> None:
    """Record the encoded form of one parameter for another parameter, too. Both must have the same values; their dtypes
    may differ."""
    remember(another, encoded_form(parameter))


def codecs_of(model: nn.Module, blocks: Collection[nn.Module], frozen: FrozenName) -> dict[nn.Parameter, Codec]:
    """Return the codecs of the parameters that are encoded at home.

    Args:
        model: the model.
        blocks: the blocks of the model (state/discover.py).
        frozen: value of `frozen` in the config. With "auto", parameters that are encoded in the checkpoint keep their
            form, and no other parameters are encoded. With another value, a parameter with a different encoded form in
            the checkpoint is decoded and encoded again.
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
                known = encoded_form(parameter)
                if known is not None and (frozen == "auto" or known.codec in _FORMS[frozen]):
                    found[parameter] = known.codec
                elif frozen != "auto" and not isinstance(module, _NOT_ENCODED) and parameter not in apart:
                    found[parameter] = frozen
    return found


def _adapters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that PEFT added to layers.

    In a layer with a `base_layer`, these are all parameters except the parameters of the `base_layer`.
    """
    found: set[nn.Parameter] = set()
    for module in model.modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, nn.Module):
            found.update(set(module.parameters()) - set(base.parameters()))
    return found


def _embedded(model: nn.Module) -> set[nn.Parameter]:
    kinds = nn.Embedding | nn.EmbeddingBag
    return {parameter for module in model.modules() if isinstance(module, kinds) for parameter in module.parameters()}
