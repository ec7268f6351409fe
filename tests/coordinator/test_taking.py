"""Units that somebody takes for a while are given back, whenever Ctrl-C comes; what autograd asks for stays while it is
referred to."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch

from infinity.base.interrupt import uninterruptible
from infinity.coordinator import registry
from infinity.coordinator.coordinator import Coordinator
from tests.models import llama
from tests.runtime.gathering import TIGHT


@pytest.mark.parametrize("method", ["begin_use", "end_use"])
def test_ctrl_c_between_two_units_leaves_none_in_use(
    method: str, offload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes when the first unit was taken, or given back, and before anybody could have noted it."""
    coordinator = registry.coordinator_of(offload(llama()[0], tier="nvme"))
    original = getattr(Coordinator, method)

    @uninterruptible
    def interrupted(self: Coordinator, index: int) -> None:
        original(self, index)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Coordinator, method, interrupted)
    with pytest.raises(KeyboardInterrupt), coordinator.taking([0, 1]):
        pass
    assert [unit.name for unit in coordinator.units if unit.weights.uses or unit.views.open] == []


def test_weights_that_were_required_stay_where_they_are_while_they_are_referred_to(offload: Any) -> None:
    """Another thread may bring other units before a view is made of the result of `weights_view`."""
    coordinator = registry.coordinator_of(offload(llama()[0], tier="nvme", memory=TIGHT))
    required = coordinator.weights_view(1)
    value = required.clone()
    for unit in coordinator.units[2:]:
        coordinator.begin_use(unit.index)
        coordinator.end_use(unit.index)
    assert torch.equal(required, value)
