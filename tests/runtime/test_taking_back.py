"""A model that was offloaded and not trained becomes one that waits to be offloaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import infinity
from infinity.coordinator import registry
from infinity.runtime.deferred import defer_in_memory, is_deferred, values_of
from infinity.runtime.taking_back import take_back
from tests.models import llama
from tests.runtime.gathering import Trained, step


def test_what_is_taken_back_is_as_before_and_can_be_offloaded_again(swap_config: Any) -> None:
    model: Any = llama()[0].requires_grad_(False)
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    hooks = {name: list(module._forward_pre_hooks) for name, module in model.named_modules()}
    defer_in_memory(model)
    with values_of(model) as values:
        infinity.offload(model, swap_config("nvme"), source=values)
    take_back(model, values.left)
    assert is_deferred(model)
    assert not registry.is_offloaded(model)
    assert hooks == {name: list(module._forward_pre_hooks) for name, module in model.named_modules()}
    assert "zero_grad" not in vars(model)
    infinity.offload(model, swap_config("host"))
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, expected)
    infinity.close(model)


def test_a_model_with_states_is_not_taken_back(trained: Trained) -> None:
    model, batch, optim = trained
    with pytest.raises(infinity.ModelError, match="is trained, and its states would be lost"):
        take_back(model, {})
    assert step(model, batch, optim) > 0
