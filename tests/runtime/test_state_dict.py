"""torch's own state_dict and load_state_dict, of an offloaded model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.state.released import ReleasedParameter
from tests.models import loss_of
from tests.runtime.gathering import Trained, assert_same, changed, step, weights


def test_state_dict_of_the_model_and_of_a_part_are_copies_of_the_weights(trained: Trained) -> None:
    model, batch, optim = trained
    expected = weights(model)
    whole, part = model.state_dict(), model.model.layers[1].state_dict()
    assert_same(whole, expected)
    assert_same(part, {name: expected[f"model.layers.1.{name}"] for name in part})
    step(model, batch, optim)
    assert_same(whole, expected)
    assert all(isinstance(parameter, ReleasedParameter) for parameter in model.parameters())


def test_state_dict_in_the_forward_is_a_copy_too(trained: Trained) -> None:
    """There the weights are views of slots, which will be other weights."""
    model, batch, _ = trained
    expected, seen = weights(model), []
    hook = model.model.layers[1].register_forward_hook(lambda module, *_: seen.append(module.state_dict()))
    loss_of(model, batch)
    hook.remove()
    assert_same(seen[0], {name: expected[f"model.layers.1.{name}"] for name in seen[0]})


def test_a_state_dict_that_does_not_fit_memory_host_is_refused_with_the_other_ways(offload: Any) -> None:
    model = offload(nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(16)]), memory={"host": "48MiB"})
    with pytest.raises(infinity.ReleasedParameterError, match=r"would take 64\.\d+ MiB of RAM.*save_pretrained"):
        model.state_dict()
    assert model[3].state_dict()["weight"].isfinite().all()


def test_load_state_dict_changes_the_weights_that_the_run_goes_on_with(trained: Trained) -> None:
    model, batch, optim = trained
    before = model.state_dict()
    step(model, batch, optim)
    assert model.load_state_dict(changed(before)).missing_keys == []
    assert_same(weights(model), changed(before))
    step(model, batch, optim)


def test_load_state_dict_refuses_as_torch_does_and_leaves_what_did_not_fit(trained: Trained) -> None:
    model, batch, optim = trained
    before = weights(model)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})
    with pytest.raises(RuntimeError, match="size mismatch for lm_head.weight"):
        model.load_state_dict({"lm_head.weight": torch.zeros(3)}, strict=False)
    with pytest.raises(infinity.ReleasedParameterError, match="assign=True"):
        model.load_state_dict(before, assign=True)
    assert_same(weights(model), before)
    step(model, batch, optim)
