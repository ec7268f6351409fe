"""Weights that are changed between two steps and put back have their masters again (FGM, AWP)."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.access.exact import exact_value
from infinity.coordinator import masters_before_write, registry
from tests.runtime.gathering import PLACES


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32, dtype=torch.bfloat16)
        self.out = nn.Linear(32, 8, dtype=torch.bfloat16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(ids)).float().square().mean()


IDS = torch.arange(12).view(2, 6)


def masters(model: nn.Module) -> dict[str, torch.Tensor]:
    coordinator = registry.coordinator_of(model)
    return {place.spec.name: exact_value(coordinator, place) for _, place in coordinator.places()}


@pytest.fixture(params=PLACES)
def model(request: Any, offload: Any) -> Any:
    """After two steps: its masters have more than its weights."""
    torch.manual_seed(0)
    made = offload(Net(), **PLACES[request.param])
    step(made, infinity.AdamW(made.parameters(), lr=1e-3), 2)
    assert any((value != value.bfloat16()).any() for value in masters(made).values())
    return made


def step(model: Any, optim: Any, count: int = 1) -> None:
    for _ in range(count):
        model(IDS).backward()
        optim.step()
        optim.zero_grad()
    infinity.synchronize(model)


def write(model: Any, change: Any) -> None:
    with infinity.gathered(model, write=True), torch.no_grad():
        change(model.embed.weight)


def test_an_adversarial_step_on_an_embedding_leaves_every_master(model: Any) -> None:
    """FGM perturbs, runs forward and backward, and restores."""
    before = masters(model)
    with infinity.gathered(model):
        kept = model.embed.weight.detach().clone()
    write(model, lambda weight: weight.add_(0.25))
    changed = masters(model)["embed.weight"]
    assert torch.equal(changed, (kept + 0.25).float())
    model(IDS).backward()
    write(model, lambda weight: weight.copy_(kept))
    after = masters(model)
    assert [name for name, value in before.items() if not torch.equal(after[name], value)] == []


def test_weights_that_a_write_leaves_alone_keep_their_masters_and_the_others_get_new_ones(model: Any) -> None:
    before = masters(model)["embed.weight"]
    write(model, lambda weight: weight[3].fill_(0.5))
    after = masters(model)["embed.weight"]
    assert torch.equal(after[3], torch.full((32,), 0.5))
    others = torch.arange(64) != 3
    assert torch.equal(after[others], before[others])


def test_what_is_put_back_in_part_after_several_writes_is_right_in_each_part(model: Any) -> None:
    before = masters(model)["embed.weight"]
    with infinity.gathered(model):
        kept = model.embed.weight.detach().clone()
    write(model, lambda weight: weight[:8].mul_(2))
    write(model, lambda weight: weight[4:12].add_(0.5))
    write(model, lambda weight: weight[:6].copy_(kept[:6]))
    after = masters(model)["embed.weight"]
    assert torch.equal(after[:6], before[:6])
    assert torch.equal(after[6:8], (kept[6:8] * 2 + 0.5).float())
    assert torch.equal(after[8:12], (kept[8:12] + 0.5).float())
    assert torch.equal(after[12:], before[12:])


def test_several_perturbations_of_a_step_leave_every_master(model: Any) -> None:
    """One for each micro-batch, each another one."""
    before = masters(model)
    with infinity.gathered(model):
        kept = model.embed.weight.detach().clone()
    for change in (0.25, -0.5, 0.125):
        write(model, lambda weight, change=change: weight.add_(change))
        write(model, lambda weight: weight.copy_(kept))
    after = masters(model)
    assert [name for name, value in before.items() if not torch.equal(after[name], value)] == []


def test_after_a_step_they_are_other_masters(model: Any, offload: Any) -> None:
    with infinity.gathered(model):
        kept = model.embed.weight.detach().clone()
    write(model, lambda weight: weight.add_(0.25))
    optim = registry.coordinator_of(model).optimizers.sole
    step(model, optim)
    write(model, lambda weight: weight.copy_(kept))
    with infinity.gathered(model):
        same = model.embed.weight == kept
    assert same.all()
    assert torch.equal(masters(model)["embed.weight"], kept.float())


def test_masters_that_are_too_many_to_keep_are_named_when_their_weights_are_put_back(
    model: Any, monkeypatch: Any, caplog: Any
) -> None:
    caplog.set_level(logging.WARNING, "infinity")
    monkeypatch.setattr(masters_before_write, "available_device_bytes", lambda device: 1000)
    with infinity.gathered(model):
        kept = model.embed.weight.detach().clone()
    write(model, lambda weight: weight.add_(0.25))
    assert not caplog.records
    write(model, lambda weight: weight.copy_(kept))
    assert "the weights of 'embed.weight' were restored, but not their fp32 masters" in caplog.text
    assert torch.equal(masters(model)["embed.weight"], kept.float())
