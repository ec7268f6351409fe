"""Models that are trained under stress: several architectures, kinds of checkpointing, dtypes and frozen parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.mixture import Mixture
from tests.models import Batch, gpt2, llama, mixed, mixtral, t5


class Odd(nn.Module):
    """A model with a block that is used twice, a block that is used in some iterations only, and a parameter outside of
    blocks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(48, 48)
        self.sometimes = nn.Linear(48, 48).bfloat16()
        self.last = nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 48))
        self.scale = nn.Parameter(torch.ones(48))

    def forward(self, x: torch.Tensor, *, gated: bool = False) -> torch.Tensor:
        x = torch.tanh(self.twice(x))
        if gated:
            x = x + self.sometimes(x.bfloat16()).float()
        x = torch.tanh(self.twice(x))
        return ((self.last(x) * self.scale) ** 2).mean()


class Checkpointed(nn.Module):
    """Blocks whose `__call__` is checkpointed, as is common in torch."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(32, 48)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.LayerNorm(48)) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return (x**2).mean()


def _apart(shared: bool) -> tuple[nn.Module, Batch]:
    model = Checkpointed(reentrant=False)
    model.blocks[1] = Mixture(48, experts=8, each=2, shared=shared)
    return model, _x(32)


def _x(width: int) -> Batch:
    return {"x": torch.randn(8, width, generator=torch.Generator().manual_seed(3))}


def _recomputing(reentrant: bool) -> tuple[nn.Module, Batch]:
    model, batch = llama(layers=3)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})  # type: ignore[operator]
    return model, batch


def _frozen() -> tuple[nn.Module, Batch]:
    model, batch = llama(layers=3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not ("embed" in name or "layers.1." in name or "q_proj" in name))
    return model, batch


SUBJECTS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "llama": lambda: llama(layers=3),
    "tied": lambda: llama(layers=2, tie_word_embeddings=True),
    "frozen": _frozen,
    "reentrant": lambda: _recomputing(True),
    "recomputing": lambda: _recomputing(False),
    "gpt2": gpt2,
    "t5": t5,
    "mixtral": mixtral,
    "mixed": mixed,
    "odd": lambda: (Odd(), _x(48)),
    "checkpointed": lambda: (Checkpointed(reentrant=False), _x(32)),
    "checkpointed_reentrant": lambda: (Checkpointed(reentrant=True), _x(32)),
    "experts": lambda: _apart(shared=False),
    "shared_expert": lambda: _apart(shared=True),
}
OWN_DTYPES = ("mixed", "odd", "checkpointed", "checkpointed_reentrant", "experts", "shared_expert")


def make(name: str, dtype: torch.dtype) -> tuple[Any, Batch]:
    """Return a model and a batch, with the same weights each time."""
    torch.manual_seed(0)
    model, batch = SUBJECTS[name]()
    return (model if name in OWN_DTYPES else model.to(dtype)).train(), batch


def variant(batch: Batch, index: int) -> Batch:
    """Return another batch of the same shapes for each index."""
    return {name: torch.roll(value, index, dims=-1) for name, value in batch.items()}
