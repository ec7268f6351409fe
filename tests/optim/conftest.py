"""A small offloaded model, and checks of the results of its steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import weights_of


@pytest.fixture
def small(offload: Any) -> nn.Module:
    return offload(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "host")


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 8)).square().sum().backward()


def require_unchanged_by(model: nn.Module, what: Any, error: type[BaseException], match: str) -> None:
    """Require that the call of `what` raises an error, and that the call changes no weight."""
    before = weights_of(model)
    with pytest.raises(error, match=match):
        what()
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(model).items())


def require_next_step_is_good(model: nn.Module, optim: Any) -> None:
    before = weights_of(model)
    optim.zero_grad()
    backward(model)
    optim.step()
    after = weights_of(model)
    assert not any(torch.equal(after[name], weight) for name, weight in before.items())
    assert all(weight.isfinite().all() for weight in after.values())
