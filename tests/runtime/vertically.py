"""Models whose micro-batches all pass through a unit before the next unit, and comparisons for their tests."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.coordinator import registry
from infinity.runtime import micro_batches
from tests import models
from tests.conftest import require_no_leaks, states_of, weights_of


def made(make: Callable[[], tuple[Any, models.Batch]], recomputes: str, dtype: torch.dtype) -> tuple[Any, models.Batch]:
    """Return a model that recomputes nothing, or that recomputes its blocks in one of torch's two ways."""
    torch.manual_seed(0)
    model, batch = make()
    model = model.to(dtype).train()
    if recomputes != "nothing":
        options = {"use_reentrant": recomputes == "reentrant"}
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    return model, batch


def batches_of(batch: models.Batch, count: int) -> list[models.Batch]:
    """Return batches of unequal lengths."""
    rolled = [torch.roll(batch["input_ids"], index, dims=1)[:, : 16 - index].contiguous() for index in range(count)]
    return [{**batch, "input_ids": ids, "labels": ids} for ids in rolled]


def is_vertical(model: Any) -> bool:
    """Return whether infinity has learned the stages of the model: all micro-batches pass through a stage before the
    next stage.
    """
    return micro_batches._known[model].chain is not None


def grads(model: Any) -> dict[str, torch.Tensor]:
    """Return the gradients that have landed, in fp32, by name."""
    coordinator, found = registry.coordinator_of(model), {}
    coordinator.gradients.synchronize()
    for _, place in coordinator.places():
        if not place.group.trainable:
            continue
        group = coordinator.gradients.of(place)
        if place.spec.name in group.present:
            flat = torch.frombuffer(bytearray(group._range(place.spec)), dtype=group.dtype)
            found[place.spec.name] = flat.float()
    return found


class Blocks(nn.Module):
    """Linear blocks of 1 KiB and more, with other modules around them."""

    def __init__(self, *middle: nn.Module, past: bool = False, twice: bool = False, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(32, 32) for _ in range(depth)])
        self.middle = nn.ModuleList(middle)
        self.past = past
        self.twice = twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = torch.tanh(self.blocks[0](x))
        for block in self.blocks[1:]:
            x = torch.tanh(block(x))
        for module in self.middle:
            x = module(x)
        if self.twice:
            x = self.blocks[1](x)
        return ((x + first) if self.past else x).square().mean()


def inputs(count: int = 3) -> list[torch.Tensor]:
    """Return micro-batches of Blocks, of four rows and more."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4 + index, 32, generator=generator) for index in range(count)]


def both(make: Callable[[], nn.Module], offload: Any, tmp_path: Path, steps: int = 2, **config: Any) -> list[Any]:
    """Train one model in ordinary order and one model in vertical order, require the same bits, and return
    both models.
    """
    ended, results = [], []
    for vertical in (False, True):
        torch.manual_seed(0)
        model = offload(make().train(), nvme={"paths": [str(tmp_path / f"swap{vertical}")]}, **config)
        optim = infinity.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(steps):
            losses += infinity.backward(model, model, inputs(), vertical=vertical)
            optim.step()
            optim.zero_grad()
        results.append((losses, weights_of(model) | states_of(model) | dict(model.named_buffers())))
        ended.append(model)
        require_no_leaks(model)
    assert results[0][0] == results[1][0]
    for name, value in results[0][1].items():
        assert torch.equal(value, results[1][1][name]), name
    return ended


class Unhappy(Exception):  # noqa: N818
    """Exception of a loss function or a forward."""


def warnings_of(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return a function that returns infinity's warnings from now on."""
    caplog.set_level(logging.WARNING, "infinity")
    return lambda: list(caplog.messages)
