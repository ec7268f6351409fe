"""The CPU's promises on a GPU: the same bits from every tier, however gradients come, and torch's results.

`make gpu-check` runs these. Memory for weights is so small that a pass evicts units: see `TIGHT`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.base.accelerator import open_accelerator
from infinity.coordinator import registry
from infinity.io.arena import PinnedArena
from infinity.tiers import activations, decoding
from tests.conftest import states_of, weights_of
from tests.models import Batch, llama, loss_of

TIGHT = {"device": "500KiB", "host": "512MiB"}
"""The model has 450 KiB of bf16 weights, and slots for less than a half of them. With fp32 nothing smaller would do."""
TIERS = (("device", "host"), ("host", "host"), ("host", "nvme"), ("nvme", "nvme"))
Result = tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]


def build(dtype: torch.dtype, gpu: torch.device) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    model, batch = llama(attn_implementation="eager")
    return model.to(dtype).train(), {key: value.to(gpu) for key, value in batch.items()}


def place(offload: Any, model: nn.Module, tiers: tuple[str, str], gpu: torch.device, **overrides: Any) -> nn.Module:
    weights, optimizer = tiers
    memory = TIGHT | ({"device": "64MiB"} if weights == "device" else {})
    return offload(model, weights=weights, optimizer=optimizer, memory=memory, device=gpu, **overrides)  # type: ignore[no-any-return]


def train(
    model: nn.Module,
    batch: Batch,
    steps: int = 6,
    micro_batches: int = 1,
    scaler: torch.amp.GradScaler | None = None,
    max_grad_norm: float | None = 1.0,
) -> list[float]:
    optim, losses = infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=max_grad_norm), []
    for _ in range(steps):
        for _ in range(micro_batches):
            loss = loss_of(model, batch)
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optim.step()
        else:
            scaler.unscale_(optim)
            scaler.step(optim)
            scaler.update()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def result_of(model: nn.Module, losses: list[float]) -> Result:
    found = losses, {name: weight.cpu() for name, weight in weights_of(model).items()}, states_of(model)
    infinity.close(model)
    return found


def require_same(result: Result, expected: Result) -> None:
    assert result[0] == expected[0]
    for now, before in zip(result[1:], expected[1:], strict=True):
        assert now.keys() == before.keys()
        assert [name for name in before if not torch.equal(now[name], before[name])] == []


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_device_host_and_nvme_end_in_the_same_bits(
    dtype: torch.dtype, activations: str, gpu: torch.device, offload: Any
) -> None:
    results = []
    for tiers in TIERS:
        model, batch = build(dtype, gpu)
        model = place(offload, model, tiers, gpu, activations=activations)
        results.append(result_of(model, train(model, batch)))
    for result in results[1:]:
        require_same(result, results[0])


@pytest.mark.parametrize("tiers", TIERS[1:], ids="-".join)
def test_units_are_evicted_and_come_back(tiers: tuple[str, str], gpu: torch.device, offload: Any) -> None:
    """Without evictions the other tests would not test them."""
    model, batch = build(torch.bfloat16, gpu)
    model = place(offload, model, tiers, gpu)
    loss_of(model, batch)
    there = [unit.weights.slot is not None for unit in registry.coordinator_of(model).units]
    assert not all(there)


@pytest.mark.parametrize("gradients", ["host", "nvme"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_micro_batches_add_up_to_the_same_bits(
    dtype: torch.dtype, gradients: str, gpu: torch.device, offload: Any
) -> None:
    results = []
    for tiers in TIERS:
        model, batch = build(dtype, gpu)
        model = place(offload, model, tiers, gpu, gradients=gradients)
        results.append(result_of(model, train(model, batch, steps=5, micro_batches=3)))
    for result in results[1:]:
        require_same(result, results[0])


def test_gradients_that_spill_end_in_the_bits_of_those_that_do_not(gpu: torch.device, offload: Any) -> None:
    results = []
    for gradients in ("host", "nvme"):
        model, batch = build(torch.bfloat16, gpu)
        model = place(offload, model, ("nvme", "nvme"), gpu, gradients=gradients)
        results.append(result_of(model, train(model, batch)))
    require_same(results[1], results[0])


def test_fp16_with_a_grad_scaler_ends_in_the_same_bits(gpu: torch.device, offload: Any) -> None:
    results = []
    for tiers in TIERS:
        model, batch = build(torch.float16, gpu)
        model = place(offload, model, tiers, gpu)
        scaler = torch.amp.GradScaler(gpu.type, init_scale=2.0**22, growth_interval=3)
        results.append(result_of(model, train(model, batch, scaler=scaler)))
        assert 0 < scaler.get_scale() < 2.0**22  # it overflowed in the beginning
    for result in results[1:]:
        require_same(result, results[0])


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_updates_during_backward_end_in_the_bits_of_updates_after_it(
    max_grad_norm: float | None, micro_batches: int, gpu: torch.device, offload: Any
) -> None:
    for tiers in TIERS[1:]:
        results = []
        for overlap in ("off", "during_backward", "before_forward", "auto"):
            model, batch = build(torch.bfloat16, gpu)
            model = place(offload, model, tiers, gpu, overlap=overlap)
            losses = train(model, batch, steps=4, micro_batches=micro_batches, max_grad_norm=max_grad_norm)
            results.append(result_of(model, losses))
        for result in results[1:]:
            require_same(result, results[0])


@pytest.mark.parametrize("tiers", TIERS[1:], ids="-".join)
def test_a_run_that_is_resumed_ends_in_the_bits_of_one_that_never_stopped(
    tiers: tuple[str, str], gpu: torch.device, offload: Any, swap_config: Any
) -> None:
    model, batch = build(torch.bfloat16, gpu)
    expected = result_of(model := place(offload, model, tiers, gpu), train(model, batch, steps=6))
    model, batch = build(torch.bfloat16, gpu)
    losses = train(model := place(offload, model, tiers, gpu, commit_every=1), batch, steps=3)
    infinity.close(model)
    model, batch = build(torch.bfloat16, gpu)
    weights, optimizer = tiers
    config = swap_config(weights=weights, optimizer=optimizer, memory=TIGHT, commit_every=1)
    model = infinity.resume(model, config, device=gpu)
    losses += train(model, batch, steps=3)
    require_same(result_of(model, losses), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_blocks_end_in_the_bits_of_kept_activations(
    use_reentrant: bool, gpu: torch.device, offload: Any
) -> None:
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = Blocks(use_reentrant if recompute else None).bfloat16()
        batch = {"x": torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).bfloat16().to(gpu)}
        model = place(offload, model, ("nvme", "nvme"), gpu)
        results.append(result_of(model, train(model, batch)))
    require_same(results[1], results[0])


class Blocks(nn.Module):
    """Blocks that torch checkpoints; reduced to a loss. `use_reentrant` None: not checkpointed."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6))
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()  # reentrant checkpointing needs an input that does
        for block in self.blocks:
            if self.use_reentrant is None:
                x = x + block(x)
            else:
                x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return (x.float() ** 2).mean()


def test_evaluation_between_steps_changes_nothing(gpu: torch.device, offload: Any) -> None:
    results = []
    for evaluates in (False, True):
        model, batch = build(torch.bfloat16, gpu)
        model = place(offload, model, ("host", "nvme"), gpu)
        losses = []
        for _ in range(4):
            losses += train(model, batch, steps=1)
            if evaluates:
                with torch.no_grad():
                    loss_of(model, batch)
                with torch.inference_mode():
                    loss_of(model, batch)
        results.append(result_of(model, losses))
    require_same(results[1], results[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs streams")
def test_a_loop_on_a_stream_of_its_own_ends_in_the_same_bits(gpu: torch.device, offload: Any) -> None:
    results = []
    for stream in (torch.cuda.default_stream(gpu), torch.cuda.Stream(gpu)):
        model, batch = build(torch.bfloat16, gpu)
        model = place(offload, model, ("host", "nvme"), gpu)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            losses = train(model, batch)
        torch.cuda.synchronize()
        results.append(result_of(model, losses))
    require_same(results[1], results[0])


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_fp32_training_matches_torch(tier: str, gpu: torch.device, offload: Any) -> None:
    plain, batch = build(torch.float32, gpu)
    plain.to(gpu)
    optim, expected = torch.optim.AdamW(plain.parameters(), lr=1e-3), []
    for _ in range(6):
        loss = loss_of(plain, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optim.step()
        optim.zero_grad()
        expected.append(loss.item())
    model = place(offload, build(torch.float32, gpu)[0], (tier, tier), gpu)
    torch.testing.assert_close(train(model, batch), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiles for a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_kernel_decodes_nf4_to_the_same_bits(dtype: torch.dtype, gpu: torch.device) -> None:
    assert decoding.fused_nf4(gpu, dtype) is not None


def test_micro_batches_that_add_up_on_the_device_end_in_the_bits_of_ordinary_ones(
    gpu: torch.device, offload: Any
) -> None:
    results = []
    for vertical in (True, False):
        built, batch = build(torch.bfloat16, gpu)
        model = place(offload, built, ("host", "host"), gpu)
        optim = infinity.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            infinity.backward(model, lambda each, model=model: loss_of(model, each) / 3, [batch] * 3, vertical=vertical)
            optim.step()
            optim.zero_grad()
        results.append(result_of(model, []))
    require_same(results[1], results[0])


@pytest.mark.parametrize("recompute", ["none", "blocks"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_activations_that_moved_end_in_the_bits_of_those_that_stayed(
    micro_batches: int, recompute: str, gpu: torch.device, offload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations, "PIECE_BYTES_MIN", 256)
    monkeypatch.setattr(activations, "_STAY_SHARE", 1 << 40)
    results = []
    for where in ("keep", "host", "nvme"):
        model, batch = build(torch.bfloat16, gpu)
        model = place(offload, model, ("host", "host"), gpu, activations=where, recompute=recompute)
        optim, losses = infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0), []
        for _ in range(4):
            losses += infinity.backward(model, lambda each, model=model: loss_of(model, each), [batch] * micro_batches)
            optim.step()
            optim.zero_grad()
        tier = registry.coordinator_of(model).resources.activations
        assert (tier is not None and tier.moved_bytes > 0) == (where != "keep")
        results.append(result_of(model, [loss.item() for loss in losses]))
    for result in results[1:]:
        require_same(result, results[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pins memory")
def test_the_arena_is_pinned(gpu: torch.device, offload: Any) -> None:
    model = place(offload, build(torch.bfloat16, gpu)[0], ("host", "nvme"), gpu)
    assert registry.coordinator_of(model).resources.arena.pinned


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pins memory")
def test_a_kernel_after_a_refused_pinning_succeeds(gpu: torch.device) -> None:
    arena, accelerator = PinnedArena(1 << 20), open_accelerator(gpu)
    assert accelerator is not None
    assert arena.pin(accelerator) == ""
    assert "refused" in arena.pin(accelerator)
    assert torch.ones(8, device=gpu).sum().item() == 8
