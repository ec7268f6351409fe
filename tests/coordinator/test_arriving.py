"""The work that the last gradient of a unit starts."""

from __future__ import annotations

from typing import Any

import pytest

import infinity
from infinity.coordinator import registry
from infinity.coordinator.gradient_handle import GradientHandle
from infinity.errors import InfinityError, SwapTimeoutError
from infinity.units.speculative_updates import SpeculativeUpdates
from infinity.units.unit import OffloadedUnit
from tests.models import llama, loss_of


def test_an_update_may_begin_when_every_parameter_of_its_unit_has_a_handle(
    offload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = llama(layers=1)
    model = offload(model.train(), tier="host")
    handles: list[bool] = []

    def complete(self: SpeculativeUpdates, unit: OffloadedUnit, *others: Any) -> None:
        handles.extend(isinstance(parameter.grad, GradientHandle) for parameter in unit.parameters.values())

    monkeypatch.setattr(SpeculativeUpdates, "gradients_complete", complete)
    loss_of(model, batch).backward()
    assert handles == [True] * len(list(model.parameters()))


@pytest.mark.parametrize("vertical", [False, True])
def test_a_device_that_is_given_up_when_gradients_are_complete_ends_the_model(
    vertical: bool, offload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever way the micro-batches go: the gradients landed, and what waited for them cannot be trusted any more."""
    model, batch = llama(layers=1)
    model = offload(model.train(), tier="host")

    def complete(*_: Any) -> None:
        raise SwapTimeoutError("read", path="/swap")

    def backward() -> None:
        if vertical:
            infinity.backward(model, lambda each: loss_of(model, each), [batch, batch])
        else:
            loss_of(model, batch).backward()

    monkeypatch.setattr(SpeculativeUpdates, "gradients_complete", complete)
    with pytest.raises(SwapTimeoutError):
        backward()
    failure = registry.coordinator_of(model).health.failure
    assert isinstance(failure, SwapTimeoutError)
    with pytest.raises(InfinityError, match="damaged by an earlier failure"):
        loss_of(model, batch)
