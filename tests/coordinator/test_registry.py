"""Side tables: they find a parameter's place and a model's coordinator, and keep neither alive."""

from __future__ import annotations

import gc
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from infinity.coordinator import registry
from infinity.coordinator.registry import ReoffloadError
from infinity.coordinator.structure import ModelStructure
from infinity.errors import ModelError

PLACES: list[Any] = [SimpleNamespace(group=SimpleNamespace(trainable=trained)) for trained in (True, True)]


class Coordinator:
    """Fake of a Coordinator, of one linear layer."""

    def __init__(self, model: nn.Linear) -> None:
        self.parameters = [model.weight, model.bias]
        self.closed: list[bool] = []
        self.anews = 0
        self.too_late = False
        self.keeps_room = False

    def places(self) -> Any:
        yield from zip(self.parameters, PLACES, strict=True)

    def reoffload(self) -> None:
        self.anews += 1
        if self.too_late:
            raise ReoffloadError("too late")

    def close(self, *, broken: bool) -> None:
        self.closed.append(broken)


def entered() -> tuple[nn.Linear, Any, Any]:
    model = nn.Linear(2, 2)
    coordinator: Any = Coordinator(model)
    hook = model.weight.register_hook(lambda gradient: None)
    registry.enter(model, coordinator, [hook], lambda model, change: coordinator.reoffload(), ModelStructure(model))
    return model, coordinator, hook


def test_a_parameter_finds_its_place_and_a_model_its_coordinator() -> None:
    model, coordinator, _ = entered()
    assert registry.find(model.bias) == (coordinator, PLACES[1])
    assert registry.coordinator_of(model) is coordinator
    assert registry.is_offloaded(model)
    assert coordinator in registry.coordinators()
    other = nn.Linear(2, 2)
    assert registry.find(other.bias) is None
    assert not registry.is_offloaded(other)
    with pytest.raises(ModelError, match="this Linear is not offloaded"):
        registry.coordinator_of(other)


def test_a_module_around_one_offloaded_model_has_its_coordinator() -> None:
    (first, coordinator, _), (second, _, _) = entered(), entered()
    assert registry.coordinator_of(nn.Sequential(first, nn.Linear(2, 2))) is coordinator
    with pytest.raises(ModelError, match="this Sequential is not offloaded"):
        registry.coordinator_of(nn.Sequential(first, second))


def freeze(model: nn.Linear) -> None:
    model.bias.requires_grad_(False)


def add(model: nn.Linear) -> None:
    model.added = nn.Parameter(torch.zeros(1))


@pytest.mark.parametrize(("change", "anews"), [(lambda model: None, 0), (freeze, 1), (add, 1)])
def test_a_model_that_was_changed_is_offloaded_anew_for_an_optimizer_of_it(change: Any, anews: int) -> None:
    model, coordinator, _ = entered()
    change(model)
    registry.reoffload_if_changed(nn.Linear(2, 2).parameters())
    assert coordinator.anews == 0
    registry.reoffload_if_changed(list(model.parameters())[-1:])
    assert coordinator.anews == anews


@pytest.mark.parametrize(("change", "anews"), [(freeze, 0), (add, 1)])
def test_a_model_that_keeps_its_room_is_not_offloaded_anew_for_what_was_frozen(change: Any, anews: int) -> None:
    model, coordinator, _ = entered()
    coordinator.keeps_room = True
    change(model)
    registry.reoffload_if_changed(list(model.parameters()))
    assert coordinator.anews == anews


def test_when_it_is_too_late_frozen_parameters_stay_and_others_are_refused() -> None:
    model, coordinator, _ = entered()
    coordinator.too_late = True
    freeze(model)
    registry.reoffload_if_changed(model.parameters())
    add(model)
    with pytest.raises(ReoffloadError):
        registry.reoffload_if_changed(model.parameters())


@pytest.mark.parametrize("raised", [False, True])
def test_a_model_that_is_collected_is_closed_and_leaves_nothing(raised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "last_value", ValueError() if raised else None, raising=False)
    model, coordinator, hook = entered()
    gone, parameters = weakref.ref(model), coordinator.parameters
    del model
    gc.collect()
    assert gone() is None
    assert coordinator.closed == [False]  # what was raised before has nothing to do with it
    assert coordinator not in registry.coordinators()
    assert [registry.find(parameter) for parameter in parameters] == [None, None]
    assert hook.hooks_dict_ref() is None or not hook.hooks_dict_ref()


@pytest.mark.parametrize("raised", [False, True])
def test_a_model_that_lives_when_the_process_ends_was_perhaps_left_by_an_exception(
    raised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "last_value", ValueError() if raised else None, raising=False)
    model, coordinator, hook = entered()
    registry._end(coordinator, [hook], weakref.ref(model))
    assert coordinator.closed == [raised]
