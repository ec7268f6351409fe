"""Parts of the families' models: configs that several share, inputs, and a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.models import Batch


def size(output: Any) -> torch.Tensor:
    """Return a loss that is not tiny even if the values are tiny. If the output has several tensors, the last tensor is
    used.
    """
    tensor = output if isinstance(output, torch.Tensor) else output[-1]
    return tensor.float().square().mean().log()


class Reduced(nn.Module):
    """A model with a loss computed from its outputs."""

    def __init__(self, inner: nn.Module, *outputs: str) -> None:
        super().__init__()
        self.inner = inner
        self._outputs = outputs

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        found = self.inner(**batch)
        return torch.stack([size(found[name]) for name in self._outputs]).sum()


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ids(*shape: int, top: int = 64, least: int = 5) -> torch.Tensor:
    return torch.randint(least, top, shape, generator=torch.Generator().manual_seed(1))


def image(side: int = 32) -> Batch:
    return {"pixel_values": noise(2, 3, side, side)}


BERT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "max_position_embeddings": 32,
}


TRUNK: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 8,
}


class Called(nn.Module):
    """A model that is only called through the function `call`, which returns a loss. By default, the loss is computed
    from the model's output tensor.
    """

    def __init__(self, inner: nn.Module, call: Callable[[Any, torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.inner = inner
        self._call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return size(self.inner(x)) if self._call is None else self._call(self.inner, x)
