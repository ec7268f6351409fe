"""Resident units take memory of the device that nothing else needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from infinity.config import load_config
from infinity.plan.plan import Plan
from infinity.plan.planner import make_plan
from infinity.sizes import parse_bytes
from infinity.state.discover import discover
from infinity.state.offload_arguments import OffloadArguments

SIZES = [f"{size}MiB" for size in (26, 40, 56, 80, 120, 200, 400, 1000)]


def plan(device: str, **config: Any) -> Plan:
    """Return the plan of a model with 24 MiB of weights, and 168 to 192 MiB of states and gradients."""
    with torch.device("meta"):
        model = nn.ModuleList(nn.Sequential(nn.Linear(1024, 1024, bias=False)) for _ in range(12)).bfloat16()
    found = discover(model)
    terms = OffloadArguments(
        load_config({"memory": {"device": device, "host": "1GiB"}, **config}), torch.device("cuda:0")
    )
    return make_plan(found.units, terms, can_recompute=False, sites=found.sites)


@pytest.mark.parametrize("vertical", [False, True])
@pytest.mark.parametrize("weights", ["auto", "device"])
@pytest.mark.parametrize("device", SIZES)
def test_a_model_that_fits_without_resident_units_fits_with_them(device: str, weights: str, *, vertical: bool) -> None:
    without = plan(device, weights=weights, vertical=vertical, optimizer="host")
    made = plan(device, weights=weights, vertical=vertical)
    assert not without.placement.optimizer.resident
    assert made.device_bytes <= max(without.device_bytes, parse_bytes(device) // 2)


@pytest.mark.parametrize("weights", ["auto", "device"])
def test_more_device_memory_never_makes_fewer_units_resident(weights: str) -> None:
    counts = [len(plan(device, weights=weights).placement.optimizer.resident) for device in SIZES]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == 12
    assert len(set(counts)) > 3
