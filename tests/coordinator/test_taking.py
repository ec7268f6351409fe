"""Units that somebody takes for a while are given back, whenever Ctrl-C comes."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from infinity.base.interrupt import whole
from infinity.coordinator import registry
from infinity.coordinator.coordinator import Coordinator
from tests.models import llama


@pytest.mark.parametrize("method", ["acquire", "release"])
def test_ctrl_c_between_two_units_leaves_none_in_use(
    method: str, offload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes when the first unit was taken, or given back, and before anybody could have noted it."""
    coordinator = registry.coordinator_of(offload(llama()[0], tier="nvme"))
    original = getattr(Coordinator, method)

    @whole
    def interrupted(self: Coordinator, index: int) -> None:
        original(self, index)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Coordinator, method, interrupted)
    with pytest.raises(KeyboardInterrupt), coordinator.taking([0, 1]):
        pass
    assert [unit.name for unit in coordinator.units if unit.weights.uses or unit.views.open] == []
