"""The replay of a step: the bytes of a real one, and the bits left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import infinity
from infinity.access.step_io_replay import replay_step
from infinity.coordinator import registry
from tests.conftest import states_of, weights_of
from tests.models import llama, loss_of


def moved(model: torch.nn.Module) -> tuple[int, int]:
    now = infinity.statistics(model)
    return now.read_bytes, now.written_bytes


def train(model: Any, optim: Any, batch: Any) -> None:
    loss_of(model, batch).backward()
    optim.step()
    optim.zero_grad()


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("weights", ["nvme", "host"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_replay_moves_what_a_step_moves_and_changes_nothing(weights: str, dtype: torch.dtype, offload: Any) -> None:
    model, batch = llama()
    memory = {"device": "500KiB", "host": "64MiB"}
    model = offload(model.to(dtype).train(), weights=weights, memory=memory, overlap="off")
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        train(model, optim, batch)
    coordinator = registry.coordinator_of(model)
    replay_step(coordinator)
    before = moved(model)
    train(model, optim, batch)
    real = tuple(after - earlier for after, earlier in zip(moved(model), before, strict=True))
    step = replay_step(coordinator)
    bits = weights_of(model) | states_of(model)
    for _ in range(2):
        replay_step(coordinator)
    assert (step.read_bytes, step.written_bytes) == real
    assert 0 < step.io_s <= step.seconds
    again = weights_of(model) | states_of(model)
    assert all(torch.equal(again[name], value) for name, value in bits.items())


def test_training_goes_on_after_a_replay_as_if_there_had_been_none(offload: Any) -> None:
    ends = []
    for replays in (0, 2):
        torch.manual_seed(0)
        model, batch = llama()
        model = offload(model.bfloat16().train())
        optim = infinity.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            train(model, optim, batch)
            for _ in range(replays):
                replay_step(registry.coordinator_of(model))
        ends.append(weights_of(model) | states_of(model))
        infinity.close(model)
    assert all(torch.equal(ends[1][name], value) for name, value in ends[0].items())
