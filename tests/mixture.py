"""A small mixture of experts whose experts are in tiles, and the same computation in plain torch."""

from __future__ import annotations

import types
from typing import Any, TypeVar

import torch
import transformers as hf
from torch import nn
from transformers.integrations.moe import grouped_mm_experts_forward
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from infinity.runtime.experts import ExpertBank, make_bank

Model = TypeVar("Model", bound=nn.Module)


class Mixture(nn.Module):
    """Block with a router, experts and perhaps a shared expert that follows the others.

    Args:
        width: width of the input.
        inner: width inside an expert.
        experts: number of experts.
        chosen: number of experts of each token.
        each: number of experts in a tile.
    """

    def __init__(
        self, width: int, *, inner: int = 16, experts: int = 6, chosen: int = 2, each: int = 1, shared: bool = False
    ) -> None:
        super().__init__()
        config = hf.MixtralConfig(hidden_size=width, intermediate_size=inner, num_local_experts=experts)
        config._experts_implementation = "grouped_mm"
        self.chosen = chosen
        self.gate = nn.Linear(width, experts)
        self.experts: Any = MixtralExperts(config)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=width**-0.5)
        make_bank(self.experts, range(0, experts, each))
        self.shared = nn.Linear(width, width) if shared else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = x.reshape(-1, x.shape[-1]).to(self.gate.weight.dtype)
        factors, chosen = self.gate(inside).float().softmax(-1).topk(self.chosen)
        made = self.experts(inside, chosen, factors.to(inside.dtype))
        if self.shared is not None:
            made = made + torch.tanh(self.shared(inside))
        return x + made.view(x.shape).to(x.dtype)


def in_plain_torch(model: Model) -> Model:
    """Let transformers' grouped_mm compute the experts of a model that is not offloaded, from whole stacks."""
    for module in model.modules():
        if isinstance(module, ExpertBank):
            module.forward = types.MethodType(grouped_mm_experts_forward, module)  # type: ignore[method-assign]
    return model
