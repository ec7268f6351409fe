"""Parameters that an optimizer accepts: those of one offloaded model, each once, in torch's forms. All others are
refused by name, and the optimizer stays as it was."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.cli.main import main
from tests.conftest import weights_of
from tests.optim.conftest import backward, require_next_step_is_good, require_unchanged_by


def used_up(model: nn.Module) -> Any:
    parameters = model.parameters()
    list(parameters)
    return parameters


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (lambda model: [], "there are no parameters: the list is empty, or a generator was used up"),
        (used_up, "there are no parameters: the list is empty, or a generator was used up"),
        (lambda model: [{"params": []}, {"params": []}], "all param groups are empty"),
        (lambda model: model[0].weight, r"params is a tensor: give a list, \[parameter\]"),
        (lambda model: model, r"params is a Sequential: give its parameters, model.parameters\(\)"),
        (lambda model: {"params": model.parameters()}, r"params is one param group: give a list of them"),
        (lambda model: set(model.parameters()), "params is a set, which has no order"),
        (lambda model: None, "params is None: give model.parameters"),
        (lambda model: 3, "params is 3: give model.parameters"),
        (lambda model: "weights", "params is 'weights': give model.parameters"),
        (lambda model: [None], r"params holds None \(NoneType\), which is not a parameter"),
        (lambda model: ["0.weight"], r"params holds '0.weight' \(str\), which is not a parameter"),
        (lambda model: list(model), r"params holds Linear.*, which is not a parameter"),
        (lambda model: [{"lr": 1e-3}], "a param group is a dict with 'params', not {'lr': 0.001}"),
        (lambda model: [{"params": {"a": 1}}], "params is {'a': 1}: give model.parameters"),
        (lambda model: [{"params": model[0].parameters()}, model[1].weight], "a param group is a dict with 'params'"),
        (lambda model: [model[0].weight, *model[1].named_parameters()], "some parameters of a param group have names"),
        (
            lambda model: [{"params": model[0].named_parameters()}, {"params": model[1].parameters()}],
            "with/without names",
        ),
        (lambda model: [model[0].weight, model[0].weight], "parameter '0.weight' is twice in param group 0"),
        (
            lambda model: [{"params": model.parameters()}, {"params": [model[1].bias]}],
            "parameter '1.bias' is in param groups 0 and 1",
        ),
    ],
)
def test_what_is_no_list_of_parameters_is_refused(params: Callable[[Any], Any], message: str, small: nn.Module) -> None:
    with pytest.raises(infinity.ConfigError, match=message):
        infinity.AdamW(params(small))
    require_next_step_is_good(small, infinity.AdamW(small.parameters()))


def test_a_tied_parameter_is_given_once_by_parameters(offload: Any) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    net[1].weight = net[0].weight
    model = offload(net, "host")
    require_next_step_is_good(model, infinity.AdamW(model.parameters()))
    with pytest.raises(infinity.ConfigError, match="'0.weight' is twice"):
        infinity.AdamW(parameter for _, parameter in model.named_parameters(remove_duplicate=False))


@pytest.mark.parametrize("named", [False, True])
def test_a_group_that_repeats_a_parameter_is_not_added(named: bool, small: nn.Module) -> None:
    first, second = (module.named_parameters() if named else module.parameters() for module in small)
    optim = infinity.AdamW(first)
    again = [("x", small[0].weight)] if named else [small[0].weight]
    with pytest.raises(infinity.ConfigError, match="'0.weight' is in param groups 0 and 1"):
        optim.add_param_group({"params": again})
    with pytest.raises(infinity.ConfigError, match="'1.weight' is twice in param group 1"):
        optim.add_param_group({"params": [small[1].weight, small[1].weight]})
    assert len(optim.param_groups) == 1
    optim.add_param_group({"params": second})
    require_next_step_is_good(small, optim)


def test_named_parameters_train_as_others(offload: Any) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    ends = []
    for give in (nn.Module.parameters, nn.Module.named_parameters):
        model = offload(copy.deepcopy(net), "host")
        optim = infinity.AdamW(give(model), lr=1e-2)
        backward(model)
        optim.step()
        ends.append(weights_of(model))
    assert optim.param_groups[0]["param_names"] == list(ends[0])
    assert all(torch.equal(weight, ends[1][name]) for name, weight in ends[0].items())


@pytest.mark.parametrize("tensor", [nn.Parameter(torch.ones(3)), torch.ones(3)])
def test_tensors_that_are_not_offloaded_are_refused_among_others(tensor: torch.Tensor, small: nn.Module) -> None:
    with pytest.raises(infinity.ModelError, match=r"a parameter of shape \(3,\) is not offloaded"):
        infinity.AdamW([small[0].weight, tensor])
    optim = infinity.AdamW(small[0].parameters())
    with pytest.raises(infinity.ModelError, match=r"a parameter of shape \(3,\) is not offloaded"):
        optim.add_param_group({"params": [*small[1].parameters(), tensor]})
    optim.add_param_group({"params": small[1].parameters()})
    require_next_step_is_good(small, optim)


def test_parameters_of_another_model_or_a_closed_one_are_refused(small: nn.Module, offload: Any) -> None:
    other = infinity.offload(nn.Sequential(nn.Linear(8, 8)), {"weights": "host", "optimizer": "host"})
    optim = infinity.AdamW(small[0].parameters())
    with pytest.raises(infinity.ModelError, match="updates the parameters of one model only"):
        optim.add_param_group({"params": other.parameters()})
    of_other = infinity.AdamW(other.parameters())
    infinity.close(other)
    with pytest.raises(infinity.InfinityError, match="this model was closed"):
        infinity.AdamW(other.parameters())
    with pytest.raises(infinity.InfinityError, match="this model was closed"):
        of_other.step()
    optim.add_param_group({"params": small[1].parameters()})
    require_next_step_is_good(small, optim)


def test_an_optimizer_with_several_groups_takes_the_place_of_an_earlier_one(small: nn.Module) -> None:
    first = infinity.AdamW(small.parameters())
    second = infinity.AdamW([{"params": module.parameters()} for module in small])
    backward(small)
    with pytest.raises(infinity.ModelError, match="another optimizer was made .* and replaced it"):
        first.step()
    second.step()


def test_parameters_of_another_optimizer_are_not_added(small: nn.Module) -> None:
    first, second = (infinity.AdamW(module.parameters()) for module in small)
    with pytest.raises(infinity.ModelError, match="parameter '0.bias' belongs to another optimizer"):
        second.add_param_group({"params": small[0].parameters()})
    backward(small)
    first.step()
    second.step()


@pytest.mark.parametrize(
    "make", [copy.copy, copy.deepcopy, pickle.dumps, lambda optim: copy.deepcopy({"optimizer": optim})]
)
def test_a_copy_of_the_optimizer_is_refused(make: Callable[[Any], Any], small: nn.Module) -> None:
    optim = infinity.AdamW(small.parameters())
    with pytest.raises(infinity.ReleasedParameterError, match="a copy or a pickle of infinity.AdamW would hold"):
        make(optim)
    require_next_step_is_good(small, optim)


def test_instead_of_a_copy_of_the_optimizer_the_ways_that_its_error_names_have_its_states(
    swap_config: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """And those of the error of a state_dict that another run saved."""
    plain, config = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), swap_config(commit_every=1)
    model = infinity.offload(copy.deepcopy(plain), config)
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    backward(model)
    optim.step()
    infinity.commit(model)
    saved = optim.state_dict()
    second = infinity.offload(copy.deepcopy(plain), config | {"nvme": {"paths": [str(tmp_path / "second")]}})
    its_own = infinity.AdamW(second.parameters(), lr=1e-2)
    with pytest.raises(
        infinity.ModelError, match=r"with infinity\.resume, or from a copy with infinity\.offload_from_c"
    ):
        its_own.load_state_dict(saved)
    require_next_step_is_good(second, its_own)
    infinity.close(second)
    infinity.close(model)
    assert main(["checkpoint", "export", str(tmp_path / "swap"), "--output", str(tmp_path / "out")]) == 0
    copied = config | {"nvme": {"paths": [str(tmp_path / "copied")]}}
    for again in (
        infinity.resume(copy.deepcopy(plain), config),
        infinity.offload_from_checkpoint(copy.deepcopy(plain), tmp_path / "out", copied),
    ):
        optim = infinity.AdamW(again.parameters(), lr=1e-2)
        optim.load_state_dict(saved)
        assert [state["step"] for state in optim.state_dict()["state"].values()] == [1] * 4
        require_next_step_is_good(again, optim)
        infinity.close(again)


def test_tensors_that_are_refused_are_taken_when_they_are_offloaded() -> None:
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(
        infinity.ModelError, match=r"call infinity\.offload\(model, config\) before infinity\.AdamW\(model"
    ):
        infinity.AdamW(plain.parameters())
    model = infinity.offload(plain, {"weights": "host", "optimizer": "host"})
    require_next_step_is_good(model, infinity.AdamW(model.parameters()))
    infinity.close(model)


def test_what_was_put_into_the_groups_by_hand_is_found_at_the_step(small: nn.Module) -> None:
    optim = infinity.AdamW(small.parameters())
    backward(small)
    given = optim.param_groups[0]["params"]
    for wrong, error, message in (
        (small[1].bias, infinity.ConfigError, "parameter '1.bias' is in the param groups twice"),
        (nn.Parameter(torch.ones(3)), infinity.ModelError, r"param group 0 has a parameter of shape \(3,\) that was"),
    ):
        given.append(wrong)
        require_unchanged_by(small, optim.step, error, message)
        given.pop()
    optim.step()
    require_next_step_is_good(small, optim)


def test_groups_that_are_made_anew_train(offload: Any) -> None:
    model = offload(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), overlap="during_backward")
    optim = infinity.AdamW([{"params": [model[0].weight]}, {"params": [model[0].bias, *model[1].parameters()]}])
    for _ in range(2):
        require_next_step_is_good(model, optim)
        optim.param_groups.clear()
        optim.add_param_group({"params": model.parameters(), "lr": 1e-2})
        require_next_step_is_good(model, optim)


@pytest.mark.parametrize(
    ("broken", "error", "message"),
    [
        (lambda packed: None, infinity.ConfigError, "None is not a state_dict of an optimizer"),
        (lambda packed: {}, infinity.ConfigError, "its 'param_groups' are not a list"),
        (lambda packed: packed | {"param_groups": 3}, infinity.ConfigError, "its 'param_groups' are not a list"),
        (lambda packed: packed | {"param_groups": [{}]}, infinity.ConfigError, "its 'param_groups' are not a list"),
        (
            lambda packed: packed | {"param_groups": [{"params": [[0], [1]]}]},
            infinity.ConfigError,
            "its 'param_groups' are not a list",
        ),
        (
            lambda packed: packed | {"param_groups": [{"params": [0]}, {"params": [1]}]},
            infinity.ConfigError,
            "whose param groups have 1, 1 parameters; the groups of this optimizer have 4",
        ),
        (lambda packed: packed | {"param_groups": []}, infinity.ConfigError, "have no parameters; the groups of"),
        (lambda packed: packed | {"state": [1]}, infinity.ConfigError, "its 'state' is not one dict"),
        (lambda packed: packed | {"state": {0: 1}}, infinity.ConfigError, "its 'state' is not one dict"),
        (
            lambda packed: packed | {"state": {99: packed["state"][0]}},
            infinity.ModelError,
            "a state of parameter 99, which none of its groups has",
        ),
        (
            lambda packed: packed | {"state": {"x": packed["state"][0]}},
            infinity.ModelError,
            "a state of parameter 'x', which none of its groups has",
        ),
        (
            lambda packed: packed | {"state": {0: packed["state"][1]}},
            infinity.ModelError,
            "cannot load exp_avg of '0.weight'",
        ),
    ],
)
def test_a_broken_state_dict_is_refused_and_nothing_is_changed(
    broken: Callable[[Any], Any], error: type[BaseException], message: str, small: nn.Module
) -> None:
    optim = infinity.AdamW(small.parameters(), lr=1e-2)
    backward(small)
    optim.step()
    packed = optim.state_dict()
    with pytest.raises(error, match=message):
        optim.load_state_dict(broken(packed))
    assert optim.state_dict() == packed
    optim.load_state_dict(packed)
    require_next_step_is_good(small, optim)


def test_a_state_dict_with_tensors_is_refused(small: nn.Module) -> None:
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    theirs = torch.optim.AdamW(plain.parameters())
    backward(plain)
    theirs.step()
    optim = infinity.AdamW(small.parameters())
    for _ in range(2):
        with pytest.raises(
            infinity.ModelError, match="cannot load .* of '0.weight': it is a tensor of another optimizer"
        ):
            optim.load_state_dict(theirs.state_dict())
        require_next_step_is_good(small, optim)


def test_a_state_dict_is_mapped_by_its_own_numbers(small: nn.Module) -> None:
    optim = infinity.AdamW(small.parameters(), lr=1e-2)
    backward(small)
    optim.step()
    packed = optim.state_dict()
    renumbered = {
        "state": {f"p{key}": state for key, state in packed["state"].items()},
        "param_groups": [
            group | {"params": [f"p{key}" for key in group["params"]]} for group in packed["param_groups"]
        ],
    }
    optim.load_state_dict(renumbered)
    assert optim.state_dict() == packed
