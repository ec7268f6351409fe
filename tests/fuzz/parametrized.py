"""Random choice of weights that are computed from other parameters each time they are read
(torch.nn.utils.parametrize).
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize


class Symmetric(nn.Module):
    """Parametrization without an inverse: the previous weight is used unchanged."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).mT


class Scaled(nn.Module):
    """Parametrization that has its own parameter."""

    def __init__(self, like: torch.Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(len(like), 1, dtype=like.dtype))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.scale

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight


def _symmetric(linear: nn.Linear) -> object:
    return parametrize.register_parametrization(linear, "weight", Symmetric())


def _scaled(linear: nn.Linear) -> object:
    return parametrize.register_parametrization(linear, "weight", Scaled(linear.weight))


def _twice(linear: nn.Linear) -> object:
    parametrizations.weight_norm(linear)
    return _scaled(linear)


WAYS: dict[str, Callable[[nn.Linear], object]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "symmetric": _symmetric,
    "scaled": _scaled,
    "scaled weight_norm": _twice,
}


def parametrize_some(rng: random.Random, net: nn.Module) -> list[str]:
    """Parametrize some weights of linear layers that are not shared. Returns their names."""
    if rng.random() < 0.7:
        return []
    parameters = [id(parameter) for module in net.modules() for parameter in module._parameters.values()]
    done = []
    for name, module in list(net.named_modules()):
        own = type(module) is nn.Linear and parameters.count(id(module._parameters.get("weight"))) == 1
        if not own or rng.random() < 0.5:
            continue
        square = module.weight.shape[0] == module.weight.shape[1]
        full = module.weight.dtype == torch.float32  # power iterations support only fp32
        ways = [w for w in WAYS if (square or w != "symmetric") and (full or w != "spectral_norm")]
        way = rng.choice(ways)
        WAYS[way](module)
        done.append(f"{way} of {name}")
    return done
