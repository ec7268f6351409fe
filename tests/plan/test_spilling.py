"""Gradients wait in RAM as far as it reaches; the plan counts what spills, and its way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from infinity.config import load_config
from infinity.errors import ConfigError, PlanError
from infinity.plan.planner import make_plan
from infinity.sizes import parse_bytes
from infinity.state.discover import discover
from infinity.state.plan import Plan

NVME = {"weights": "nvme", "optimizer": "nvme"}
NUMELS = [1024 * width for width in [1024] * 8 + [512] * 8]
NUMEL = sum(NUMELS)
LARGEST_TWO = 2 * NUMELS[0]


def plan(host: int, passes: int | None = None, **config: Any) -> Plan:
    with torch.device("meta"):
        blocks = nn.ModuleList(nn.Linear(1024, numel // 1024, bias=False) for numel in NUMELS).bfloat16()
    given: dict[str, Any] = {
        "nvme": {"paths": ["/tmp/never-made"]},
        "overlap": "off",  # nothing is reserved for it
        "memory": {"device": "32MiB", "host": host},
        "update": {"tile": "1MiB"},  # so large that staging is three tiles for every budget here
    }
    units = discover(blocks).units
    cpu = torch.device("cpu")
    return make_plan(units, load_config(given | config), cpu, can_recompute=False, accumulation_steps=passes)


def test_fp32_in_ram_then_growing_through_the_window_then_spilled() -> None:
    previous = None
    for host in range(8 << 20, 80 << 20, 1 << 20):
        try:
            made = plan(host, **NVME)
        except PlanError:
            assert previous is None, "more memory never fits less"
            continue
        kind = (made.gradient_fp32, len(made.gradients_in_ram))
        assert previous is None or kind >= previous
        assert made.accumulates, "any number of micro-batches, however little there is"
        assert made.host_bytes <= made.host_budget
        previous = kind
    assert previous == (True, 16)


def test_what_spills_is_counted() -> None:
    made = plan(1 << 30, **NVME, gradients="nvme")
    assert made.gradients == "nvme"
    assert made.gradients_in_ram == frozenset()
    assert made.gradient_bytes == 0
    assert made.landing_bytes == 4 * LARGEST_TWO
    held = plan(1 << 30, **NVME, gradients="host")
    assert made.swap_bytes == held.swap_bytes + 4 * NUMEL
    assert made.step_read_bytes == held.step_read_bytes + 2 * NUMEL
    assert made.step_written_bytes == held.step_written_bytes + 2 * NUMEL
    assert made.arena_bytes == made.slot_bytes + made.staging_bytes + made.landing_bytes
    assert made.tile_bytes == held.tile_bytes + 4 * made.tile_numel


def test_generations_have_no_slots_for_gradients() -> None:
    one, three = (plan(1 << 30, **NVME, gradients="nvme", commit_every=1, keep=keep) for keep in (1, 3))
    assert one.swap_bytes == 24 * NUMEL + 4 * NUMEL
    assert three.swap_bytes == 48 * NUMEL + 4 * NUMEL


def test_some_of_the_gradients_stay_in_ram_the_largest_first() -> None:
    least = plan(1 << 26, **NVME, gradients="nvme")
    fixed = least.host_bytes - least.staging_bytes + 3 * least.tile_bytes
    for first, small in ((2, 0), (5, 1)):
        native = 2 * (first * NUMELS[0] + small * NUMELS[-1])
        made = plan(fixed + native, **NVME)
        assert made.gradients_in_ram == {*range(first), *range(8, 8 + small)}
        assert made.gradient_bytes == native
        assert made.landing_bytes == 4 * LARGEST_TWO
        assert made.step_read_bytes - plan(1 << 30, **NVME).step_read_bytes == 2 * NUMEL - native
        assert plan(fixed + native - 1, **NVME).gradient_bytes == native - 2 * NUMELS[-1]


def test_for_several_passes_gradients_wait_in_ram_in_fp32_or_not_at_all() -> None:
    """What a further pass would widen and send to the store after all has no place in RAM of its own."""
    least = plan(1 << 26, 4, **NVME, gradients="nvme")
    fixed = least.host_bytes - least.staging_bytes + 3 * least.tile_bytes
    room = 4 * (2 * NUMELS[0] + NUMELS[-1])
    made = plan(fixed + room, 4, **NVME)
    assert made.gradients_in_ram == {0, 1, 8}
    assert made.gradient_bytes == room
    assert made.swap_bytes == plan(1 << 30, **NVME).swap_bytes + 4 * NUMEL - room
    spilled = made.step_written_bytes - plan(1 << 30, 4, **NVME).step_written_bytes
    assert spilled == 4 * (4 * NUMEL - room)
    told_nothing = plan(fixed + room, **NVME)
    assert len(told_nothing.gradients_in_ram) > 3
    assert not told_nothing.gradient_fp32


def test_every_pass_reads_the_weights_twice() -> None:
    one, four = (plan(1 << 30, passes, **NVME) for passes in (1, 4))
    assert four.step_read_bytes - one.step_read_bytes == 3 * 2 * 2 * NUMEL
    assert four.step_written_bytes == one.step_written_bytes


def test_passes_that_could_not_add_up_are_refused_before_anything_is_moved() -> None:
    host = 2 * NUMEL + (20 << 20)
    assert not plan(host, **NVME, gradients="host").accumulates
    with pytest.raises(PlanError, match="set gradients: auto"):
        plan(host, 4, **NVME, gradients="host")


def test_gradients_that_must_be_in_ram_are_refused_with_what_would_help() -> None:
    least = plan(1 << 26, **NVME, gradients="nvme").host_bytes
    with pytest.raises(PlanError, match="set gradients: auto"):
        plan(least, **NVME, gradients="host", update={"tile": "2MiB"})
    with pytest.raises(PlanError, match="memory.host") as caught:
        plan(4 << 20, **NVME, gradients="nvme")
    assert "gradients on their way to NVMe" in str(caught.value)
    advised = parse_bytes(str(caught.value).split("memory.host to ")[1].split()[0].rstrip("."))
    plan(advised, **NVME, gradients="nvme")


def test_gradients_on_nvme_need_a_path() -> None:
    with pytest.raises(ConfigError, match="need a directory"):
        plan(1 << 30, weights="host", optimizer="host", gradients="nvme", nvme={})
