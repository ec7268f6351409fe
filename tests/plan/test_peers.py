"""The plan of one rank of several: slices of states, whole weights in the slots, and budgets of a machine divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from infinity.config import load_config
from infinity.errors import PlanError
from infinity.plan.plan import Plan
from infinity.plan.plan_input import PeerFacts
from infinity.plan.planner import make_plan
from infinity.state.discover import discover
from infinity.state.offload_arguments import OffloadArguments
from infinity.state.shard import SHARD_NUMEL, RankPartition

MIB = 1 << 20
WIDTH = 1024  # a block is 16 slices of the smallest size
BLOCKS = 8


def plan(
    count: int = 1,
    index: int = 0,
    *,
    on_machine: int = 1,
    device: str = "cpu",
    near: RankPartition | None = None,
    **config: Any,
) -> Plan:
    with torch.device("meta"):
        blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)).to(torch.bfloat16)
    config = {"nvme": {"paths": ["/tmp/never-made"]}, "overlap": "off", "commit_every": 0} | config
    peers = PeerFacts(RankPartition(count, index), on_machine, sharded=count > 1, near=near)
    units = discover(blocks).units
    return make_plan(
        units, OffloadArguments(load_config(config), torch.device(device)), can_recompute=False, peers=peers
    )


NVME = {"weights": "nvme", "optimizer": "nvme", "memory": {"device": "16MiB", "host": "256MiB"}}


@pytest.mark.covering(most=3)
@pytest.mark.parametrize("count", [2, 3, 4, 16, 64])
def test_the_slices_of_all_ranks_are_the_states_of_one(count: int) -> None:
    alone, shared = plan(**NVME), [plan(count, index, **NVME) for index in range(count)]
    for what in ("numel", "trainable_numel", "weight_bytes", "state_bytes"):
        assert sum(getattr(each.layout, what) for each in shared) == getattr(alone.layout, what)
    assert sum(each.layout.swap.nbytes for each in shared) == alone.layout.swap.nbytes


@pytest.mark.parametrize(("count", "most"), [(2, 8), (3, 6), (4, 4), (16, 1), (64, 1)])
def test_no_rank_has_more_than_its_share_rounded_up(count: int, most: int) -> None:
    for index in range(count):
        numel = plan(count, index, **NVME).layout.numel
        assert numel <= most * SHARD_NUMEL * BLOCKS
        assert (numel == 0) == (index >= 16)


def test_slots_hold_whole_units_also_where_slices_rest_in_ram() -> None:
    memory = {"device": "16MiB", "host": "512MiB"}
    alone, shared = (plan(count, weights="host", optimizer="host", memory=memory) for count in (1, 4))
    whole = WIDTH * WIDTH * 2
    assert alone.device_bytes == 0
    assert shared.budgets.slot_bytes == shared.layout.arena.transfers == shared.device_bytes == 4 * whole
    assert shared.layout.arena.weights == alone.layout.arena.weights // 4
    assert shared.layout.arena.states == alone.layout.arena.states // 4
    assert shared.layout.arena.exchange == 2 * 2 * whole
    assert alone.layout.arena.exchange == 0
    assert shared.host_bytes == shared.layout.arena.nbytes + shared.layout.checksum_bytes - shared.device_bytes


def test_the_ranks_of_a_machine_divide_its_memory() -> None:
    for on_machine in (1, 2, 4):
        made = plan(4, 1, on_machine=on_machine, memory={"device": "64MiB", "host": "1GiB"})
        assert made.budgets.limits.host == 1024 * MIB // on_machine
        assert made.budgets.limits.device == 64 * MIB // on_machine
        assert made.host_bytes <= made.budgets.limits.host


def test_a_gpu_of_its_own_is_not_divided() -> None:
    made = plan(4, 1, on_machine=4, device="cuda", memory={"device": "64MiB", "host": "1GiB"})
    assert made.budgets.limits.device == 64 * MIB
    assert made.placement.weights.tier == "host"  # never all of them on each device


def test_what_fails_names_a_budget_that_works() -> None:
    memory = {"device": "16MiB", "host": "1MiB"}
    with pytest.raises(PlanError, match=r"memory\.host") as caught:
        plan(2, **(NVME | {"memory": memory}))
    advised = str(caught.value).split("memory.host to ")[1].split()[0].rstrip(".")
    plan(2, **(NVME | {"memory": memory | {"host": advised}}))


def test_weights_on_the_device_are_refused() -> None:
    with pytest.raises(PlanError, match="weights: host or auto"):
        plan(2, device="cuda", weights="device", memory={"device": "1GiB", "host": "1GiB"})


def near(gather: int, **config: Any) -> Plan:
    """Return the peers of rank 1 of 4, which keeps copies for so many ranks."""
    return plan(4, 1, **(NVME | config), near=RankPartition(gather, 1 % gather))


@pytest.mark.parametrize("gather", [1, 2])
def test_copies_of_weights_take_host_memory_of_their_own(gather: int) -> None:
    memory = {"device": "16MiB", "host": "1GiB"}
    without, made = plan(4, 1, **(NVME | {"memory": memory})), near(gather, memory=memory)
    copies = BLOCKS * WIDTH * WIDTH * 2 // gather
    assert made.layout.arena.secondary == copies
    assert made.host_bytes == without.host_bytes + copies
    assert "once a step" in made.describe()
    assert ("hpZ" if gather > 1 else "ZeRO-2") in made.describe()


def test_what_stays_in_its_slot_until_it_is_updated_needs_no_copy() -> None:
    made = near(1, memory={"device": f"{2 * BLOCKS * 2}MiB", "host": "256MiB"})
    assert made.layout.arena.secondary == 0
    assert "ZeRO-3" in made.describe()


def test_copies_that_do_not_fit_are_named() -> None:
    memory = {"device": "8MiB", "host": "24MiB"}
    plan(4, 1, **(NVME | {"memory": memory}))
    with pytest.raises(PlanError, match=r"16\.00 MiB for copies of weights \(ranks\.gather\)") as caught:
        near(1, memory=memory)
    assert "set ranks: {gather: world}" in str(caught.value)
    advised = str(caught.value).split("memory.host to ")[1].split()[0].rstrip(".")
    near(1, memory=memory | {"host": advised})


def test_the_description_says_whose_it_is() -> None:
    assert ": what rank 1 of 4 keeps" in plan(4, 1, **NVME).describe()
    assert "rank" not in plan(**NVME).describe()
