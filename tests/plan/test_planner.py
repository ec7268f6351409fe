"""Plans fit their budgets, predict the bytes of the design, and say what would fit when they do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from infinity.config import load_config
from infinity.errors import ConfigError, PlanError
from infinity.plan.plan import Plan
from infinity.plan.planner import make_plan
from infinity.sizes import PAGE_BYTES, format_bytes
from infinity.state.discover import discover
from infinity.state.offload_arguments import OffloadArguments
from tests.models import llama
from tests.plan import test_layout
from tests.sampling import number


def plan(
    dtype: torch.dtype = torch.bfloat16, device: str = "cpu", *, can_recompute: bool = False, **config: Any
) -> Plan:
    with torch.device("meta"):
        blocks = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(16)).to(dtype)
    config = {"nvme": {"paths": ["/tmp/never-made"]}, "overlap": "off", "commit_every": 0} | config
    return make_plan(
        discover(blocks).units,
        OffloadArguments(load_config(config), torch.device(device)),
        can_recompute=can_recompute,
    )


NUMEL = 16 * 1024 * 1024
NVME = {"weights": "nvme", "optimizer": "nvme"}


@pytest.mark.parametrize(("weights", "expected"), [("nvme", 28), ("host", 20)])
def test_bytes_per_parameter_are_the_designs(weights: str, expected: int) -> None:
    """28, not 26: as a phase of its own the update reads the weights once more."""
    made = plan(weights=weights, optimizer="nvme", memory={"device": "64MiB", "host": "1GiB"})
    assert made.forecast.step_bytes == expected * NUMEL


def test_states_are_counted_to_the_byte() -> None:
    made = plan(**NVME, memory={"device": "16MiB", "host": "1GiB"})
    assert made.layout.weight_bytes == 2 * NUMEL
    assert made.layout.state_bytes == 10 * NUMEL
    assert made.layout.swap.nbytes == 12 * NUMEL
    assert made.layout.arena.gradients == 4 * NUMEL
    assert plan(**NVME, memory={"device": "16MiB", "host": "64MiB"}).layout.arena.gradients == 2 * NUMEL
    assert plan(torch.float32, **NVME, memory={"device": "32MiB", "host": "1GiB"}).layout.state_bytes == 8 * NUMEL


@pytest.mark.parametrize(("layers", "tiles"), [(1, 3), (5, 5), (100, 21)])
def test_staging_has_the_tiles_of_the_model_three_at_least_and_what_the_budget_allows(layers: int, tiles: int) -> None:
    with torch.device("meta"):
        model = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(layers)).bfloat16()
    config = load_config(
        {**NVME, "memory": {"device": "64MiB", "host": "8GiB"}, "nvme": {"paths": ["/tmp/never-made"]}}
    )
    made = make_plan(discover(model).units, OffloadArguments(config, torch.device("cpu")), can_recompute=False)
    assert made.budgets.staging.nbytes == tiles * made.budgets.staging.tile_bytes


def test_a_plan_stays_inside_its_budgets() -> None:
    for host in ("100MiB", "200MiB", "1GiB"):
        made = plan(memory={"device": "40MiB", "host": host})
        assert made.host_bytes <= made.budgets.limits.host
        assert made.device_bytes <= made.budgets.limits.device
        assert made.layout.arena.nbytes <= made.budgets.limits.host + made.budgets.limits.device


def test_auto_takes_ram_where_it_fits_and_nvme_where_not() -> None:
    roomy, tight = plan(memory={"device": "1GiB", "host": "2GiB"}), plan(memory={"device": "16MiB", "host": "100MiB"})
    assert (roomy.placement.weights.tier, roomy.placement.optimizer.tier) == ("host", "host")
    assert tight.placement.weights.tier in ("host", "nvme")
    assert tight.placement.optimizer.tier == "nvme"


def test_nvme_without_a_path_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="need a directory"):
        plan(**NVME, nvme={})


@pytest.mark.parametrize("key", ["device", "host"])
def test_what_a_failing_plan_advises_fits(key: str) -> None:
    memory = {"device": "64MiB", "host": "1GiB"} | {key: "1MiB"}
    with pytest.raises(PlanError, match=f"memory.{key}") as caught:
        plan(**NVME, memory=memory)
    advised = str(caught.value).split(f"memory.{key} to ")[1].split()[0].rstrip(".")
    plan(**NVME, memory=memory | {key: advised})


def test_recompute_is_refused_where_the_model_cannot() -> None:
    with pytest.raises(ConfigError, match="has no gradient_checkpointing_enable"):
        plan(activations="recompute")
    with pytest.raises(ConfigError, match="recompute: blocks, but the model has no gradient_checkpointing_enable"):
        plan(recompute="blocks")


@pytest.mark.parametrize(
    ("activations", "recompute", "tier", "blocks"),
    [
        ("auto", "auto", "keep", True),
        ("auto", "none", "keep", False),
        ("keep", "auto", "keep", False),
        ("keep", "blocks", "keep", True),
        ("recompute", "auto", "keep", True),
        ("nvme", "auto", "nvme", True),
        ("nvme", "none", "nvme", False),
        ("host", "blocks", "keep", True),  # the CPU's memory is RAM
    ],
)
def test_what_the_two_keys_mean_together(activations: str, recompute: str, tier: str, blocks: bool) -> None:
    placed = plan(can_recompute=True, **NVME, activations=activations, recompute=recompute).placement
    assert (placed.activations, placed.recompute) == (tier, blocks)


def test_the_two_keys_must_not_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="activations: recompute and recompute: none contradict each other"):
        load_config({"activations": "recompute", "recompute": "none"})


def test_a_plan_describes_itself() -> None:
    model, _ = llama()
    config = load_config({"nvme": {"paths": ["/tmp/never-made"]}, "commit_every": 0, **NVME})
    text = make_plan(
        discover(model).units, OffloadArguments(config, torch.device("cpu")), can_recompute=True
    ).describe()
    for word in ("weights", "optimizer", "gradients", "recompute", "memory.host", "swap file"):
        assert word in text


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({}, "192.00 MiB = 192.00 MiB of states"),
        ({"commit_every": 1}, "384.00 MiB = 192.00 MiB of states + 192.00 MiB of free copies"),
        (
            {"commit_every": 1, "keep": 3},
            "768.00 MiB = 192.00 MiB of states + 576.00 MiB of free copies and earlier generations",
        ),
        (
            {"commit_every": 1, "pins": 2},
            "768.00 MiB = 192.00 MiB of states + 576.00 MiB of free copies and pinned generations",
        ),
        ({"overlap": "auto"}, "384.00 MiB = 192.00 MiB of states + 192.00 MiB of free copies"),
        ({"gradients": "nvme"}, "256.00 MiB = 192.00 MiB of states + 64.00 MiB for gradients"),
        ({"weights": "host"}, "160.00 MiB = 160.00 MiB of states"),
        ({"weights": "host", "optimizer": "host"}, "0 B"),
    ],
)
def test_the_sizes_a_plan_gives_for_the_swap_file_add_up(config: dict[str, Any], sizes: str) -> None:
    made = plan(**NVME | {"memory": {"device": "64MiB", "host": "1GiB"}} | config)
    assert f"  swap file     {sizes}; one step moves" in made.describe()


def test_many_threads_do_not_take_the_host_budget_for_staging() -> None:
    made = plan(**NVME, memory={"device": "64MiB", "host": "256MiB"}, update={"threads": 128})
    assert made.budgets.staging.nbytes <= made.budgets.limits.host / 8


@pytest.mark.parametrize("overlap", ["auto", "before_forward"])
def test_memory_nothing_else_wants_reads_states_ahead(overlap: str) -> None:
    def made(host: int, **config: Any) -> Plan:
        given = {"overlap": overlap, "update": {"tile": "256KiB"}} | NVME | config
        return plan(**given, memory={"device": "16MiB", "host": host})

    roomy = made(1 << 30)
    staging = roomy.budgets.staging
    assert 0 <= 10 * NUMEL // 2 - staging.ahead_bytes < staging.tile_bytes, "half of the states"
    lent = made(1 << 30, weights="host", commit_every=1)
    assert (lent.budgets.shadow_bytes > 0) == (overlap == "auto")
    staging = lent.budgets.staging
    tiles = 16 * (lent.budgets.shadow_bytes // 16 // staging.tile_bytes)
    assert bool(tiles) == (overlap == "auto")
    assert 0 <= 10 * NUMEL // 2 - staging.ahead_bytes - tiles * staging.tile_bytes < staging.tile_bytes, (
        "of a unit's shadow its whole tiles count"
    )
    assert format_bytes(roomy.budgets.staging.ahead_bytes) in roomy.describe()
    for host in (roomy.host_bytes - (16 << 20), 128 << 20):
        tight, off = made(host), made(host, overlap="off")
        ahead, tile = tight.budgets.staging.ahead_bytes, tight.budgets.staging.tile_bytes
        assert 0 <= tight.budgets.limits.host - tight.host_bytes < tile
        assert ahead % tile == 0
        assert tight.layout.arena.nbytes == off.layout.arena.nbytes + tight.budgets.shadow_bytes + ahead
        assert off.budgets.staging.ahead_bytes == 0
    assert made(1 << 30, optimizer="host").budgets.staging.ahead_bytes == 0


@pytest.mark.parametrize("overlap", ["auto", "during_backward"])
@pytest.mark.parametrize("commit_every", [0, 1])
def test_updates_speculate_on_a_device_as_on_the_cpu(overlap: str, commit_every: int) -> None:
    memory = {"device": "64MiB", "host": "1GiB"}
    config = {"weights": "host", "optimizer": "nvme", "memory": memory, "commit_every": commit_every}
    on_gpu, on_cpu = (plan(device=device, overlap=overlap, **config) for device in ("cuda", "cpu"))
    assert on_gpu.placement.updates == on_cpu.placement.updates
    assert on_gpu.budgets.shadow_bytes == on_cpu.budgets.shadow_bytes > 0
    assert on_gpu.layout.swap.nbytes == on_cpu.layout.swap.nbytes


def test_slots_and_gradients_under_way_fit_the_device() -> None:
    for device in range(4, 64, 4):
        try:
            made = plan(device="cuda", weights="host", memory={"device": f"{device}MiB", "host": "1GiB"})
        except PlanError as error:
            assert "for gradients" in str(error)
            continue
        budgets = made.budgets
        largest = max(sum(gradient.nbytes // 2 for gradient in unit.gradients) for unit in made.layout.units)
        assert budgets.ring_bytes >= largest
        assert made.device_bytes == budgets.slot_bytes + budgets.ring_bytes <= device << 20
    assert plan().budgets.ring_bytes == 0


def on_device(pages: int, trained: Sequence[int], frozen: Sequence[int]) -> Plan:
    """Return a plan for units of so many pages each, with so many pages of device memory."""
    with torch.device("meta"):
        blocks = nn.ModuleList(nn.Linear(32, 32 * count, bias=False) for count in (*frozen, *trained))
    for block in blocks[: len(frozen)]:
        block.requires_grad_(False)
    config = {"weights": "nvme", "optimizer": "nvme", "memory": {"device": pages * PAGE_BYTES, "host": "1GiB"}}
    given = load_config(config | {"nvme": {"paths": ["/tmp/never-made"]}, "overlap": "off", "commit_every": 0})
    return make_plan(discover(blocks).units, OffloadArguments(given, torch.device("cuda")), can_recompute=False)


def test_more_device_memory_never_makes_a_plan_fail() -> None:
    fitted = False
    for pages in range(60, 120):
        try:
            on_device(pages, trained=(10, 10), frozen=(35, 34))
            fitted = True
        except PlanError:
            assert not fitted, f"{pages} pages"
    assert fitted


def test_a_plan_says_that_host_memory_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinity.plan.planner.available_host_bytes", lambda: 2 << 20)
    with pytest.raises(PlanError, match="80% of the RAM that is available now"):
        plan(**NVME, memory={"device": "64MiB"})


@pytest.mark.parametrize("name", ["avx9", "\x1b[31m"])
def test_an_instruction_set_that_does_not_exist_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINITY_ISA", name)
    with pytest.raises(ConfigError, match="unknown instruction set") as caught:
        plan()
    assert str(caught.value).isprintable()


@settings(max_examples=number(40, 3000), deadline=None)
@given(test_layout.blocks, test_layout.configs, st.sampled_from(["cpu", "cuda"]))
def test_one_pass_that_is_known_moves_no_more_and_adds_up_where_it_did(
    blocks: list[list[test_layout.Shape]], config: dict[str, Any], device: str
) -> None:
    try:
        unknown = test_layout.plan(blocks, config, device)
    except (PlanError, ConfigError):
        return
    known = test_layout.plan(blocks, config, device, accumulation_steps=1)
    assert known.forecast.step_bytes == unknown.forecast.step_bytes - unknown.forecast.saves_bytes
    assert unknown.forecast.saves_bytes >= 0 == known.forecast.saves_bytes
    assert known.placement.accumulates >= unknown.placement.accumulates
    assert known.host_bytes <= known.budgets.limits.host
    assert known.device_bytes <= known.budgets.limits.device
