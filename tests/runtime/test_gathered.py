"""infinity.gathered and infinity.state_dict: weights for other eyes and hands."""

from __future__ import annotations

import copy
import itertools
import logging
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
from infinity.state.released import ReleasedParameter
from tests.models import Batch, llama, loss_of

TIGHT = {"device": "400KiB", "host": "64MiB"}
PLACES = {
    "nvme": {"tier": "nvme"},
    "host": {"tier": "host"},
    "fp32 master": {"tier": "nvme", "master": "fp32"},
    "nvme, generations": {"tier": "nvme", "commit_every": 1},
    "host, generations": {"tier": "host", "commit_every": 1},
}
Trained = tuple[Any, Batch, infinity.AdamW]


@pytest.fixture(params=["nvme, generations", "host"])
def trained(request: pytest.FixtureRequest, offload: Any) -> Trained:
    """A bf16 Llama after two steps."""
    model, batch = llama()
    model = offload(model.bfloat16().train(), memory=TIGHT, **PLACES[request.param])
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        step(model, batch, optim)
    return model, batch, optim


def step(model: Any, batch: Batch, optim: Any) -> float:
    loss = loss_of(model, batch)
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.item()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(infinity.state_dict(model))


def assert_same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def test_state_dict_is_that_of_the_model_in_memory(offload: Any) -> None:
    model, _ = llama()
    model.register_buffer("counted", torch.arange(3))
    before = copy.deepcopy(model.state_dict())
    mine = infinity.state_dict(offload(model, memory=TIGHT))
    assert [name for name, _ in mine] == list(before)
    assert_same(weights(model), before)


def test_in_the_context_the_model_is_as_if_it_were_not_offloaded(trained: Trained) -> None:
    model, batch, optim = trained
    expected = weights(model)
    with infinity.gathered(model):
        assert_same(model.state_dict(), expected)
        assert all(torch.equal(p.data, expected[name]) for name, p in model.named_parameters())
        assert type(model.lm_head.weight) is nn.Parameter
        norm = torch.stack([p.norm() for p in model.parameters()]).norm()
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        held = [torch.zeros_like(p) for p in model.parameters()]
        average(held, list(model.parameters()), torch.tensor(1))
    assert norm.isfinite()
    with pytest.raises(infinity.ReleasedParameterError):
        model.lm_head.weight.norm()
    assert_same(model.state_dict(), expected)
    assert_same(weights(model), expected)
    assert step(model, batch, optim) > 0


def test_only_what_was_asked_for_is_copied_and_the_rest_is_brought_when_it_is_read(trained: Trained) -> None:
    model, _, _ = trained
    expected = weights(model)
    with infinity.gathered(model, model.model.layers[0].mlp, model.lm_head.weight):
        assert torch.equal(model.lm_head.weight.data, expected["lm_head.weight"])
        other = model.model.layers[3].mlp.up_proj.weight
        assert torch.equal(other.detach(), expected["model.layers.3.mlp.up_proj.weight"])


def changed(before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value * 0.5 if ".layers.1." in name else value for name, value in before.items()}


def test_what_is_written_is_what_the_model_goes_on_with(trained: Trained) -> None:
    model, batch, optim = trained
    before = weights(model)
    with infinity.gathered(model, write=True):
        for parameter in model.model.layers[1].mlp.parameters():
            parameter.data.mul_(0.5)  # three ways to write
        with torch.no_grad():
            for parameter in model.model.layers[1].self_attn.parameters():
                parameter.mul_(0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            norm = getattr(model.model.layers[1], name)
            norm.weight.data = norm.weight.detach() * 0.5
    assert_same(weights(model), changed(before))
    step(model, batch, optim)
    assert all(not torch.equal(value, before[name]) for name, value in weights(model).items())


@pytest.mark.parametrize("place", PLACES)
def test_a_written_weight_has_a_master_of_exactly_its_value(place: str, offload: Any, tmp_path: Path) -> None:
    """Steps far below the spacing of bf16 only add up in the master: one that kept anything of the values before would
    end in other weights."""
    ends = []
    for trained_before in (False, True):
        torch.manual_seed(0)
        model, batch = llama()
        wanted = {name: value.clone() for name, value in model.bfloat16().state_dict().items()}
        config = PLACES[place] | {"nvme": {"paths": [str(tmp_path / str(trained_before))]}}
        model = offload(model.train(), memory=TIGHT, **config)
        optim = infinity.SGD(model.parameters(), lr=1e-2)
        if trained_before:
            for _ in range(2):
                step(model, batch, optim)
            with infinity.gathered(model, write=True):
                model.load_state_dict(wanted)
        losses = [step(model, batch, optim) for _ in range(6)]
        ends.append((losses, weights(model)))
    assert ends[0][0] == ends[1][0]
    assert_same(ends[0][1], ends[1][1])


def test_without_write_a_change_ends_with_the_context_and_is_told(
    trained: Trained, caplog: pytest.LogCaptureFixture
) -> None:
    model, _, _ = trained
    expected = weights(model)
    caplog.set_level(logging.WARNING, "infinity")
    with infinity.gathered(model, model.lm_head):
        pass
    assert not caplog.records
    with infinity.gathered(model, model.lm_head):
        model.lm_head.weight.data.zero_()
    assert "'lm_head.weight' was changed, and the change ends with the context" in caplog.text
    assert_same(weights(model), expected)


def test_an_exception_in_the_context_drops_the_changes(trained: Trained) -> None:
    model, _, _ = trained
    expected = weights(model)

    def write_and_fail() -> None:
        with infinity.gathered(model, write=True):
            model.lm_head.weight.data.zero_()
            raise KeyError

    with pytest.raises(KeyError):
        write_and_fail()
    assert_same(weights(model), expected)


def test_an_evaluation_in_the_context_sees_what_was_written(trained: Trained) -> None:
    """As when averaged weights are swapped in to evaluate."""
    model, batch, _ = trained
    with torch.no_grad():
        usual = loss_of(model, batch)
        with infinity.gathered(model):
            assert loss_of(model, batch) == usual
            for parameter in model.parameters():
                parameter.data.zero_()
            assert loss_of(model, batch) != usual
        assert loss_of(model, batch) == usual


def test_a_save_in_the_context_has_what_was_written(trained: Trained, tmp_path: Path) -> None:
    model, _, _ = trained
    with infinity.gathered(model):
        model.lm_head.weight.data.zero_()
        infinity.save_pretrained(model, tmp_path / "ours")
        model.save_pretrained(tmp_path / "theirs")
    for where in ("ours", "theirs"):
        saved = type(model).from_pretrained(tmp_path / where)
        assert not saved.lm_head.weight.any()
        assert saved.model.layers[0].mlp.up_proj.weight.any()


def test_a_model_is_resumed_with_what_was_written_last(offload: Any, swap_config: Any) -> None:
    model, batch = llama()
    config = swap_config("nvme", memory=TIGHT, commit_every=1)
    model = offload(model.bfloat16().train(), memory=TIGHT, commit_every=1)
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    step(model, batch, optim)
    infinity.commit(model)
    with infinity.gathered(model, model.lm_head, write=True):
        model.lm_head.weight.data.zero_()
    expected = weights(model)
    infinity.close(model)
    again, _ = llama()
    again = infinity.resume(again.bfloat16().train(), config)
    assert_same(weights(again), expected)
    infinity.close(again)


def test_a_crash_after_writing_resumes_the_generation_before_it(offload: Any, swap_config: Any) -> None:
    model, batch = llama()
    config = swap_config("nvme", memory=TIGHT, commit_every=1)
    model = offload(model.bfloat16().train(), memory=TIGHT, commit_every=1)
    step(model, batch, infinity.AdamW(model.parameters(), lr=1e-2))
    infinity.commit(model)
    expected = weights(model)
    with infinity.gathered(model, write=True):
        for parameter in model.parameters():
            parameter.data.zero_()
    registry.coordinator_of(model).health.fail(infinity.InfinityError("no commit comes any more, as after a crash"))
    infinity.close(model)
    again, _ = llama()
    again = infinity.resume(again.bfloat16().train(), config)
    assert_same(weights(again), expected)
    infinity.close(again)


def test_gradients_in_the_context_are_those_of_the_values(offload: Any) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    plain = copy.deepcopy(model)
    model = offload(model, memory={"device": "50KiB", "host": "64MiB"})
    optim = infinity.SGD(model.parameters(), lr=1.0)
    x = torch.randn(2, 64)
    with infinity.gathered(model, model[1]):
        (torch.nn.functional.linear(x, model[1].weight).sum() + model(x).sum()).backward()
    optim.step()
    (torch.nn.functional.linear(x, plain[1].weight).sum() + plain(x).sum()).backward()
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    assert_same(weights(model), dict(plain.state_dict()))


def test_a_step_in_the_context_is_refused(trained: Trained) -> None:
    model, batch, optim = trained
    with infinity.gathered(model, model.lm_head):
        loss_of(model, batch).backward()
        with pytest.raises(infinity.ModelError, match="Leave the context first"):
            optim.step()
    optim.step()


def test_what_cannot_be_gathered_is_named(trained: Trained) -> None:
    model, _, _ = trained
    with pytest.raises(infinity.ModelError, match=r"Linear \(2, 3\) does not belong"):
        infinity.gathered(model, nn.Linear(3, 2))
    with pytest.raises(infinity.ConfigError, match="not str"):
        infinity.gathered(model, "lm_head")
    with pytest.raises(infinity.ModelError, match="not offloaded"):
        infinity.gathered(nn.Linear(2, 2))
    with (
        infinity.gathered(model, model.lm_head),
        pytest.raises(infinity.ModelError, match="'lm_head.weight' is gathered already"),
        infinity.gathered(model, write=True),
    ):
        pass
    with pytest.raises(infinity.ModelError, match=r"is \(1,\), torch.bfloat16 at the end"):  # noqa: SIM117
        with infinity.gathered(model, model.lm_head, write=True):
            model.lm_head.weight.data = torch.ones(1, dtype=torch.bfloat16)
    assert model.lm_head.weight.shape == (128, 64)


def test_an_inner_context_reads_what_an_outer_one_wrote(trained: Trained) -> None:
    model, _, _ = trained
    with infinity.gathered(model, model.lm_head, write=True):
        model.lm_head.weight.data.zero_()
        with infinity.gathered(model):
            assert not model.state_dict()["lm_head.weight"].any()
        assert not model.lm_head.weight.any()
    assert not weights(model)["lm_head.weight"].any()


def test_writing_in_a_forward_is_refused(offload: Any) -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with infinity.gathered(self, self.blocks[1], write=True):
                return x

    with pytest.raises(infinity.ModelError, match="in a forward or backward pass"):
        offload(Writing())(torch.ones(1, 8))


def test_frozen_weights_that_generations_share_are_not_written(offload: Any) -> None:
    model, batch = llama()
    model.lm_head.weight.requires_grad_(False)
    model = offload(model.bfloat16().train(), memory=TIGHT, commit_every=1)
    with infinity.gathered(model, model.lm_head, write=True):
        model.lm_head.weight.data.fill_(0.5)  # there is no generation yet
    assert bool((weights(model)["lm_head.weight"] == 0.5).all())
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    step(model, batch, optim)
    infinity.commit(model)
    expected = weights(model)
    with pytest.raises(infinity.ModelError, match="'lm_head.weight' of unit 'remainder' is frozen"):  # noqa: SIM117
        with infinity.gathered(model, write=True):
            model.lm_head.weight.data.zero_()
    assert_same(weights(model), expected)
    step(model, batch, optim)


def test_copies_that_do_not_fit_are_refused_with_the_number(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinity.coordinator.gathering.available_device_bytes", lambda device: 1000)
    context = infinity.gathered(trained[0])
    with pytest.raises(infinity.PlanError, match="1000 B.* are free. Gather one module after the other"):
        context.__enter__()
    with pytest.raises(infinity.ReleasedParameterError):
        trained[0].lm_head.weight.norm()


# -- what a write must not disturb ------------------------------------------------------------------------------------


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
        if "/infinity/" in frame.f_code.co_filename and event == "line":
            self.seen += 1
            if self.seen == self._at:
                signal.raise_signal(signal.SIGINT)
        return self


@pytest.mark.parametrize("write", [False, True])
def test_an_interrupt_at_any_line_of_the_context_leaves_whole_weights(write: bool, offload: Any) -> None:
    """Wherever Ctrl-C comes, nothing stays gathered, and the weights are all old or all new."""
    model = offload(net(), memory={"device": "20KiB", "host": "64MiB"})
    before = weights(model)
    after = {name: value * 0.5 for name, value in before.items()}
    lines = 0
    for stop_after in itertools.count(1, 23):
        tracer = _Interrupter(stop_after)
        interrupted = False
        sys.settrace(tracer)
        try:
            with infinity.gathered(model, write=write):
                for parameter in model.parameters():
                    parameter.data.mul_(0.5)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(None)
        coordinator = registry.coordinator_of(model)
        assert [record.unit.name for record in coordinator.units if record.views.gathered] == []
        assert coordinator.readers._gathering == 0
        assert [record.unit.name for record in coordinator.units if record.weights.uses] == []
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


# -- torch's own state_dict -------------------------------------------------------------------------------------------


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
