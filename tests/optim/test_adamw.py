"""infinity.AdamW is a torch.optim.Optimizer: what others do with optimizers works, or raises."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.conftest import states_of, weights_of
from tests.models import Batch, llama, loss_of


@pytest.fixture
def trained(offload: Any) -> tuple[Any, Batch, infinity.AdamW]:
    model, batch = llama()
    model = offload(model.bfloat16().train())
    return model, batch, infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], tensor) for name, tensor in right.items())


def test_it_is_a_torch_optimizer_with_defaults_and_groups(trained: Any) -> None:
    optim = trained[2]
    assert isinstance(optim, torch.optim.Optimizer)
    assert optim.defaults["lr"] == 1e-3
    assert optim.param_groups[0]["betas"] == (0.9, 0.999)


def test_grads_are_handles_after_backward_and_none_after_zero_grad(trained: Any) -> None:
    model, batch, optim = trained
    assert all(p.grad is None for p in model.parameters())
    loss_of(model, batch).backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
    optim.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    "zero", [lambda m, o: o.zero_grad(), lambda m, o: o.zero_grad(False), lambda m, o: m.zero_grad()]
)
def test_zeroed_gradients_are_not_applied(zero: Any, trained: Any) -> None:
    model, batch, optim = trained
    before = weights_of(model)
    loss_of(model, batch).backward()
    zero(model, optim)
    optim.step()
    assert same(before, weights_of(model))


def test_gradients_after_the_models_own_zero_grad_start_anew(trained: Any) -> None:
    model, batch, optim = trained
    loss_of(model, batch).backward()
    optim.step()
    once = optim.last_grad_norm
    optim.zero_grad()
    (loss_of(model, batch) * 100).backward()
    model.zero_grad()
    loss_of(model, batch).backward()
    optim.step()
    assert optim.last_grad_norm < 3 * once


def test_gradients_without_zero_grad_add_up_over_steps_as_in_torch(offload: Any) -> None:
    def run(module: nn.Module, kind: Any) -> None:
        optim = kind(module.parameters(), lr=1e-2)
        for index in range(3):
            module(torch.full((2, 8), float(index + 1))).square().sum().backward()
            optim.step()

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    run(plain, torch.optim.AdamW)
    torch.manual_seed(0)
    model = offload(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    run(model, infinity.AdamW)
    for name, weight in weights_of(model).items():
        torch.testing.assert_close(weight, dict(plain.named_parameters())[name])


def test_autograd_grad_leaves_gathered_gradients_alone(trained: Any) -> None:
    model, batch, _ = trained
    loss_of(model, batch).backward()
    parameter = model.lm_head.weight
    (gradient,) = torch.autograd.grad(loss_of(model, batch), [parameter])
    assert gradient.isfinite().all()
    assert parameter.grad is not None


def test_a_gradient_set_by_hand_is_used(offload: Any) -> None:
    model = offload(nn.Sequential(nn.Linear(4, 4, bias=False)))
    (parameter,) = model.parameters()
    parameter.grad = torch.ones(4, 4)
    before = weights_of(model)["0.weight"]
    optim = infinity.AdamW([parameter], lr=0.1, weight_decay=0.0)
    optim.step()
    assert optim.last_grad_norm == 4.0
    torch.testing.assert_close(weights_of(model)["0.weight"], before - 0.1)


def test_step_takes_a_closure(trained: Any) -> None:
    model, batch, optim = trained

    def closure() -> torch.Tensor:
        optim.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    first = optim.step(closure)
    assert optim.step(closure) < first


def test_the_state_dict_holds_handles_and_comes_back(trained: Any) -> None:
    model, batch, optim = trained
    loss_of(model, batch).backward()
    optim.step()
    packed = optim.state_dict()
    assert packed["state"][0]["step"] == 1
    assert not any(isinstance(value, torch.Tensor) for state in packed["state"].values() for value in state.values())
    optim.param_groups[0]["lr"] = 5.0
    optim.load_state_dict(packed)
    assert optim.param_groups[0]["lr"] == 1e-3
    assert optim.state_dict() == packed


def test_handles_can_be_saved_and_loaded_safely_and_name_run_and_step(trained: Any, tmp_path: Path) -> None:
    model, batch, optim = trained
    loss_of(model, batch).backward()
    optim.step()
    packed = optim.state_dict()
    torch.save(packed, tmp_path / "optimizer.pt")
    read = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    assert read == pickle.loads(pickle.dumps(packed))
    assert read["state"][0]["exp_avg"]["run"] == optim.coordinator.run != ""
    assert read["state"][0]["exp_avg"]["step"] == 1
    assert "infinity" not in (tmp_path / "optimizer.pt").read_bytes().decode("latin-1")
    assert copy.copy(packed["state"][0]["exp_avg"]) == packed["state"][0]["exp_avg"]
    optim.load_state_dict(read)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_a_moment_that_is_asked_for_in_state_is_read_as_the_message_says(moments: str, offload: Any) -> None:
    torch.manual_seed(0)
    model = offload(nn.Sequential(nn.Linear(8, 300), nn.Linear(300, 8)), moments=moments)
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(infinity.ConfigError, match="'0.weight' has no state 'exp_avg'. Its states: none before"):
        optim.read_state(model[0].weight, "exp_avg")
    for _ in range(2):
        model(torch.ones(2, 8)).square().sum().backward()
        optim.step()
        optim.zero_grad()
    optim.load_state_dict(optim.state_dict())
    kept = states_of(model)
    for name, parameter in model.named_parameters():
        with pytest.raises(infinity.ReleasedParameterError, match=r"optimizer.read_state\(parameter, 'exp_avg_sq'\)"):
            optim.state[parameter]["exp_avg_sq"]
        for state in ("exp_avg", "exp_avg_sq"):
            found = optim.read_state(parameter, state)
            assert torch.equal(found, kept[f"{name}.{state}"].view(parameter.shape))
            assert found.any()
    with pytest.raises(KeyError):
        optim.state[parameter]["other"]
    with pytest.raises(infinity.ConfigError, match="has no state 'sum'. Its states: exp_avg, exp_avg_sq"):
        optim.read_state(parameter, "sum")
    with pytest.raises(infinity.ConfigError, match=r"does not train the parameter of shape \(2,\)"):
        optim.read_state(nn.Parameter(torch.ones(2)), "exp_avg")


def test_a_moment_that_is_set_is_refused_and_cleared_states_begin_anew_as_the_message_says(offload: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    model = offload(copy.deepcopy(plain))
    optim, torchs = infinity.AdamW(model.parameters(), lr=1e-2), torch.optim.AdamW(plain.parameters(), lr=1e-2)
    losses: dict[str, list[float]] = {"ours": [], "torch's": []}
    for step in range(4):
        for name, net, each in (("ours", model, optim), ("torch's", plain, torchs)):
            loss = net(torch.ones(2, 8)).square().sum()
            loss.backward()
            losses[name].append(loss.item())
            each.step()
            each.zero_grad()
            if step == 1:
                each.state[net[0].weight].clear()
    with pytest.raises(
        infinity.ReleasedParameterError, match=r"cannot be set. To reset.*optimizer.state\[parameter\].clear"
    ):
        optim.state[model[0].weight]["exp_avg"] = torch.zeros(16, 8)
    assert losses["ours"] == pytest.approx(losses["torch's"], rel=1e-5)


def test_loading_states_that_are_not_in_the_store_raises(trained: Any) -> None:
    model, batch, optim = trained
    loss_of(model, batch).backward()
    optim.step()
    packed = optim.state_dict()
    state = packed["state"][0]
    foreign = packed | {"state": {0: state | {"exp_avg": replace(state["exp_avg"], run="abcdef0123456789")}}}
    with pytest.raises(infinity.ModelError, match=r"it belongs to run abcdef01, and this is run .*infinity\.resume"):
        optim.load_state_dict(foreign)
    with pytest.raises(infinity.ModelError, match="it is a tensor of another optimizer"):
        optim.load_state_dict(packed | {"state": {0: state | {"exp_avg": torch.zeros(2)}}})
    optim.zero_grad()
    loss_of(model, batch).backward()
    optim.step()
    with pytest.raises(infinity.ModelError, match="it was saved after step 1, and the store is at step 2"):
        optim.load_state_dict(packed)


def test_zero_grad_of_the_model_drops_what_the_optimizers_drops(trained: Any) -> None:
    model, batch, optim = trained
    for set_to_none in (True, False):
        loss_of(model, batch).backward()
        model.zero_grad(set_to_none)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert not any(optim.coordinator.has_gradient(place) for _, place in optim.coordinator.places())
        assert not optim.coordinator.update_queue.speculative
    before = weights_of(model)
    optim.step()
    assert all(torch.equal(before[name], weight) for name, weight in weights_of(model).items())


def test_accelerate_prepares_it(trained: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, batch, optim = trained
    wrapped = accelerate.Accelerator(cpu=True).prepare_optimizer(optim, device_placement=True)
    before = weights_of(model)
    loss_of(model, batch).backward()
    wrapped.step()
    assert not same(before, weights_of(model))


def test_the_norm_is_exact_and_clipping_uses_it(trained: Any, offload: Any) -> None:
    model, batch, optim = trained
    torch.manual_seed(0)
    plain, _ = llama()
    plain = plain.bfloat16().train()
    loss_of(plain, batch).backward()
    expected = sum(p.grad.double().square().sum() for p in plain.parameters()).sqrt().item()
    loss_of(model, batch).backward()
    optim.step()
    torch.testing.assert_close(optim.last_grad_norm, expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    "option", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"eps": -1.0}, {"weight_decay": -0.1}, {"max_grad_norm": 0}]
)
def test_hyperparameters_out_of_range_are_refused(option: dict[str, Any], trained: Any) -> None:
    with pytest.raises(infinity.ConfigError):
        infinity.AdamW(trained[0].parameters(), **option)


def test_parameters_of_two_models_are_refused(trained: Any) -> None:
    other = infinity.offload(nn.Sequential(nn.Linear(4, 4)), {"weights": "host", "optimizer": "host"})
    with pytest.raises(infinity.ModelError, match="of one model"):
        infinity.AdamW([*trained[0].parameters(), *other.parameters()])
    infinity.close(other)


def test_ctrl_c_inside_step_is_delivered_when_the_step_is_done(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import signal

    from infinity.units import update_queue

    def submit_and_interrupt(*args: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return submit(*args, **options)

    model, batch, optim = trained
    submit = update_queue.submit_update
    loss_of(model, batch).backward()
    monkeypatch.setattr(update_queue, "submit_update", submit_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        optim.step()
    monkeypatch.undo()
    torch.manual_seed(0)
    plain, _ = llama()
    plain = infinity.offload(plain.bfloat16().train(), {"weights": "host", "optimizer": "host", "activations": "keep"})
    other = infinity.AdamW(plain.parameters(), lr=1e-3, max_grad_norm=1.0)
    loss_of(plain, batch).backward()
    other.step()
    assert same(weights_of(model), weights_of(plain))
    infinity.close(plain)
