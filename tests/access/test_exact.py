"""Exact values and moments of an offloaded model."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.access.exact import exact_moment, exact_value
from infinity.coordinator import registry
from infinity.coordinator.coordinator import Coordinator
from infinity.units.update_queue import UpdateQueue
from tests.checkpoint.conftest import config_in
from tests.checkpoint.runs import begin
from tests.models import llama, loss_of


def exact(coordinator: Coordinator) -> list[torch.Tensor]:
    places = [place for _, place in coordinator.places()]
    return [get(coordinator, place) for place in places for get in (exact_value, exp_avg)]


def exp_avg(coordinator: Coordinator, place: Any) -> torch.Tensor:
    return exact_moment(coordinator, place, "exp_avg")


@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_the_default_dtype_of_torch_changes_nothing(moments: str, tmp_path: Path) -> None:
    model, batch = llama(layers=1)
    begin(model.bfloat16(), batch, config_in(tmp_path)("swap", moments=moments), steps=1)
    coordinator = registry.coordinator_of(model)
    expected = exact(coordinator)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = exact(coordinator)
    finally:
        torch.set_default_dtype(torch.float32)
    infinity.close(model)
    assert len(found) == len(expected) > 4
    assert all(
        each.dtype == torch.float32 and torch.equal(each, value) for each, value in zip(found, expected, strict=True)
    )


PLACES = [("nvme", "nvme"), ("nvme", "host"), ("host", "nvme"), ("host", "host")]


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("overlap", ["during_backward", "before_forward"])
@pytest.mark.parametrize("places", PLACES, ids="-".join)
def test_a_master_is_that_of_the_last_step_while_its_update_is_under_way(
    places: tuple[str, str], overlap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = llama(layers=1)
    _, optim = begin(model.bfloat16(), batch, config_in(tmp_path)("swap", places, overlap=overlap), steps=1)
    coordinator = registry.coordinator_of(model)
    loss_of(model, batch).backward()
    read_part, under_way = Coordinator.read_part, []

    def recorded(self: Coordinator, *args: Any) -> torch.Tensor:
        under_way.append([unit.name for unit in self.units if unit.update is not None])
        return read_part(self, *args)

    with monkeypatch.context() as patched:
        # As on a slow drive: no update is found written unless something waits for the update.
        patched.setattr(UpdateQueue, "finish_written", lambda queue: None)
        patched.setattr(Coordinator, "read_part", recorded)
        optim.step()
        found = [exact_value(coordinator, place) for _, place in coordinator.places()]
    infinity.synchronize(model)
    expected = [exact_value(coordinator, place) for _, place in coordinator.places()]
    infinity.close(model)
    assert under_way == [[]] * len(under_way) != []
    assert all(torch.equal(value, after) for value, after in zip(found, expected, strict=True))


@pytest.mark.parametrize("places", PLACES, ids="-".join)
def test_a_step_of_another_thread_does_not_come_between_a_weight_and_its_residual(
    places: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = llama(layers=1)
    _, optim = begin(model.bfloat16(), batch, config_in(tmp_path)("swap", places), steps=1)
    coordinator = registry.coordinator_of(model)
    place = next(place for _, place in coordinator.places() if place.spec.name.endswith("q_proj.weight"))
    expected = exact_value(coordinator, place)
    loss_of(model, batch).backward()
    read_part, came = Coordinator.read_part, []

    def step_if_unlocked() -> None:
        if coordinator._lock.acquire(blocking=False):
            try:
                optim.step()
                infinity.synchronize(model)
            finally:
                coordinator._lock.release()

    def read_later(self: Coordinator, *args: Any) -> torch.Tensor:
        came.append(threading.Thread(target=step_if_unlocked))
        came[0].start()
        came[0].join()
        return read_part(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(Coordinator, "read_part", read_later)
        found = exact_value(coordinator, place)
    infinity.close(model)
    assert len(came) == 1
    assert torch.equal(found, expected)
