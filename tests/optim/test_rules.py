"""Every optimizer, on offloaded parameters, against torch's on the same model."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.access.step_io_replay import replay_step
from infinity.coordinator import registry
from tests.conftest import states_of, weights_of


class PublishedLion(torch.optim.Optimizer):
    """Chen et al., arXiv 2302.06675, algorithm 2, line by line."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                update = (beta1 * m + (1 - beta1) * p.grad).sign()
                p.sub_(group["lr"] * (update + group["weight_decay"] * p))
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


RULES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "AdamW": (infinity.AdamW, torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}),
    "Adam": (infinity.Adam, torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.1}),
    "Lion": (infinity.Lion, PublishedLion, {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}),
    "Adagrad": (
        infinity.Adagrad,
        torch.optim.Adagrad,
        {"lr": 1e-2, "lr_decay": 0.01, "initial_accumulator_value": 0.1, "weight_decay": 0.01},
    ),
    "SGD": (infinity.SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "SGD, nesterov": (infinity.SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "SGD, no momentum": (infinity.SGD, torch.optim.SGD, {"lr": 1e-2}),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))


def train(model: nn.Module, optim: torch.optim.Optimizer, steps: int = 20) -> list[float]:
    losses = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(16, 32, generator=generator)
        loss = (model(x) - x[:, :8]).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("tier", ["host", "nvme"])
@pytest.mark.parametrize("name", RULES)
def test_it_is_torchs(name: str, tier: str, offload: Any) -> None:
    ours, theirs, options = RULES[name]
    plain = network()
    model = offload(copy.deepcopy(plain), tier)
    expected = train(plain, theirs(plain.parameters(), **options))
    got = train(model, ours(model.parameters(), **options))
    assert got == pytest.approx(expected, rel=1e-4)
    for key, weight in weights_of(model).items():
        torch.testing.assert_close(weight, plain.state_dict()[key], rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("name", ["AdamW", "Adam", "Adagrad", "SGD"])
def test_maximize_goes_the_other_way(name: str, offload: Any) -> None:
    ours, theirs, options = RULES[name]
    plain = network()
    model = offload(copy.deepcopy(plain), "host")
    expected = train(plain, theirs(plain.parameters(), **options, maximize=True), 5)
    got = train(model, ours(model.parameters(), **options, maximize=True), 5)
    assert got == pytest.approx(expected, rel=1e-4)
    assert got[-1] > got[0]


def test_room_is_made_for_the_optimizer_that_is_named(offload: Any, swap_config: Any) -> None:
    sizes = {}
    for optimizer, ours in (("adamw", infinity.AdamW), ("lion", infinity.Lion), ("adagrad", infinity.Adagrad)):
        model = infinity.offload(network(), swap_config(), optimizer=optimizer)
        train(model, ours(model.parameters(), lr=1e-3), 2)
        sizes[optimizer] = infinity.statistics(model).plan.layout.state_bytes
        assert {key.rsplit(".", 1)[1] for key in states_of(model)} == {
            "adamw": {"exp_avg", "exp_avg_sq"},
            "lion": {"exp_avg"},
            "adagrad": {"exp_avg_sq"},
        }[optimizer]
        infinity.close(model)
    assert sizes["lion"] == sizes["adagrad"] == sizes["adamw"] / 2


def test_an_optimizer_that_keeps_more_than_there_is_room_for_is_refused(swap_config: Any) -> None:
    model = infinity.offload(network(), swap_config(), optimizer="lion")
    with pytest.raises(infinity.ModelError, match=r"without room for exp_avg_sq, which infinity.AdamW needs"):
        infinity.AdamW(model.parameters())
    infinity.Lion(model.parameters())
    infinity.close(model)
    with pytest.raises(infinity.ConfigError, match="'muon' is not known; use one of adamw"):
        infinity.offload(network(), swap_config(), optimizer="muon")  # type: ignore[arg-type]


def test_another_optimizer_on_the_same_model_begins_anew(offload: Any) -> None:
    once, twice = offload(network(), "host"), offload(network(), "host")
    first = train(once, infinity.Lion(once.parameters(), lr=0.0), 3)
    assert first[0] != first[1]  # other data; the weights stay
    train(twice, infinity.AdamW(twice.parameters(), lr=0.0, weight_decay=0.0), 3)
    ends = [train(model, infinity.AdamW(model.parameters(), lr=1e-3), 3) for model in (once, twice)]
    fresh = offload(network(), "host")
    assert ends[0] == ends[1] == train(fresh, infinity.AdamW(fresh.parameters(), lr=1e-3), 3)


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_momentum_that_is_switched_on_later_begins_then(dampening: float, offload: Any) -> None:
    plain = network()
    model = offload(copy.deepcopy(plain), "host")
    train(model, infinity.AdamW(model.parameters(), lr=0.0, weight_decay=0.0), 2)  # leaves its moments behind
    losses = []
    for net, make in ((model, infinity.SGD), (plain, torch.optim.SGD)):
        optim = make(net.parameters(), lr=0.05, dampening=dampening)
        found = train(net, optim, 2)
        optim.param_groups[0]["momentum"] = 0.9
        losses.append(found + train(net, optim, 4))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_empty_parameters_are_no_trouble(offload: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = nn.Parameter(torch.empty(0))
            self.weight = nn.Parameter(torch.ones(300))

        def forward(self) -> torch.Tensor:
            return self.weight.square().sum() + self.nothing.sum()

    model = offload(Model())
    groups = [{"params": [model.weight]}, {"params": [model.nothing]}]
    optim = infinity.AdamW(groups, lr=0.1)
    model().backward()
    optim.step()
    assert (weights_of(model)["weight"] < 1).all()


def test_a_group_that_is_refused_leaves_no_trace(offload: Any) -> None:
    model = offload(network(), "host")
    first, *others = list(model.parameters())
    optim = infinity.AdamW([first])
    with pytest.raises(infinity.ConfigError):
        optim.add_param_group({"params": others, "lr": -1.0})
    assert len(optim.param_groups) == 1
    model(torch.ones(1, 32)).sum().backward()
    optim.step()


def test_a_state_dict_of_torch_brings_its_hyperparameters_and_they_are_checked(offload: Any) -> None:
    plain = network()
    model = offload(copy.deepcopy(plain), "host")
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    theirs = torch.optim.AdamW(plain.parameters(), lr=5e-4).state_dict()
    optim.load_state_dict(theirs)
    assert optim.param_groups[0]["lr"] == 5e-4
    train(model, optim, 2)
    for wrong, message in (({"lr": -1.0}, "lr = -1.0"), ({"amsgrad": True}, "amsgrad")):
        theirs["param_groups"][0] |= wrong
        with pytest.raises(infinity.ConfigError, match=message):
            optim.load_state_dict(theirs)
        theirs["param_groups"][0] |= {"lr": 5e-4, "amsgrad": False}
    earlier = optim.state_dict()
    train(model, optim, 1)
    with pytest.raises(infinity.ModelError, match="it was saved after step 2, and the store is at step 3"):
        optim.load_state_dict(earlier)


def test_a_replay_moves_what_there_is(swap_config: Any) -> None:
    for optimizer in ("adamw", "lion", "adagrad", "sgd"):
        model = infinity.offload(network(), swap_config(weights="host"), optimizer=optimizer)
        replayed = replay_step(registry.coordinator_of(model))
        plan = infinity.statistics(model).plan
        assert replayed.read_bytes == replayed.written_bytes == plan.layout.state_bytes
        infinity.close(model)


def test_adagrad_refuses_moments_that_cannot_grow(offload: Any) -> None:
    model = offload(network(), "host", moments="int8")
    with pytest.raises(infinity.ConfigError, match="sum grows in steps"):
        infinity.Adagrad(model.parameters())


def test_a_gradient_of_a_frozen_parameter_is_refused(offload: Any) -> None:
    net = network()
    net[0].requires_grad_(False)
    model = offload(net, "host")
    optim = infinity.AdamW(model.parameters())
    frozen = next(iter(model.parameters()))
    frozen.grad = torch.zeros_like(frozen)
    with pytest.raises(infinity.ModelError, match="has a gradient, and was frozen when the model was offloaded"):
        optim.step()


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (infinity.AdamW, {"amsgrad": True}, "amsgrad is not available: it keeps a third moment"),
        (infinity.AdamW, {"betas": (0.9, 1.0)}, r"betas\[1\] = 1.0 is out of range"),
        (infinity.Lion, {"lr": -1.0}, "lr = -1.0 is out of range"),
        (infinity.Adagrad, {"eps": -1e-3}, "eps = -0.001 is out of range"),
        (infinity.SGD, {"nesterov": True}, "nesterov needs a momentum above 0"),
        (infinity.SGD, {"momentum": float("nan")}, "momentum = nan is out of range"),
        (infinity.AdamW, {"seed": -1}, "seed must be a whole number between"),
    ],
)
def test_hyperparameters_out_of_range_are_refused(make: Any, options: Any, message: str, offload: Any) -> None:
    model = offload(network(), "host")
    with pytest.raises(infinity.ConfigError, match=message):
        make(model.parameters(), **options)


def test_a_weight_that_stops_being_finite_is_named(offload: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = offload(network(), "host")
    optim = infinity.SGD(model.parameters(), lr=1e38)
    with caplog.at_level(logging.WARNING, "infinity.units"):
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 10.0)
            optim.step()
        infinity.synchronize(model)
    assert "of unit '0' is no longer finite" in caplog.text
