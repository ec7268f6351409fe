"""A small model after two steps, and comparisons for tests of gathered weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import infinity
from tests.models import Batch, loss_of

TIGHT = {"device": "400KiB", "host": "64MiB"}
PLACES = {
    "nvme": {"tier": "nvme"},
    "host": {"tier": "host"},
    "fp32 master": {"tier": "nvme", "master": "fp32"},
    "nvme, generations": {"tier": "nvme", "commit_every": 1},
    "host, generations": {"tier": "host", "commit_every": 1},
}
Trained = tuple[Any, Batch, infinity.AdamW]


def step(model: Any, batch: Batch, optim: Any) -> float:
    loss = loss_of(model, batch)
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.item()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(infinity.state_dict(model))


def assert_same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def changed(before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value * 0.5 if ".layers.1." in name else value for name, value in before.items()}
