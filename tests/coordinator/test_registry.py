"""Side tables: they find a parameter's place and a model's coordinator, and keep neither alive."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
from torch import nn

from infinity.coordinator import registry
from infinity.errors import ModelError


class Coordinator:
    """As Coordinator, of one linear layer."""

    def __init__(self, model: nn.Linear) -> None:
        self.parameters = [model.weight, model.bias]
        self.closed: list[bool] = []

    def places(self) -> Any:
        for index, parameter in enumerate(self.parameters):
            yield parameter, index

    def close(self, *, broken: bool) -> None:
        self.closed.append(broken)


def entered() -> tuple[nn.Linear, Any, Any]:
    model = nn.Linear(2, 2)
    coordinator: Any = Coordinator(model)
    hook = model.weight.register_hook(lambda gradient: None)
    registry.enter(model, coordinator, [hook])
    return model, coordinator, hook


def test_a_parameter_finds_its_place_and_a_model_its_coordinator() -> None:
    model, coordinator, _ = entered()
    assert registry.find(model.bias) == (coordinator, 1)
    assert registry.coordinator_of(model) is coordinator
    assert registry.is_offloaded(model)
    assert coordinator in registry.coordinators()
    other = nn.Linear(2, 2)
    assert registry.find(other.bias) is None
    assert not registry.is_offloaded(other)
    with pytest.raises(ModelError, match="this Linear is not offloaded"):
        registry.coordinator_of(other)


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
