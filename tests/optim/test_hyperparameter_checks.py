"""Hyperparameters are numbers in their ranges, when they are given and at every step; torch's options are taken where
they change nothing and refused where they would."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import infinity
from tests.conftest import weights_of
from tests.optim.conftest import backward, require_next_step_is_good, require_unchanged_by

NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": "1e-3"}, r"param group 0: lr must be a number, not '1e-3' \(str\)"),
        ({"lr": None}, r"lr must be a number, not None"),
        ({"lr": True}, r"lr must be a number, not True"),
        ({"lr": 1e-3j}, r"lr must be a number, not 0.001j"),
        ({"lr": NAN}, "lr = nan is out of range: 0 <= lr < inf"),
        ({"lr": INFINITE}, "lr = inf is out of range"),
        ({"lr": 10**400}, r"lr = 1000\d*\.\.\.0*000 is out of range: a float cannot be that large"),
        ({"lr": torch.ones(2)}, r"lr is a tensor \(torch.float32, shape \(2,\), cpu\): give a number"),
        ({"lr": torch.tensor(-1.0)}, r"lr = tensor\(-1.\) is out of range"),
        ({"lr": torch.empty((), device="meta")}, "lr is a tensor .* meta"),
        ({"betas": [0.9]}, r"betas must be two numbers, not \[0.9\]"),
        ({"betas": (0.9, 0.99, 0.999)}, "betas must be two numbers"),
        ({"betas": 0.9}, "betas must be two numbers, not 0.9"),
        ({"betas": None}, "betas must be two numbers, not None"),
        ({"betas": (0.9, "0.99")}, r"betas\[1\] must be a number, not '0.99'"),
        ({"betas": (NAN, 0.99)}, r"betas\[0\] = nan is out of range"),
        ({"weight_decay": None}, "weight_decay must be a number, not None"),
        ({"eps": [1e-8]}, r"eps must be a number, not \[1e-08\] \(list\)"),
        ({"seed": None}, "seed must be a whole number between .*, not None"),
        ({"seed": 1.5}, "seed must be a whole number between .*, not 1.5"),
        ({"seed": 2**64}, "seed must be a whole number between"),
        ({"maximize": "no"}, "maximize must be True or False, not 'no'"),
        ({"amsgrad": None}, "amsgrad must be True or False, not None"),
        ({"max_grad_norm": "1"}, r"max_grad_norm must be a number, not '1' \(str\)"),
        ({"max_grad_norm": NAN}, "max_grad_norm must be positive or None, not nan"),
        ({"max_grad_norm": -1.0}, "max_grad_norm must be positive or None, not -1.0"),
        ({"accumulation_steps": "2"}, "accumulation_steps must be a whole number"),
        (
            {"capturable": True},
            "capturable=True: the update .* cannot be captured in a CUDA graph. Leave capturable= out",
        ),
        ({"differentiable": True}, "differentiable=True: autograd does not record the update"),
        ({"decoupled_weight_decay": False}, "decoupled_weight_decay=False is the rule of infinity.Adam: use that"),
    ],
)
def test_what_is_no_hyperparameter_is_refused(options: dict[str, Any], message: str, small: nn.Module) -> None:
    with pytest.raises(infinity.ConfigError, match=message):
        infinity.AdamW(small.parameters(), **options)
    require_next_step_is_good(small, infinity.AdamW(small.parameters()))


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (infinity.SGD, {"momentum": None}, "momentum must be a number"),
        (infinity.SGD, {"dampening": "0"}, "dampening must be a number"),
        (infinity.SGD, {"nesterov": 1}, "nesterov must be True or False, not 1"),
        (infinity.Lion, {"betas": ()}, "betas must be two numbers"),
        (infinity.Adagrad, {"lr_decay": None}, "lr_decay must be a number"),
        (infinity.Adagrad, {"initial_accumulator_value": [0.0]}, "initial_accumulator_value must be a number"),
        (infinity.Adam, {"decoupled_weight_decay": True}, "decoupled_weight_decay=True is the rule of infinity.AdamW"),
    ],
)
def test_every_optimizer_refuses_what_is_no_number(make: Any, options: Any, message: str, small: nn.Module) -> None:
    with pytest.raises(infinity.ConfigError, match=message):
        make(small.parameters(), **options)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("lr", NAN, "param group 1: lr = nan is out of range"),
        ("lr", -1e-3, "param group 1: lr = -0.001 is out of range"),
        ("lr", None, "param group 1: lr must be a number, not None"),
        ("lr", "1e-3", "param group 1: lr must be a number, not '1e-3'"),
        ("lr", torch.ones(3), "param group 1: lr is a tensor"),
        ("betas", (0.9,), "param group 1: betas must be two numbers"),
        ("betas", (0.9, 1.0), r"param group 1: betas\[1\] = 1.0 is out of range"),
        ("weight_decay", None, "param group 1: weight_decay must be a number"),
        ("eps", -1.0, "param group 1: eps = -1.0 is out of range"),
        ("seed", -1, "param group 1: seed must be a whole number between"),
        ("amsgrad", True, "param group 1: amsgrad is not available"),
        ("maximize", None, "param group 1: maximize must be True or False"),
        ("capturable", True, "param group 1: capturable=True"),
    ],
)
@pytest.mark.parametrize("overlap", ["off", "during_backward"])
def test_what_became_wrong_later_is_said_at_the_step_and_nothing_is_changed(
    overlap: str, key: str, value: Any, message: str, offload: Any
) -> None:
    model = offload(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), overlap=overlap)
    optim = infinity.AdamW([{"params": module.parameters()} for module in model], lr=1e-2)
    require_next_step_is_good(model, optim)
    good = optim.param_groups[1].get(key)
    optim.zero_grad()
    optim.param_groups[1][key] = value
    backward(model)  # with `overlap: during_backward` the updates would begin here
    require_unchanged_by(model, optim.step, infinity.ConfigError, message)
    optim.param_groups[1][key] = good
    optim.step()
    require_next_step_is_good(model, optim)


def test_a_hyperparameter_that_was_good_and_is_changed_in_place_is_said_at_the_step(small: nn.Module) -> None:
    beta = torch.tensor(0.9)
    optim = infinity.AdamW(small.parameters(), lr=1, betas=(beta, 0.999))
    require_next_step_is_good(small, optim)
    optim.zero_grad()
    backward(small)
    beta.fill_(1.5)
    require_unchanged_by(small, optim.step, infinity.ConfigError, "is out of range")
    beta.fill_(0.9)
    optim.param_groups[0]["lr"] = True  # equal to 1, and no number
    require_unchanged_by(small, optim.step, infinity.ConfigError, "lr must be a number, not True")


def test_a_hyperparameter_that_is_gone_is_said_at_the_step(small: nn.Module) -> None:
    optim = infinity.AdamW(small.parameters())
    del optim.param_groups[0]["lr"]
    backward(small)
    require_unchanged_by(small, optim.step, infinity.ConfigError, "param group 0: lr is missing")


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_grad_norm", "1"), ("max_grad_norm", NAN), ("max_grad_norm", 0), ("accumulation_steps", 0.5)],
)
def test_what_is_set_on_the_optimizer_is_checked_at_the_step(name: str, value: Any, small: nn.Module) -> None:
    optim = infinity.AdamW(small.parameters(), max_grad_norm=1.0)
    setattr(optim, name, value)
    backward(small)
    require_unchanged_by(small, optim.step, infinity.ConfigError, f"{name} must be")
    setattr(optim, name, None)
    require_next_step_is_good(small, optim)


def test_a_scheduler_that_goes_wrong_is_said_at_the_step(small: nn.Module) -> None:
    optim = infinity.AdamW(small.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optim, lambda step: 1.0 - step)
    for _ in range(2):
        backward(small)
        optim.step()
        scheduler.step()
    assert optim.param_groups[0]["lr"] == -1e-2
    require_unchanged_by(small, optim.step, infinity.ConfigError, "param group 0: lr = -0.01 is out of range")


@pytest.mark.parametrize(
    "number", [lambda value: torch.tensor(value, dtype=torch.float64), lambda value: torch.tensor([value]), np.float64]
)
def test_numbers_of_numpy_and_tensors_with_one_element_are_numbers(number: Any, offload: Any) -> None:
    ends = []
    for lr in (0.25, number(0.25)):
        torch.manual_seed(0)
        model = offload(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "host")
        optim = infinity.AdamW(model.parameters(), lr=lr, betas=(number(0.5), 0.75), max_grad_norm=number(1.0))
        scheduler = torch.optim.lr_scheduler.StepLR(optim, 1, 0.5)
        for _ in range(3):
            backward(model)
            optim.step()
            scheduler.step()
        ends.append(weights_of(model))
    assert all(torch.equal(weight, ends[1][name]) for name, weight in ends[0].items())


@pytest.mark.parametrize(
    "options",
    [
        {"fused": True},
        {"foreach": False},
        {"fused": False, "foreach": True, "capturable": False, "differentiable": False},
    ],
)
@pytest.mark.parametrize("make", [infinity.AdamW, infinity.Adam, infinity.Lion, infinity.Adagrad, infinity.SGD])
def test_torchs_ways_to_compute_change_nothing_and_are_said(
    make: Any, options: dict[str, Any], small: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "infinity"):
        optim = make(small.parameters(), **options)
    lines = [line for line in caplog.messages if "changes nothing" in line]
    assert len(lines) == 1
    assert all(f"{name}={value}" in lines[0] for name, value in options.items() if name in ("fused", "foreach"))
    require_next_step_is_good(small, optim)


def test_torchs_own_state_dict_of_adamw_is_taken_and_that_of_adam_is_not(small: nn.Module) -> None:
    plain = nn.Linear(8, 8), nn.Linear(8, 8)
    parameters = [parameter for module in plain for parameter in module.parameters()]
    optim = infinity.AdamW(small.parameters())
    optim.load_state_dict(torch.optim.AdamW(parameters, lr=0.5, fused=True).state_dict())
    assert optim.param_groups[0]["lr"] == 0.5
    theirs = torch.optim.Adam(parameters).state_dict()
    if "decoupled_weight_decay" in theirs["param_groups"][0]:
        with pytest.raises(infinity.ConfigError, match="decoupled_weight_decay=False is the rule of infinity.Adam"):
            optim.load_state_dict(theirs)
    require_next_step_is_good(small, optim)


def run_that_ends_with(values: dict[str, Any], config: dict[str, Any]) -> None:
    """After two steps; what is committed when the model is closed has these hyperparameters."""
    model = infinity.offload(build(), config)
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    require_next_step_is_good(model, optim)
    infinity.commit(model)
    backward(model)
    optim.step()
    optim.param_groups[0] |= values
    infinity.close(model)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def test_a_generation_with_absurd_hyperparameters_is_refused_and_changes_nothing(swap_config: Any) -> None:
    run_that_ends_with({"lr": -1.0}, swap_config(commit_every=1))
    model = infinity.resume(build(), swap_config(commit_every=1))
    optim = infinity.AdamW(model.parameters(), lr=0.5)
    with pytest.raises(infinity.ResumeError, match="the run cannot be resumed: param group 0: "):
        backward(model)
    assert optim.param_groups[0]["lr"] == 0.5
    infinity.close(model)


@pytest.mark.parametrize("values", [{"lr": "fast"}, {"betas": [0.9]}, {"seed": None}])
def test_hyperparameters_that_could_not_be_read_back_are_not_committed(
    values: dict[str, Any], swap_config: Any
) -> None:
    with pytest.raises(infinity.ConfigError, match="cannot be kept in a generation: param_groups.0"):
        run_that_ends_with(values, swap_config(commit_every=1))
    model = infinity.resume(build(), swap_config(commit_every=1))
    require_next_step_is_good(model, infinity.AdamW(model.parameters(), lr=0.5))
    infinity.close(model)
