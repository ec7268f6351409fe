"""Gradients wait in RAM as far as it reaches; the plan counts what spills, and its way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from infinity.config import load_config
from infinity.errors import ConfigError, PlanError
from infinity.plan import disk
from infinity.plan.plan import Plan
from infinity.plan.planner import make_plan
from infinity.sizes import format_bytes, parse_bytes
from infinity.state.discover import discover
from infinity.state.offload_arguments import OffloadArguments

NVME = {"weights": "nvme", "optimizer": "nvme"}
NUMELS = [1024 * width for width in [1024] * 8 + [512] * 8]
NUMEL = sum(NUMELS)
LARGEST_TWO = 2 * NUMELS[0]


def plan(host: int, passes: int | None = None, **config: Any) -> Plan:
    with torch.device("meta"):
        blocks = nn.ModuleList(nn.Linear(1024, numel // 1024, bias=False) for numel in NUMELS).bfloat16()
    given: dict[str, Any] = {
        "nvme": {"paths": ["/tmp/never-made"]},
        "commit_every": 0,
        "overlap": "off",  # nothing is reserved for it
        "memory": {"device": "32MiB", "host": host},
        "update": {"tile": "1MiB"},  # so large that staging is three tiles for every budget here
    }
    units = discover(blocks).units
    cpu = torch.device("cpu")
    return make_plan(
        units, OffloadArguments(load_config(given | config), cpu, accumulation_steps=passes), can_recompute=False
    )


def test_fp32_in_ram_then_growing_through_the_window_then_spilled() -> None:
    previous = None
    for host in range(8 << 20, 80 << 20, 1 << 20):
        try:
            made = plan(host, **NVME)
        except PlanError:
            assert previous is None, "more memory never fits less"
            continue
        kind = (made.placement.form.gradient_fp32, len(made.placement.gradients.in_ram))
        assert previous is None or kind >= previous
        assert made.placement.accumulates, "any number of micro-batches, however little there is"
        assert made.host_bytes <= made.budgets.limits.host
        previous = kind
    assert previous == (True, 16)


def test_what_spills_is_counted() -> None:
    made = plan(1 << 30, **NVME, gradients="nvme")
    assert made.placement.gradients.tier == "nvme"
    assert made.placement.gradients.in_ram == frozenset()
    assert made.layout.arena.gradients == 0
    assert made.budgets.landing_bytes == 4 * LARGEST_TWO
    held = plan(1 << 30, **NVME, gradients="host")
    assert made.layout.swap.nbytes == held.layout.swap.nbytes + 4 * NUMEL
    assert made.forecast.read_bytes == held.forecast.read_bytes + 2 * NUMEL
    assert made.forecast.written_bytes == held.forecast.written_bytes + 2 * NUMEL
    staging = made.budgets.staging
    assert made.layout.arena.nbytes == made.budgets.slot_bytes + staging.nbytes + made.budgets.landing_bytes
    assert staging.tile_bytes == held.budgets.staging.tile_bytes + 4 * staging.tile_numel


def test_generations_have_no_copies_of_gradients() -> None:
    one, three = (plan(1 << 30, **NVME, gradients="nvme", commit_every=1, keep=keep) for keep in (1, 3))
    assert one.layout.swap.nbytes == 24 * NUMEL + 4 * NUMEL
    assert three.layout.swap.nbytes == 48 * NUMEL + 4 * NUMEL


def test_some_of_the_gradients_stay_in_ram_the_largest_first() -> None:
    least = plan(1 << 26, **NVME, gradients="nvme")
    fixed = least.host_bytes - least.budgets.staging.nbytes + 3 * least.budgets.staging.tile_bytes
    for first, small in ((2, 0), (5, 1)):
        native = 2 * (first * NUMELS[0] + small * NUMELS[-1])
        made = plan(fixed + native, **NVME)
        assert made.placement.gradients.in_ram == {*range(first), *range(8, 8 + small)}
        assert made.layout.arena.gradients == native
        assert made.budgets.landing_bytes == 4 * LARGEST_TWO
        assert made.forecast.read_bytes - plan(1 << 30, **NVME).forecast.read_bytes == 2 * NUMEL - native
        assert plan(fixed + native - 1, **NVME).layout.arena.gradients == native - 2 * NUMELS[-1]


def test_for_several_passes_gradients_wait_in_ram_in_fp32_or_not_at_all() -> None:
    """Gradients that a further pass would widen and send to the store have no place in RAM of their own."""
    least = plan(1 << 26, 4, **NVME, gradients="nvme")
    fixed = least.host_bytes - least.budgets.staging.nbytes + 3 * least.budgets.staging.tile_bytes
    room = 4 * (2 * NUMELS[0] + NUMELS[-1])
    made = plan(fixed + room, 4, **NVME)
    assert made.placement.gradients.in_ram == {0, 1, 8}
    assert made.layout.arena.gradients == room
    assert made.layout.swap.nbytes == plan(1 << 30, **NVME).layout.swap.nbytes + 4 * NUMEL - room
    spilled = made.forecast.written_bytes - plan(1 << 30, 4, **NVME).forecast.written_bytes
    assert spilled == 4 * (4 * NUMEL - room)
    told_nothing = plan(fixed + room, **NVME)
    assert len(told_nothing.placement.gradients.in_ram) > 3
    assert not told_nothing.placement.form.gradient_fp32


def test_every_pass_reads_the_weights_twice() -> None:
    one, four = (plan(1 << 30, passes, **NVME) for passes in (1, 4))
    assert four.forecast.read_bytes - one.forecast.read_bytes == 3 * 2 * 2 * NUMEL
    assert four.forecast.written_bytes == one.forecast.written_bytes


ROOM = 3 * NUMEL + (96 << 20)
"""memory.host: of gradients in fp32 and the optimizer states, one takes the room of the other."""
STATES = {"weights": "host", "optimizer": "auto"}


def test_one_pass_that_is_known_leaves_states_the_room_that_another_pass_would_take() -> None:
    unknown, known = plan(ROOM, None, **STATES), plan(ROOM, 1, **STATES)
    assert unknown.placement.form.gradient_fp32
    assert not known.placement.form.gradient_fp32
    assert known.placement.gradients.in_ram == {*range(16)}
    assert known.placement.accumulates
    assert len(known.placement.optimizer.in_ram) > len(unknown.placement.optimizer.in_ram)
    saved = unknown.forecast.step_bytes - known.forecast.step_bytes
    assert saved == unknown.forecast.saves_bytes > 0
    line = f"with accumulation_steps=1 a step would move {format_bytes(saved)} less"
    assert line in unknown.describe()
    assert "accumulation_steps" not in known.describe()
    assert "accumulation_steps" not in plan(ROOM, 2, **STATES).describe()
    assert known.budgets.landing_bytes == 2 * LARGEST_TWO, "room for one unit, in fp32"
    assert known.host_bytes <= known.budgets.limits.host


def test_fp32_stays_where_16_bits_save_nothing() -> None:
    for config in (NVME, {"weights": "host", "optimizer": "host"}):
        known = plan(1 << 30, 1, **config)
        assert known.placement.form.gradient_fp32
        assert plan(1 << 30, None, **config).forecast.saves_bytes == 0


def test_gradients_that_must_add_up_in_ram_still_do() -> None:
    """A single pass may bring a parameter several gradients."""
    assert plan(ROOM, 1, **STATES, gradients="host").placement.form.gradient_fp32


def test_disks_without_room_for_gradients_keep_them_in_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    known = plan(ROOM, 1, **STATES)
    for missing in (0, 1):
        monkeypatch.setattr(disk, "room_bytes", lambda paths, missing=missing: known.layout.swap.nbytes - missing)
        assert plan(ROOM, 1, **STATES).placement.form.gradient_fp32 == bool(missing)


def test_the_placement_is_the_same_however_often_commits_are_made() -> None:
    one, none = (plan(ROOM, 1, **STATES, commit_every=every) for every in ("auto", 0))
    assert one.placement.commit_every
    assert one.placement.gradients == none.placement.gradients


def test_passes_that_could_not_add_up_are_refused_before_anything_is_moved() -> None:
    host = 2 * NUMEL + (20 << 20)
    assert not plan(host, **NVME, gradients="host").placement.accumulates
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
