"""A model of a preset's shape: its parameters on the meta device, in modules that are cut into units as those of the
real model are. It computes nothing."""

from __future__ import annotations

import torch
from torch import nn

from infinity.cli.planning.presets import Shape


class _Norm(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        if bias:
            self.bias = nn.Parameter(torch.empty(width))


class _WithoutValues(nn.Linear):
    """Without values there is nothing to draw, and torch would take a second to find that out."""

    def reset_parameters(self) -> None:
        return


def _linear(inward: int, outward: int, bias: bool) -> nn.Linear:
    made: nn.Linear = _WithoutValues(inward, outward, bias)
    made.__class__ = nn.Linear  # which may be tiled
    return made


class _Embedding(nn.Embedding):
    """Likewise."""

    def reset_parameters(self) -> None:
        return


class _Block(nn.Module):
    """Args: attends: to the encoder's output, too."""

    def __init__(self, shape: Shape, *, attends: bool = False) -> None:
        super().__init__()
        queries, biased = shape.bias in ("all", "qkv"), shape.bias in ("all", "mlp")
        for name in ("attention", "cross_attention") if attends else ("attention",):
            self.add_module(f"{name}_q", _linear(shape.hidden, shape.query_width, queries))
            self.add_module(f"{name}_k", _linear(shape.hidden, shape.kv_width, queries))
            self.add_module(f"{name}_v", _linear(shape.hidden, shape.kv_width, queries))
            self.add_module(f"{name}_o", _linear(shape.query_width, shape.hidden, shape.bias == "all"))
        for name in ("up", "gate") if shape.gated else ("up",):
            self.add_module(name, _linear(shape.hidden, shape.intermediate, biased))
        self.down = _linear(shape.intermediate, shape.hidden, biased)
        for number in range(shape.norms + attends):
            self.add_module(f"norm{number}", _Norm(shape.hidden, shape.norm_bias))
        if shape.head_norms:
            self.q_norm = _Norm(shape.head_width, False)
            self.k_norm = _Norm(shape.head_width, False)

    def forward(self) -> None:
        """A module with a forward is a block; one without is a list of blocks (state/discover.py)."""
        raise NotImplementedError


class Skeleton(nn.Module):
    """See the module.

    Attributes:
        supports_gradient_checkpointing, is_encoder_decoder: as models of transformers have them.
        query_width: of all heads of a block's attention.
    """

    supports_gradient_checkpointing = True

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.is_encoder_decoder, self.query_width = shape.decoder, shape.query_width
        self.embedding = _Embedding(shape.vocabulary, shape.hidden)
        if shape.positions:
            self.positions = _Embedding(shape.positions, shape.hidden)
        self.layers = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        if shape.decoder:
            self.decoder_layers = nn.ModuleList(_Block(shape, attends=True) for _ in range(shape.layers))
        self.norm = _Norm(shape.hidden, shape.norm_bias)
        self.head = _linear(shape.hidden, shape.vocabulary, bias=shape.head_bias)
        if shape.tied:
            self.head.weight = self.embedding.weight


def skeleton(shape: Shape, dtype: torch.dtype) -> Skeleton:
    """On the meta device."""
    with torch.device("meta"):
        return Skeleton(shape).to(dtype)
