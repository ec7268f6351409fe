"""torch.amp.GradScaler works with infinity's optimizers as users write it, and decides the same whatever overlaps."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.coordinator import registry
from infinity.units.update_queue import UpdateQueue
from tests import sampling
from tests.conftest import states_of, weights_of
from tests.models import llama, loss_of
from tests.runtime.test_overlap import config_of

STEPS = sampling.number(7, 10)
OVERLAPS = ("off", "before_forward", "auto", "during_backward")
Make = Callable[..., Any]


@dataclass
class Run:
    """The results of a training run, step by step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    undone: list[int] = field(default_factory=list)
    early: list[int] = field(default_factory=list)
    skipped: int = 0
    end: dict[str, torch.Tensor] = field(default_factory=dict)


@pytest.fixture
def offloaded(tmp_path: Path) -> Iterator[Make]:
    opened = []

    def make(model: nn.Module, **config: Any) -> Any:
        given = {"weights": "nvme", "cached": "none", "overlap": "during_backward", "moments": "fp32"} | config
        model = infinity.offload(model, config_of(tmp_path / f"swap{len(opened)}", **given))
        opened.append(model)
        return model

    yield make
    for model in opened:
        infinity.close(model, discard=True)


@pytest.fixture
def _all_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """A right speculation counts as late where its update had not begun at the step, which is a matter of time."""
    monkeypatch.setattr(UpdateQueue, "_withdraw", lambda updates, candidates: set())


def small(dtype: torch.dtype = torch.float16) -> tuple[nn.Module, list[Any]]:
    """Return the same model each time, and two micro-batches."""
    torch.manual_seed(0)
    model, batch = llama()
    ids = torch.roll(batch["input_ids"], 1, dims=1)
    return model.to(dtype).train(), [batch, {"input_ids": ids, "labels": ids}]


def scaler_of(scale: float, growth_interval: int = 1 << 20) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)


def train(
    model: Any,
    batches: list[Any],
    optim: Any,
    scaler: torch.amp.GradScaler,
    steps: int,
    *,
    unscale: bool = False,
) -> Run:
    """Train in the loop that torch documents."""
    run, counts = Run(), registry.coordinator_of(model).speculation_choice.counts
    for _ in range(steps):
        run.scales.append(scaler.get_scale())
        early, undone, total = counts.early, counts.undone, 0.0
        for batch in batches:
            loss = loss_of(model, batch) / len(batches)
            scaler.scale(loss).backward()
            total += loss.item()
        if unscale:
            scaler.unscale_(optim)
        scaler.step(optim)
        scaler.update()
        optim.zero_grad()
        run.losses.append(total)
        run.norms.append(optim.last_grad_norm)
        run.early.append(counts.early - early)
        run.undone.append(counts.undone - undone)
    run.skipped = optim.skipped_steps
    run.end = weights_of(model) | states_of(model)
    return run


def require_same(found: Run, wanted: Run) -> None:
    assert found.losses == wanted.losses
    torch.testing.assert_close(found.norms, wanted.norms, rtol=0, atol=0, equal_nan=True)
    assert found.skipped == wanted.skipped
    assert found.end.keys() == wanted.end.keys()
    for name, values in found.end.items():
        assert torch.equal(values, wanted.end[name]), name


def grows_and_overflows(model: Any, batches: list[Any], **options: Any) -> Run:
    optim = infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=2.0)
    run = train(model, batches, optim, scaler_of(2.0**19, growth_interval=2), STEPS, **options)
    pairs = list(zip(run.scales, run.scales[1:], strict=False))
    assert any(after > before for before, after in pairs)
    lowered = sum(after < before for before, after in pairs) + math.isnan(run.norms[-1])
    assert run.skipped == lowered > 1
    return run


# -- the same as torch, and as by hand --------------------------------------------------------------------------------


def torch_run(model: nn.Module, batches: list[Any], steps: int) -> Run:
    """torch.optim.AdamW and GradScaler on the fp32 master of an fp16 model, kept beside it."""
    names = [name for name, _ in model.named_parameters()]
    weights = [parameter for _, parameter in model.named_parameters()]
    masters = [nn.Parameter(weight.detach().float()) for weight in weights]
    optim, scaler, run = torch.optim.AdamW(masters, lr=1e-3), scaler_of(2.0**19, growth_interval=2), Run()
    for _ in range(steps):
        run.scales.append(scaler.get_scale())
        total = 0.0
        for batch in batches:
            loss = loss_of(model, batch) / len(batches)
            gradients = torch.autograd.grad(scaler.scale(loss), weights)
            for master, gradient in zip(masters, gradients, strict=True):
                wide = gradient.float()
                master.grad = wide if master.grad is None else master.grad + wide
            total += loss.item()
        scaler.unscale_(optim)
        run.norms.append(torch.nn.utils.get_total_norm([master.grad for master in masters]).item())
        scaler.step(optim)
        scaler.update()
        optim.zero_grad()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)
        run.losses.append(total)
    run.end = {name: weight.detach() for name, weight in zip(names, weights, strict=True)}
    return run


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_fp16_training_is_that_of_torchs_adamw_and_grad_scaler(micro_batches: int, offloaded: Make) -> None:
    model, batches = small()
    wanted = torch_run(copy.deepcopy(model), batches[:micro_batches], STEPS)
    model = offloaded(model)
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    found = train(model, batches[:micro_batches], optim, scaler_of(2.0**19, growth_interval=2), STEPS)
    assert found.skipped >= 3
    assert found.scales == wanted.scales
    torch.testing.assert_close(found.losses, wanted.losses, rtol=1e-3, atol=0)
    taken = [(mine, other) for mine, other in zip(found.norms, wanted.norms, strict=True) if not math.isnan(mine)]
    assert len(taken) == STEPS - found.skipped
    torch.testing.assert_close([mine for mine, _ in taken], [other for _, other in taken], rtol=1e-2, atol=0)
    for name, values in wanted.end.items():
        torch.testing.assert_close(found.end[name], values, rtol=1e-2, atol=1e-3, msg=name)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1024.0, 2.0**-4])
def test_a_power_of_two_changes_no_bit_where_nothing_underflows(
    scale: float, dtype: torch.dtype, offloaded: Make
) -> None:
    """With clipping, accumulation and the norm."""
    runs = []
    for scaler in (torch.amp.GradScaler("cpu", enabled=False), scaler_of(scale)):
        model, batches = small(dtype)
        model = offloaded(model)
        runs.append(train(model, batches, infinity.AdamW(model.parameters(), max_grad_norm=2.0), scaler, 4))
    require_same(runs[1], runs[0])


def test_fp16_training_with_a_scaler_is_that_with_a_scale_applied_by_hand(offloaded: Make) -> None:
    """Adam does not see a factor on all its gradients that is on its epsilon, too."""
    scale, ends, norms = 1024.0, [], []
    for by_hand in (False, True):
        model, batches = small()
        model = offloaded(model)
        optim = infinity.AdamW(model.parameters(), lr=1e-3, eps=1e-8 * (scale if by_hand else 1.0))
        if by_hand:
            for _ in range(4):
                for batch in batches:
                    (loss_of(model, batch) / len(batches) * scale).backward()
                optim.step()
                optim.zero_grad()
                norms.append(optim.last_grad_norm / scale)
            ends.append(weights_of(model))
        else:
            wanted = train(model, batches, optim, scaler_of(scale), 4)
            ends.append(weights_of(model))
    assert norms == wanted.norms
    assert all(torch.equal(values, ends[1][name]) for name, values in ends[0].items())


def test_unscaling_first_changes_no_bit(offloaded: Make) -> None:
    runs = []
    for unscale in (False, True):
        model, batches = small()
        runs.append(grows_and_overflows(offloaded(model), batches, unscale=unscale))
    require_same(runs[1], runs[0])


def test_a_scale_that_is_no_power_of_two_ends_in_the_same_bits_either_way(offloaded: Make) -> None:
    runs = []
    for unscale in (False, True):
        model, batches = small()
        model = offloaded(model)
        optim = infinity.AdamW(model.parameters(), max_grad_norm=2.0)
        runs.append(train(model, batches, optim, scaler_of(777.7), 4, unscale=unscale))
    require_same(runs[1], runs[0])


# -- whatever overlaps ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_phase_after_the_other(tmp_path_factory: Any) -> Run:
    model, batches = small()
    config = config_of(tmp_path_factory.mktemp("swap"), weights="host", cached="all", overlap="off", moments="fp32")
    model = infinity.offload(model, config)
    run = grows_and_overflows(model, batches)
    infinity.close(model, discard=True)
    return run


@pytest.mark.covering(strength=1, most=3)
@pytest.mark.parametrize(
    "config",
    [
        *(
            pytest.param(
                {"overlap": overlap, "weights": "nvme", "cached": "none"},
                marks=[pytest.mark.long] if overlap in ("off", "auto") else [],
            )
            for overlap in OVERLAPS
        ),
        pytest.param(
            {"overlap": "auto", "weights": "host", "cached": "none", "commit_every": 1}, marks=pytest.mark.long
        ),
        {"overlap": "during_backward", "weights": "host", "cached": "none", "commit_every": 1},
        {"overlap": "auto", "weights": "host", "cached": "half"},
        {"overlap": "auto", "weights": "nvme", "cached": "none", "gradients": "nvme"},
    ],
    ids=lambda config: "-".join(str(value) for value in config.values()),
)
def test_every_overlap_ends_in_the_same_bits(
    config: dict[str, Any], offloaded: Make, one_phase_after_the_other: Run
) -> None:
    model, batches = small()
    run = grows_and_overflows(offloaded(model, **config), batches)
    require_same(run, one_phase_after_the_other)
    assert run.scales == one_phase_after_the_other.scales


@pytest.mark.usefixtures("_all_begun")
def test_speculation_is_right_while_the_scale_stays_and_undone_when_it_changed(offloaded: Make, caplog: Any) -> None:
    caplog.set_level(logging.WARNING, "infinity")
    model, batches = small()
    model = offloaded(model)
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    run = train(model, batches[:1], optim, scaler_of(256.0, growth_interval=3), 9)
    changed = [before != after for before, after in zip([1.0, *run.scales], run.scales, strict=False)]
    assert changed == [True, False, False] * 3
    assert [undone > 0 for undone in run.undone] == changed
    assert [early > 0 for early in run.early] == [not each for each in changed]
    assert caplog.messages == []


@pytest.mark.usefixtures("_all_begun")
def test_a_scale_that_was_tried_and_taken_back_is_speculated_right(offloaded: Make) -> None:
    model, batches = small()
    model = offloaded(model)
    optim, scaler = infinity.AdamW(model.parameters(), lr=1e-3), scaler_of(256.0)
    train(model, batches[:1], optim, scaler, 2)
    scaler.update(2.0**30)
    scaler.set_backoff_factor(2.0**-22)
    run = train(model, batches[:1], optim, scaler, 2)
    assert run.scales == [2.0**30, 256.0]
    assert run.undone[1] == 0
    assert run.early[1] > 0


# -- skipped steps ----------------------------------------------------------------------------------------------------


def test_a_step_that_overflows_changes_nothing(offloaded: Make) -> None:
    model, batches = small()
    model = offloaded(model)
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    train(model, batches, optim, scaler_of(256.0), 2)
    before = weights_of(model) | states_of(model)
    steps = [state["step"] for state in optim.state.values()]
    run = train(model, batches, optim, scaler_of(2.0**30), 1)
    assert run.skipped == 1
    assert all(torch.equal(values, before[name]) for name, values in run.end.items())
    assert [state["step"] for state in optim.state.values()] == steps


def test_overflows_in_a_row_are_left_to_the_scaler(offloaded: Make, caplog: Any) -> None:
    caplog.set_level(logging.WARNING, "infinity")
    model, batches = small()
    model = offloaded(model)
    run = train(model, batches[:1], infinity.AdamW(model.parameters()), scaler_of(2.0**26), 12)
    assert run.skipped > 5
    assert run.norms[-1] > 0
    assert caplog.messages == []


def test_a_loss_that_is_nan_at_every_scale_stops_the_run(offloaded: Make) -> None:
    """A scale below 1 makes gradients smaller than they are: it is not what makes them infinite."""
    model, batches = small()
    model = offloaded(model)
    optim, scaler = infinity.AdamW(model.parameters()), scaler_of(8.0)
    scales = []

    def nan_step() -> None:
        scales.append(scaler.get_scale())
        scaler.scale(loss_of(model, batches[0]) * float("nan")).backward()
        scaler.step(optim)
        scaler.update()
        optim.zero_grad()

    with pytest.raises(infinity.NonFiniteGradientError, match="5 steps in a row"):
        any(nan_step() for _ in range(40))
    assert scales[-1] == 2.0**-5
    assert not {"grad_scale", "found_inf"} & vars(optim).keys()
    optim.zero_grad()
    assert train(model, batches, optim, scaler_of(64.0), 1).norms[0] > 0


# -- what users write besides -----------------------------------------------------------------------------------------


def test_unscaling_twice_raises_as_in_torch(offloaded: Make) -> None:
    model, batches = small()
    model = offloaded(model)
    optim, scaler = infinity.AdamW(model.parameters()), scaler_of(64.0)
    scaler.scale(loss_of(model, batches[0])).backward()
    scaler.unscale_(optim)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optim)
    scaler.step(optim)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optim)


def test_a_backward_pass_after_unscaling_is_refused(offloaded: Make) -> None:
    model, batches = small()
    model = offloaded(model)
    optim, scaler = infinity.AdamW(model.parameters()), scaler_of(64.0)
    scaler.scale(loss_of(model, batches[0])).backward()
    scaler.unscale_(optim)
    with pytest.raises(infinity.ModelError, match="after the last backward pass"):
        scaler.scale(loss_of(model, batches[0])).backward()
    optim.zero_grad()
    scaler.update()
    assert train(model, batches, optim, scaler, 1).norms[0] > 0


def test_a_gradient_set_by_hand_is_unscaled_with_the_others(offloaded: Make) -> None:
    ends = []
    for by_hand in (False, True):
        model, batches = small(torch.float32)
        model = offloaded(model)
        optim, scaler = infinity.AdamW(model.parameters(), lr=1e-3), scaler_of(64.0)
        scaler.scale(loss_of(model, batches[0])).backward()
        norm = model.model.norm.weight
        if by_hand:
            norm.grad = torch.full_like(norm, 64.0)
        scaler.step(optim)
        ends.append((optim.last_grad_norm, weights_of(model)["model.norm.weight"]))
    assert ends[0][0] != ends[1][0]
    assert (ends[1][1] < ends[0][1]).any()


def test_a_gradient_set_by_hand_after_unscaling_is_refused_and_one_that_is_scaled_is_taken(offloaded: Make) -> None:
    model, batches = small(torch.float32)
    model = offloaded(model)
    optim, scaler = infinity.AdamW(model.parameters()), scaler_of(64.0)
    scaler.scale(loss_of(model, batches[0])).backward()
    scaler.unscale_(optim)
    norm = model.model.norm.weight
    norm.grad = torch.ones_like(norm)
    with pytest.raises(infinity.ModelError, match=r"by scaler\.get_scale\(\), and do not call scaler\.unscale_\(\)"):
        scaler.step(optim)
    optim.zero_grad()
    scaler.update()
    scaler.scale(loss_of(model, batches[0])).backward()
    norm.grad = torch.ones_like(norm) * scaler.get_scale()
    before = weights_of(model)["model.norm.weight"]
    scaler.step(optim)
    assert (weights_of(model)["model.norm.weight"] < before).all()
    assert 0 < optim.last_grad_norm < 64


def test_two_optimizers_share_a_scaler(offloaded: Make) -> None:
    """An overflow in the gradients of one skips its step only, as in torch."""
    model, batches = small()
    model = offloaded(model)
    head = [model.lm_head.weight]
    rest = [parameter for parameter in model.parameters() if parameter is not head[0]]
    optims, scaler = [infinity.AdamW(each, lr=1e-2) for each in (head, rest)], scaler_of(64.0)
    for poisoned in (False, True):
        scaler.scale(loss_of(model, batches[0])).backward()
        if poisoned:
            head[0].grad = torch.full(head[0].shape, float("inf"), dtype=torch.float16)
        for optim in optims:
            scaler.step(optim)
        scaler.update()
        for optim in optims:
            optim.zero_grad()
    assert [optim.skipped_steps for optim in optims] == [1, 0]
    assert scaler.get_scale() == 32.0


def test_the_inverse_scale_is_read_once_for_all_gradients(offload: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each reading waits for all that was queued."""
    model = offload(nn.Sequential(*(nn.Linear(8, 8).half() for _ in range(5))), "host")
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.ones(2, 8).half()).float().sum()).backward()
    read, item = [], torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: read.append(item(tensor)) or item(tensor))
    scaler.unscale_(optim)
    assert read == [0.25]
