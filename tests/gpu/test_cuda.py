"""The CPU's promises on a GPU: the same bits from every tier, and torch's results. `make gpu-check` runs these."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.conftest import states_of, weights_of
from tests.models import Batch, llama, loss_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TIGHT = {"device": "900KiB", "host": "512MiB"}


def build(dtype: torch.dtype) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    model, batch = llama()
    return model.to(dtype).train(), {key: value.cuda() for key, value in batch.items()}


def train(model: nn.Module, optim: torch.optim.Optimizer, batch: Batch, micro_batches: int = 1) -> list[float]:
    losses = []
    for _ in range(10):
        for _ in range(micro_batches):
            loss = loss_of(model, batch)
            loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_device_host_and_nvme_end_in_the_same_bits(dtype: torch.dtype, activations: str, offload: Any) -> None:
    results = []
    for weights, optimizer in (("device", "host"), ("host", "host"), ("host", "nvme"), ("nvme", "nvme")):
        model, batch = build(dtype)
        memory = TIGHT | ({"device": "64MiB"} if weights == "device" else {})
        model = offload(model, weights=weights, optimizer=optimizer, memory=memory, activations=activations)
        losses = train(model, infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0), batch)
        results.append((losses, {n: w.cpu() for n, w in weights_of(model).items()}, states_of(model)))
        infinity.close(model)
    for losses, weights_now, states in results[1:]:
        assert losses == results[0][0]
        assert all(torch.equal(weights_now[name], weight) for name, weight in results[0][1].items())
        assert all(torch.equal(states[name], state) for name, state in results[0][2].items())


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_fp32_training_on_the_gpu_matches_torch(tier: str, offload: Any) -> None:
    plain, batch = build(torch.float32)
    plain.cuda()
    optim = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    optim.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(plain.parameters(), 1.0) and None)
    expected = train(plain, optim, batch)
    model = offload(build(torch.float32)[0], tier, memory=TIGHT)
    losses = train(model, infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0), batch)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)


def test_gradients_accumulate_on_the_gpu(offload: Any) -> None:
    results = []
    for tier in ("host", "nvme"):
        model, batch = build(torch.bfloat16)
        model = offload(model, tier, memory=TIGHT)
        results.append(train(model, infinity.AdamW(model.parameters(), lr=1e-3), batch, micro_batches=3))
        infinity.close(model)
    assert results[0] == results[1]


def test_the_arena_is_pinned(offload: Any) -> None:
    from infinity.schedule import registry

    model = offload(build(torch.bfloat16)[0], memory=TIGHT)
    assert registry.ledger_of(model).backing.arena.pinned
