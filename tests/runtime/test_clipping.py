"""torch's own gradient clipping works on offloaded parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.conftest import states_of, weights_of
from tests.models import llama, loss_of

STEPS = 4
TIGHT = {"host": "512MiB", "device": "640KiB"}

Clip = Callable[[nn.Module], Any]


def clip_all(model: nn.Module) -> Any:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def clip_one_by_one(model: nn.Module) -> Any:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)


def clip_by_its_parts(model: nn.Module) -> Any:
    norm = nn.utils.get_total_norm(parameter.grad for parameter in model.parameters())
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
    return norm


def clip_each_for_itself(model: nn.Module) -> Any:
    return sum(nn.utils.clip_grad_norm_([parameter], 0.1) for parameter in model.parameters())


def clip_every_second(model: nn.Module) -> Any:
    return nn.utils.clip_grad_norm_(list(model.parameters())[::2], 0.05)


def multiply_by_hand(model: nn.Module) -> Any:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.25).div_(2)
    return torch.linalg.vector_norm(next(model.parameters()).grad)


CLIPS: list[Clip] = [
    clip_all,
    clip_one_by_one,
    clip_by_its_parts,
    clip_each_for_itself,
    clip_every_second,
    multiply_by_hand,
]


def train(model: nn.Module, optim: torch.optim.Optimizer, batch: Any, clip: Clip) -> list[float]:
    seen = []
    for _ in range(STEPS):
        loss = loss_of(model, batch)
        loss.backward()
        seen += [loss.item(), float(clip(model))]
        optim.step()
        optim.zero_grad()
    return seen


@pytest.mark.covering(strength=1, most=4)
@pytest.mark.parametrize("overlap", ["off", "during_backward"])
@pytest.mark.parametrize("clip", CLIPS)
def test_clipping_with_torch_ends_where_torch_ends(clip: Clip, overlap: str, offload: Any) -> None:
    torch.manual_seed(0)
    plain, batch = llama()
    torch.manual_seed(0)
    model = offload(llama()[0], "nvme", memory=TIGHT, overlap=overlap)
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3), batch, clip)
    found = train(model, infinity.AdamW(model.parameters(), lr=1e-3), batch, clip)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6)
    theirs = dict(plain.named_parameters())
    for name, weight in weights_of(model).items():
        torch.testing.assert_close(weight, theirs[name], rtol=2e-5, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_clipping_with_torch_and_with_the_optimizer_end_in_the_same_bits(offload: Any) -> None:
    """Where the factor is a power of two, which is the same in float32 and in double."""
    ends = []
    for of_torch in (True, False):
        torch.manual_seed(0)
        model, batch = llama()
        model = offload(model, "host")
        optim = infinity.AdamW(model.parameters(), lr=1e-3)
        loss_of(model, batch).backward()
        for parameter in model.parameters():
            if of_torch:
                parameter.grad.mul_(torch.tensor(0.25))
        if not of_torch:
            norm = math.sqrt(
                optim.coordinator.gradient_sum_squares([place for _, place in optim.coordinator.places()])[0]
            )
            optim.max_grad_norm = 0.25 * (norm + 1e-6)
        optim.step()
        ends.append(weights_of(model) | states_of(model))
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_the_norm_is_that_of_the_gradients_after_unscaling(offload: Any) -> None:
    torch.manual_seed(0)
    model, batch = llama()
    model = offload(model, "host")
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(loss_of(model, batch)).backward()
    scaled = nn.utils.get_total_norm(parameter.grad for parameter in model.parameters())
    scaler.unscale_(optim)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert scaled == pytest.approx(64 * norm.item(), rel=1e-6)
    clipped = nn.utils.get_total_norm(parameter.grad for parameter in model.parameters())
    assert clipped.item() == pytest.approx(1e-3, rel=1e-3)
    scaler.step(optim)
    assert optim.last_grad_norm == pytest.approx(norm.item(), rel=1e-6)


def test_the_optimizers_own_clipping_takes_what_torchs_left(offload: Any) -> None:
    ends = []
    for limit in (None, 0.5):
        torch.manual_seed(0)
        model, batch = llama()
        model = offload(model, "host")
        optim = infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=limit)
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)  # leaves less than the optimizer's limit
        optim.step()
        ends.append(weights_of(model))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_factor_holds_for_one_step(offload: Any) -> None:
    torch.manual_seed(0)
    model, batch = llama()
    model = offload(model, "host")
    optim = infinity.AdamW(model.parameters(), lr=0.0)
    norms = []
    for _ in range(2):
        loss_of(model, batch).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e-3).item())
        optim.step()
        optim.zero_grad()
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_a_gradient_that_is_not_finite_gives_a_norm_that_is_not_and_a_skipped_step(offload: Any) -> None:
    model, batch = llama()
    model = offload(model, "host")
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    (loss_of(model, batch) * float("inf")).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert not math.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    before = weights_of(model)
    optim.step()
    assert optim.skipped_steps == 1
    assert all(torch.equal(before[name], weight) for name, weight in weights_of(model).items())


NEED_THE_VALUES: list[Callable[[nn.Module], Any]] = [
    lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    lambda model: next(model.parameters()).grad.mul_(torch.ones(7, 1)),
    lambda model: next(model.parameters()).grad + 1,
    lambda model: torch.ones(()).mul_(next(model.parameters()).grad),
]


@pytest.mark.parametrize("use", NEED_THE_VALUES)
def test_what_needs_the_values_raises_and_names_what_works(use: Any, offload: Any) -> None:
    model, batch = llama()
    model = offload(model, "host")
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    loss_of(model, batch).backward()
    with pytest.raises(
        infinity.ReleasedParameterError,
        match=r"gathered\(model, module, grads=True\).*clip_grad_norm_ or max_grad_norm=",
    ):
        use(model)
    optim.step()
    assert optim.skipped_steps == 0


def test_a_backward_pass_after_clipping_is_refused(offload: Any) -> None:
    model, batch = llama()
    model = offload(model, "host")
    infinity.AdamW(model.parameters(), lr=1e-3)
    loss_of(model, batch).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(infinity.ModelError, match=r"Call clip_grad_norm_\(\) after the last backward pass"):
        loss_of(model, batch).backward()
