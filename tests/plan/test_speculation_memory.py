"""Memory with which updates of units in RAM speculate: complete shadows, the last units first, of memory that is free
otherwise."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from infinity.config import load_config
from infinity.errors import PlanError
from infinity.plan import disk, planner, speculation_memory
from infinity.plan.plan import Plan
from infinity.plan.planner import make_plan
from infinity.sizes import PAGE_BYTES
from infinity.state.discover import discover
from infinity.state.offload_arguments import OffloadArguments
from tests.plan.test_planner import NUMEL, plan
from tests.sampling import number

ALL_IN_RAM = {"weights": "host", "optimizer": "host", "overlap": "auto"}
UNIT = NUMEL // 16
RESTING = 12 * UNIT
"""Bytes of a unit with weights and states in RAM."""


def memory(host: int) -> dict[str, Any]:
    return {"device": "64MiB", "host": host}


def needed() -> int:
    """Host memory of a plan on a GPU that has all in RAM and speculates nowhere."""
    config = ALL_IN_RAM | {"overlap": "before_forward", "update": {"tile": "256KiB"}}
    return plan(device="cuda", memory=memory(400 << 20), **config).host_bytes


def test_a_device_speculates_in_ram_where_there_is_room_for_all_new_values() -> None:
    made = plan(device="cuda", memory=memory(1 << 30), update={"tile": "256KiB"}, **ALL_IN_RAM)
    assert (made.placement.updates.overlap, made.placement.updates.reason) == ("auto", "")
    assert made.placement.updates.in_ram == set(range(16))
    assert made.budgets.shadow_bytes == 16 * RESTING == made.layout.arena.shadows
    assert made.layout.arena.homes_and_shadows == 2 * 16 * RESTING
    assert made.host_bytes == needed() + 16 * RESTING
    assert made.layout.swap.nbytes == 0
    assert "for that or for new values" in made.describe()


@pytest.mark.parametrize("units", [0, 1, 7])
def test_shadows_are_whole_and_of_what_is_left(units: int) -> None:
    host = needed() + units * RESTING + RESTING // 2
    made = plan(device="cuda", memory=memory(host), update={"tile": "256KiB"}, **ALL_IN_RAM)
    assert made.budgets.shadow_bytes == units * RESTING
    assert len(made.placement.updates.in_ram) == units
    assert made.placement.updates.overlap == ("auto" if units else "before_forward")
    assert "speculative updates of all units would need" in made.placement.updates.reason


def test_in_host_memory_states_in_ram_speculate_where_the_config_asks_for_it() -> None:
    for overlap in ("auto", "during_backward", "before_forward", "off"):
        made = plan(memory=memory(1 << 30), **ALL_IN_RAM | {"overlap": overlap})
        asked = overlap == "during_backward"
        assert len(made.placement.updates.in_ram) == 16 * asked
        assert made.budgets.shadow_bytes == (16 * RESTING if asked else 0)
        assert made.placement.updates.overlap == ("before_forward" if overlap == "auto" else overlap)
        assert made.placement.updates.reason == ("the states are in RAM" if overlap == "auto" else "")


def adapted(trained: bool = False, **config: Any) -> Plan:
    """Return a plan for blocks of a frozen and a trained layer, on a GPU. Args: trained: whether both are trained."""
    with torch.device("meta"):
        blocks = nn.ModuleList(nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 64)) for _ in range(16)).bfloat16()
    for block in blocks:
        block[0].requires_grad_(trained)  # type: ignore[index]
    given = {"nvme": {"paths": ["/tmp/never-made"]}, "commit_every": 0, "memory": memory(1 << 30)} | config
    return make_plan(
        discover(blocks).units, OffloadArguments(load_config(given), torch.device("cuda")), can_recompute=False
    )


@pytest.mark.parametrize("optimizer", ["host", "nvme"])
@pytest.mark.parametrize("overlap", ["auto", "during_backward"])
def test_a_unit_in_ram_with_a_frozen_part_gets_no_shadow_because_it_never_speculates(
    optimizer: str, overlap: str
) -> None:
    config = {"optimizer": optimizer, "overlap": overlap}
    assert adapted(weights="host", trained=True, **config).budgets.shadow_bytes > 0
    made = adapted(weights="host", **config)
    assert (made.budgets.shadow_bytes, made.placement.updates.in_ram) == (0, frozenset())
    if optimizer == "nvme":
        assert made.placement.updates.reason == "weights are in RAM together with frozen weights"
        assert adapted(weights="nvme", **config).placement.updates.overlap == overlap


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plans without shadows for states in RAM."""

    def made(**config: Any) -> Plan:
        with monkeypatch.context() as patch:
            patch.setattr(planner, "reserve_in_ram", lambda problem, placed, gradients, before, room: before)
            return plan(**config)

    return made


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("commit_every", [0, 1, 3])
@pytest.mark.parametrize("weights", ["nvme", "host", "auto"])
def test_shadows_take_nothing_from_anything_else(weights: str, commit_every: int, without: Any) -> None:
    reserved = 0
    for host in range(60 << 20, 420 << 20, 7 << 20)[:: 52 // number(17, 52)]:
        config = {"weights": weights, "optimizer": "auto", "overlap": "auto", "commit_every": commit_every}
        try:
            before = without(device="cuda", memory=memory(host), **config)
        except PlanError:
            continue
        made = plan(device="cuda", memory=memory(host), **config)
        assert made.placement.weights == before.placement.weights
        assert made.placement.optimizer == before.placement.optimizer
        assert made.placement.gradients == before.placement.gradients
        assert made.budgets.staging == before.budgets.staging
        assert made.budgets.copies_bytes == before.budgets.copies_bytes
        assert made.placement.updates.spare_units >= before.placement.updates.spare_units
        more = made.budgets.shadow_bytes - before.budgets.shadow_bytes
        weighs = 2 if weights == "host" else 0
        assert more >= 0
        assert weights == "auto" or more % ((10 + weighs) * UNIT) == 0
        assert made.host_bytes <= host
        reserved += more > 0
    assert reserved


def test_weights_on_nvme_need_a_second_copy_where_no_generations_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ALL_IN_RAM | {"weights": "nvme", "memory": memory(1 << 30), "device": "cuda"}
    made = plan(**config)
    assert made.placement.updates.spare_units == frozenset(range(16))
    assert made.layout.swap.nbytes == 2 * 2 * NUMEL
    assert made.budgets.shadow_bytes == 10 * NUMEL
    monkeypatch.setattr(disk, "room_bytes", lambda paths: 2 * NUMEL + 3 * 2 * UNIT + PAGE_BYTES)
    made = plan(**config)
    assert made.placement.updates.spare_units == frozenset({13, 14, 15})  # the last units' gradients come first
    assert made.budgets.shadow_bytes == 3 * 10 * UNIT
    assert "more on disk" in made.placement.updates.reason
    monkeypatch.setattr(disk, "room_bytes", lambda paths: 0)
    assert not plan(**config).placement.updates.in_ram


def test_gradients_that_spill_are_no_input_of_a_speculative_update() -> None:
    config = ALL_IN_RAM | {"gradients": "nvme", "memory": memory(1 << 30)}
    made = plan(torch.bfloat16, "cuda", **config)
    assert not made.placement.updates.in_ram
    assert made.budgets.shadow_bytes == 0


def test_a_share_of_many_units_lies_evenly() -> None:
    for share in (2, 3, 4, 5):
        found = sorted(speculation_memory.spread_out([(index, 10) for index in range(60)], 600 // share))
        assert {after - before for before, after in itertools.pairwise(found)} == {share}


@given(st.lists(st.integers(1, 50), max_size=12), st.integers(0, 400))
def test_nothing_more_would_fit(sizes: list[int], room: int) -> None:
    found = speculation_memory.spread_out(list(enumerate(sizes)), room)
    left = room - sum(sizes[index] for index in found)
    assert left >= 0
    assert all(nbytes > left for index, nbytes in enumerate(sizes) if index not in found)
