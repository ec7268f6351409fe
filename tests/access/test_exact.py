"""Exact values and moments of an offloaded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.access.exact import exact_moment, exact_value
from infinity.coordinator import registry
from infinity.coordinator.coordinator import Coordinator
from tests.checkpoint.conftest import config_in
from tests.checkpoint.runs import begin
from tests.models import llama


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
    coordinator.finish_updates()  # updates write where masters are read
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
