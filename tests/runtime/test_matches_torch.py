"""Training offloaded ends where torch.optim.AdamW ends on the undisturbed model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from tests import sampling
from tests.conftest import weights_of
from tests.models import ARCHITECTURES, Batch, gpt2, llama, loss_of

STEPS = sampling.number(3, 5)
TIGHT = {"host": "512MiB", "device": "640KiB"}
"""Device memory for two or three units only, so that every step fetches and evicts."""


def make(architecture: str) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    return ARCHITECTURES[architecture]()


def train(model: nn.Module, optim: torch.optim.Optimizer, batch: Batch, steps: int = STEPS) -> list[float]:
    losses = []
    for _ in range(steps):
        torch.manual_seed(len(losses))
        loss = loss_of(model, batch)
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def reference(model: nn.Module, batch: Batch, clip: float | None = 1.0, **options: Any) -> list[float]:
    optim = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, **options)
    if clip:
        optim.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(model.parameters(), clip) and None)
    return train(model, optim, batch)


def assert_close(model: nn.Module, plain: nn.Module, tolerance: float = 2e-5) -> None:
    expected = dict(plain.named_parameters())
    for name, weight in weights_of(model).items():
        torch.testing.assert_close(
            weight, expected[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.covering(strength=1, most=3)
@pytest.mark.parametrize("tier", ["host", "nvme"])
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "mixed"])
def test_fp32_training_matches_torch(architecture: str, tier: str, offload: Any) -> None:
    plain, batch = make(architecture)
    expected = reference(plain.train(), batch)
    model = offload(make(architecture)[0].train(), tier, memory=TIGHT)
    optim = infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    losses = train(model, optim, batch)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    assert_close(model, plain)


@pytest.mark.covering(most=2)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "t5"])
def test_bf16_training_matches_an_fp32_master(architecture: str, offload: Any) -> None:
    """The reference keeps an fp32 copy of every weight and rounds it to bf16 before each forward."""
    plain, batch = make(architecture)
    plain = plain.bfloat16().train()
    masters = {name: p.detach().float().requires_grad_() for name, p in plain.named_parameters()}
    optim = torch.optim.AdamW(masters.values(), lr=1e-3)
    expected = []
    for _ in range(STEPS):
        loss = loss_of(plain, batch)
        loss.backward()
        for name, parameter in plain.named_parameters():
            masters[name].grad = parameter.grad.float()
            parameter.grad = None
        nn.utils.clip_grad_norm_(masters.values(), 1.0)
        optim.step()
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.copy_(masters[name])
        expected.append(loss.item())
    model = offload(make(architecture)[0].bfloat16().train(), memory=TIGHT)
    losses = train(model, infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0), batch)
    # T5 returns its loss in bf16: one unit in the last place of 4 is 0.03.
    torch.testing.assert_close(losses, expected, rtol=2e-3, atol=5e-2 if architecture == "t5" else 2e-3)
    assert_close(model, plain, tolerance=1e-2)


def test_units_of_mixed_dtypes_with_frozen_parameters_match_torch(offload: Any) -> None:
    plain, batch = make("mixed")
    expected = reference(plain, batch, clip=None, weight_decay=0.1)
    model = offload(make("mixed")[0], memory=TIGHT)
    optim = infinity.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses = train(model, optim, batch)
    torch.testing.assert_close(losses, expected, rtol=2e-3, atol=2e-3)
    for name, weight in weights_of(model).items():
        if "fixed" in name:
            assert torch.equal(weight, dict(plain.named_parameters())[name])


def test_dropout_draws_the_same_numbers(offload: Any) -> None:
    def build() -> tuple[nn.Module, Batch]:
        torch.manual_seed(0)
        model, batch = gpt2(dropout=0.2)
        return model.train(), batch

    plain, batch = build()
    expected = reference(plain, batch)
    model = offload(build()[0], memory=TIGHT)
    losses = train(model, infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0), batch)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.covering(most=2)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bert", "whisper"])
def test_transformers_recomputation_changes_nothing(architecture: str, offload: Any) -> None:
    """Not T5: there plain torch's bf16 gradients, too, differ in the last bits between the two."""
    results = []
    for activations in ("keep", "recompute"):
        model, batch = make(architecture)
        model = offload(model.bfloat16().train(), activations=activations, memory=TIGHT)
        if "input_features" in batch:
            batch["input_features"] = batch["input_features"].bfloat16()
        losses = train(model, infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0), batch)
        results.append((losses, weights_of(model)))
        infinity.close(model)
    assert results[0][0] == results[1][0]
    for name, weight in results[0][1].items():
        assert torch.equal(weight, results[1][1][name]), name


def test_t5_with_recomputation_matches_torch(offload: Any, computes_on: Any) -> None:
    """Both with recomputation: in transformers 5.23 that changes T5's gradients, with or without infinity."""
    memory = TIGHT if computes_on is None else TIGHT | {"device": "1MiB"}  # its units break up less than that
    plain, batch = make("t5")
    plain.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    expected = reference(plain.train(), batch)
    model = offload(make("t5")[0].train(), activations="recompute", memory=memory)
    losses = train(model, infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0), batch)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    assert_close(model, plain)


class Checkpointed(nn.Module):
    """Blocks recomputed with one of torch's two forms, block by block or in pairs."""

    def __init__(self, reentrant: bool | None, span: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)
        )
        self.head = nn.Linear(64, 8)
        self._reentrant = reentrant
        self._span = span

    def _run(self, start: int, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[start : start + self._span]:
            x = x + block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for start in range(0, len(self.blocks), self._span):
            if self._reentrant is None:
                x = self._run(start, x)
            else:
                x = checkpoint(self._run, start, x, use_reentrant=self._reentrant)
        return self.head(x).square().mean()


@pytest.mark.parametrize("span", [1, 2])
@pytest.mark.parametrize("reentrant", [True, False])
def test_both_forms_of_torch_checkpointing_match(reentrant: bool, span: int, offload: Any) -> None:
    batch = {"x": torch.randn(4, 64).requires_grad_()}
    torch.manual_seed(0)
    plain = Checkpointed(None, span)
    expected = reference(plain, batch)
    torch.manual_seed(0)
    model = offload(Checkpointed(reentrant, span), memory={"device": "300KiB", "host": "64MiB"})
    losses = train(model, infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0), batch)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert_close(model, plain)


def test_gradient_accumulation_matches_torch(offload: Any) -> None:
    def accumulate(model: nn.Module, optim: torch.optim.Optimizer, batch: Batch) -> list[float]:
        losses = []
        for _ in range(3):
            for part in range(3):
                rows = {key: value.roll(part, dims=1) for key, value in batch.items()}
                loss = loss_of(model, rows) / 3
                loss.backward()
                losses.append(loss.item())
            optim.step()
            optim.zero_grad()
        return losses

    plain, batch = make("llama")
    optim = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    expected = accumulate(plain.train(), optim, batch)
    model = offload(make("llama")[0].train(), memory=TIGHT)
    losses = accumulate(model, infinity.AdamW(model.parameters(), lr=1e-3), batch)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    assert_close(model, plain)


def test_bf16_gradients_accumulate_in_fp32(offload: Any) -> None:
    model = offload(nn.Sequential(nn.Linear(64, 64, bias=False).bfloat16()))
    weight = next(model.parameters())
    total = torch.zeros(64, 64)
    for index in range(20):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(index)).bfloat16()
        y = model(x)
        y.backward(torch.ones_like(y))
        total += (torch.ones(4, 64).bfloat16().T @ x).float()
    optim = infinity.AdamW([weight], lr=0.0)
    optim.step()
    torch.testing.assert_close(optim.last_grad_norm, total.double().norm().item(), rtol=1e-6, atol=0)


def test_backward_from_another_thread_matches(offload: Any) -> None:
    plain, batch = make("llama")
    expected = reference(plain.train(), batch)
    model = offload(make("llama")[0].train(), memory=TIGHT)
    optim = infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model, batch)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_steps_changes_nothing(mode: Callable[[], Any], offload: Any) -> None:
    plain, batch = make("llama")
    expected = reference(plain.train(), batch)
    model = offload(make("llama")[0].train(), memory=TIGHT)
    optim = infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    losses = []
    for _ in range(STEPS):
        with mode():
            before = loss_of(model, batch).item()
        losses += train(model, optim, batch, steps=1)
        assert before == losses[-1]
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)


def test_param_groups_and_a_scheduler_match_torch(offload: Any) -> None:
    def run(model: nn.Module, kind: Any) -> list[float]:
        decay = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim <= 1]
        optim = kind(
            [{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 5e-4, "weight_decay": 0.0}], lr=1e-3
        )
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optim, STEPS)
        losses = []
        for _ in range(STEPS):
            losses += train(model, optim, batch, steps=1)
            scheduler.step()
        return losses

    plain, batch = make("llama")
    expected = run(plain.train(), torch.optim.AdamW)
    model = offload(make("llama")[0].train(), memory=TIGHT)
    torch.testing.assert_close(run(model, infinity.AdamW), expected, rtol=1e-5, atol=1e-5)
    assert_close(model, plain)


def test_a_module_called_twice_in_one_forward_matches_torch(offload: Any) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in [*self.blocks, *self.blocks]:
                x = torch.tanh(block(x))
            return x.square().mean()

    batch = {"x": torch.randn(4, 64)}
    torch.manual_seed(0)
    plain = Twice()
    expected = reference(plain, batch)
    torch.manual_seed(0)
    model = offload(Twice(), memory={"device": "48KiB", "host": "64MiB"})
    losses = train(model, infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0), batch)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert_close(model, plain)


def test_unused_parameters_are_left_alone_as_in_torch(offload: Any) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
            self.use = 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks[: self.use]:
                x = torch.tanh(block(x))
            return x.square().mean()

    def run(model: Half, optim: torch.optim.Optimizer) -> None:
        for use in (2, 4, 1, 3):
            model.use = use
            train(model, optim, batch, steps=1)

    batch = {"x": torch.randn(4, 64)}
    torch.manual_seed(0)
    plain = Half()
    run(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.1))
    torch.manual_seed(0)
    model = offload(Half(), memory={"device": "48KiB", "host": "64MiB"})
    run(model, infinity.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1))
    assert_close(model, plain)


def test_submodules_called_directly_work(offload: Any) -> None:
    plain, batch = make("llama")
    expected = plain.eval().model(input_ids=batch["input_ids"]).last_hidden_state
    model = offload(make("llama")[0].eval(), memory=TIGHT)
    assert torch.equal(model.model(input_ids=batch["input_ids"]).last_hidden_state, expected)


def test_generation_works(offload: Any) -> None:
    plain, batch = llama()
    model = offload(llama_copy(plain), memory=TIGHT)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = plain.eval().generate(batch["input_ids"], **options)
    assert torch.equal(model.eval().generate(batch["input_ids"], **options), expected)


def llama_copy(plain: nn.Module) -> nn.Module:
    model, _ = llama()
    model.load_state_dict(plain.state_dict())
    return model


def test_weights_in_channels_last_order_are_named_and_train_as_in_the_default_order(
    offload: Any, caplog: Any, tmp_path: Path
) -> None:
    def net(memory_format: torch.memory_format) -> nn.Module:
        torch.manual_seed(0)
        made = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
        return made.to(memory_format=memory_format)

    def trained(model: nn.Module) -> list[float]:
        optim = infinity.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(3):
            loss = model(torch.ones(2, 3, 8, 8)).square().mean()
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.item())
        return losses

    caplog.set_level("WARNING", "infinity")
    plain = trained(offload(net(torch.contiguous_format), nvme={"paths": [str(tmp_path / "plain")]}))
    assert not caplog.records
    assert trained(offload(net(torch.channels_last))) == pytest.approx(plain, rel=1e-5)
    assert "'0.weight' and 1 other weights are in channels_last order" in caplog.text


class Spectral(nn.Module):
    """A layer of a Fourier neural operator, with complex weights, or with the same numbers as the error advises."""

    def __init__(self, *, real: bool) -> None:
        super().__init__()
        made = torch.randn(8, 8, 5, dtype=torch.cfloat, generator=torch.Generator().manual_seed(2)) / 8
        self.weight = nn.Parameter(torch.view_as_real(made) if real else made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = torch.view_as_complex(self.weight) if self.weight.dtype == torch.float32 else self.weight
        seen = torch.einsum("bif,iof->bof", torch.fft.rfft(x), weight)
        return x + torch.fft.irfft(seen * weight.conj()[0], n=x.shape[-1])


def test_complex_weights_are_refused_and_train_as_the_error_says(offload: Any) -> None:
    x, found = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1)), []
    for real in (False, True):
        model: Any = nn.Sequential(Spectral(real=real), Spectral(real=real))
        if real:
            model = offload(model, "nvme", memory={"device": "16KiB", "host": "64MiB"})
        optim = infinity.AdamW(model.parameters(), lr=1e-2) if real else torch.optim.AdamW(model.parameters(), lr=1e-2)
        found.append([])
        for _ in range(STEPS):
            loss = model(x).square().mean()
            loss.backward()
            optim.step()
            optim.zero_grad()
            found[-1].append(loss.item())
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=0)
    with pytest.raises(infinity.ModelError, match=r"nn\.Parameter\(torch\.view_as_real\(weight\)\)"):
        offload(Spectral(real=False))
