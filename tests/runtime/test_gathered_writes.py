"""Operations that writes and Ctrl-C in infinity.gathered must not disturb."""

from __future__ import annotations

import copy
import itertools
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.coordinator import registry
from infinity.units.released_parameters import ReleasedParameter
from tests import sampling
from tests.conftest import weights_of
from tests.runtime.gathering import assert_same, weights


class Net(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


X = torch.linspace(-1, 1, 64).view(2, 32)


def test_weights_changed_after_a_bare_resume_keep_the_runs_optimizer(swap_config: Any) -> None:
    """A script that only edits weights makes no optimizer and tracks nothing: the run must not lose them by it."""
    config = swap_config(commit_every=1)

    def optimizer(model: nn.Module) -> tuple[Any, Any]:
        optim = infinity.AdamW(model.parameters(), lr=1e-2)
        return optim, torch.optim.lr_scheduler.LinearLR(optim, total_iters=10)

    model = infinity.offload(net(), config)
    optim, scheduler = optimizer(model)
    infinity.track(scheduler)
    for _ in range(3):
        model(X).backward()
        optim.step()
        optim.zero_grad()
        scheduler.step()
    rate = optim.param_groups[0]["lr"]
    infinity.close(model)
    model = infinity.resume(net(), config)
    with infinity.gathered(model, model.blocks[0], write=True):
        model.blocks[0].weight.data.mul_(0.5)
    expected = weights(model)
    infinity.close(model)
    model = infinity.resume(net(), config)
    assert_same(weights(model), expected)
    optim, scheduler = optimizer(model)
    assert infinity.track(scheduler) == 3
    model(X).backward()
    assert (optim.param_groups[0]["lr"], optim.state[model.blocks[0].weight]["step"]) == (rate, 3)
    infinity.close(model)


def _clamping_run(config: dict[str, Any], *, resumed: bool, stop_at: int | None = None) -> dict[str, torch.Tensor]:
    """Weights are clamped between optimizer and scheduler. With `stop_at` it ends there as a crash does."""
    model = (infinity.resume if resumed else infinity.offload)(net(), config)
    optim = infinity.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optim, start_factor=1.0, end_factor=0.1, total_iters=5)
    for at in range(infinity.track(scheduler), 6):
        loss = model(X)
        if at == stop_at:
            registry.coordinator_of(model).health.fail(
                infinity.InfinityError("no commit comes any more, as after a crash")
            )
            infinity.close(model)
            return {}
        loss.backward()
        optim.step()
        optim.zero_grad()
        with infinity.gathered(model, write=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.1, 0.1)
        scheduler.step()
    result = weights(model)
    infinity.close(model)
    return result


def test_a_write_between_optimizer_and_scheduler_ends_in_generations_of_an_uninterrupted_run(
    swap_config: Any, tmp_path: Path
) -> None:
    expected = _clamping_run(swap_config(commit_every=1, nvme={"paths": [str(tmp_path / "whole")]}), resumed=False)
    config = swap_config(commit_every=1)
    _clamping_run(config, resumed=False, stop_at=3)
    assert_same(_clamping_run(config, resumed=True), expected)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("commit_every", [0, 1, 3])
@pytest.mark.parametrize("overlap", ["off", "before_forward", "during_backward"])
def test_a_write_between_backward_and_step_is_the_same_however_updates_overlap(
    overlap: str, commit_every: int, offload: Any, tmp_path: Path
) -> None:
    ends = []
    for mode, every in ((overlap, commit_every), ("off", 0)):
        nvme = {"paths": [str(tmp_path / f"{len(ends)}")]}
        model = offload(net().bfloat16(), overlap=mode, commit_every=every, nvme=nvme)
        optim = infinity.AdamW(model.parameters(), lr=1e-2, accumulation_steps=1)
        for at in range(4):
            model(X.bfloat16()).backward()
            if at == 2:
                with infinity.gathered(model, write=True):
                    for parameter in model.parameters():
                        parameter.data.mul_(0.5)
            optim.step()
            optim.zero_grad()
        ends.append(weights(model))
    assert_same(ends[0], ends[1])


def test_a_write_between_forward_and_backward_is_an_error_as_in_torch(offload: Any) -> None:
    model = offload(net(), memory={"device": "20KiB", "host": "64MiB"})
    loss = model(X)
    with infinity.gathered(model, write=True):
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
    with pytest.raises(infinity.StaleWeightsError, match="gathered"):
        loss.backward()


def _double(model: nn.Module) -> None:
    with infinity.gathered(model, write=True):
        for parameter in model.parameters():
            parameter.data.mul_(2)


def test_a_refused_write_writes_nothing(offload: Any) -> None:
    model = net()
    model.blocks[3].weight.requires_grad_(False)
    model = offload(model, commit_every=1)
    optim = infinity.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    model(X).backward()
    optim.step()
    infinity.commit(model)
    expected = weights(model)
    with pytest.raises(infinity.ModelError, match="Nothing was written"):
        _double(model)
    assert_same(weights(model), expected)


def test_what_is_computed_in_the_context_is_differentiated_after_it(offload: Any) -> None:
    """An L2 penalty, of weights that were gathered and of others."""
    plain = net()
    model = offload(net(), memory={"device": "20KiB", "host": "64MiB"})
    optims = infinity.SGD(model.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    with infinity.gathered(model, model.blocks[0]):
        penalty = sum(parameter.pow(2).sum() for parameter in model.parameters())
    model(X)  # others have the room now
    penalty.backward()
    sum(parameter.pow(2).sum() for parameter in plain.parameters()).backward()
    for optim in optims:
        optim.step()
    assert_same(weights(model), dict(plain.state_dict()))


def test_after_an_interrupted_forward_weights_can_be_written(offload: Any) -> None:
    model = offload(net())
    handle = model.blocks[2].register_forward_pre_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(X)
    handle.remove()
    with infinity.gathered(model, write=True):
        model.blocks[0].weight.data.zero_()
    assert not weights(model)["blocks.0.weight"].any()


@pytest.mark.parametrize("then", ["close", "step", "gather"])
def test_an_interrupted_forward_leaves_no_hooks_behind(then: str, offload: Any) -> None:
    """Hooks on saved tensors are of the whole process: torch.func refuses to work beside them."""
    model = offload(net())
    optim = infinity.SGD(model.parameters(), lr=0.1)
    handle = model.blocks[2].register_forward_pre_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(X)
    handle.remove()
    if then == "close":
        infinity.close(model)
    elif then == "step":
        optim.step()
    else:
        with infinity.gathered(model):
            pass
    assert torch.func.grad(lambda x: x * x)(torch.tensor(3.0)) == 6.0


def _interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


def test_another_thread_reads_weights_while_the_model_trains(offload: Any) -> None:
    model = offload(net(), memory={"device": "20KiB", "host": "64MiB"})
    optim = infinity.SGD(model.parameters(), lr=0.0)
    expected, done, wrong = weights(model), threading.Event(), []

    def read() -> None:
        while not done.is_set():
            now = weights(model)
            wrong.extend(name for name in expected if not torch.equal(now[name], expected[name]))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(20):
            loss = model(X)
            loss.backward()
            optim.step()
            assert optim.skipped_steps == 0
    finally:
        done.set()
        reader.join()
    assert wrong == []


class _Interrupter:
    """Ctrl-C at the n-th line of infinity that runs."""

    def __init__(self, at: int) -> None:
        self.seen = 0
        self._at = at

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        return self._in_infinity if "/infinity/" in frame.f_code.co_filename else None

    def _in_infinity(self, frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            self.seen += 1
            if self.seen == self._at:
                signal.raise_signal(signal.SIGINT)
        return self._in_infinity


@pytest.mark.parametrize("write", [False, True])
def test_an_interrupt_at_any_line_of_the_context_leaves_whole_weights(write: bool, offload: Any) -> None:
    """Wherever Ctrl-C comes, nothing stays gathered, and the weights are all old or all new."""
    model = offload(net(), memory={"device": "20KiB", "host": "64MiB"})
    before = weights(model)
    after = {name: value * 0.5 for name, value in before.items()}
    lines = 0
    for stop_after in itertools.count(1, 23 if sampling.SHARE else 67):
        tracer = _Interrupter(stop_after)
        interrupted, others = False, sys.gettrace()  # such as coverage's
        sys.settrace(tracer)
        try:
            with infinity.gathered(model, write=write):
                for parameter in model.parameters():
                    parameter.data.mul_(0.5)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(others)
        coordinator = registry.coordinator_of(model)
        assert [record.full.name for record in coordinator.units if record.views.gathered] == []
        assert coordinator.readers._gathering == 0
        assert [record.full.name for record in coordinator.units if record.weights.uses] == []
        now = weights(model)
        assert all(torch.equal(now[name], before[name]) for name in now) or (
            write and all(torch.equal(now[name], after[name]) for name in now)
        )
        assert all(isinstance(parameter, ReleasedParameter) for parameter in model.parameters())
        if write:
            with infinity.gathered(model, write=True):
                model.load_state_dict(before)
        if not interrupted:
            lines = tracer.seen
            break
    assert lines > 100


def test_an_embedding_with_max_norm_is_refused_and_what_the_error_says_does_the_same(offload: Any) -> None:
    plain, ids = nn.Sequential(nn.Embedding(8, 8, max_norm=0.5), nn.Linear(8, 8)), torch.tensor([1, 2, 2])
    with pytest.raises(infinity.ModelError, match=r"'0' has max_norm.*Leave max_norm out.*torch.embedding_renorm_"):
        offload(copy.deepcopy(plain))
    model = copy.deepcopy(plain)
    model[0].max_norm = None
    model = offload(model, memory={"device": "8KiB", "host": "64MiB"})
    optims = infinity.SGD(model.parameters(), lr=1.0), torch.optim.SGD(plain.parameters(), lr=1.0)
    for _ in range(2):
        with infinity.gathered(model, model[0], write=True), torch.no_grad():
            torch.embedding_renorm_(model[0].weight, ids, 0.5, 2.0)
        for each, optim in zip((model, plain), optims, strict=True):
            each(ids).sum().backward()
            optim.step()
            optim.zero_grad()
    assert all(torch.equal(weights_of(model)[name], value) for name, value in plain.state_dict().items())
