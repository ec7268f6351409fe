"""The calls that any thread may make on a model at any time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from infinity.coordinator import registry
from tests.models import llama


def test_whether_the_updates_are_well_is_asked_while_no_other_thread_changes_them(
    offload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = registry.coordinator_of(offload(llama()[0], tier="nvme"))
    others_may: list[bool] = []

    def attempt() -> bool:
        got = coordinator._lock.acquire(blocking=False)
        if got:
            coordinator._lock.release()
        return got

    def asked() -> None:
        with ThreadPoolExecutor(1) as pool:
            others_may.append(pool.submit(attempt).result())

    monkeypatch.setattr(coordinator.update_queue, "require_well", asked)
    coordinator.require_usable()
    assert others_may == [False]
