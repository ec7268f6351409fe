"""The time of a step follows from what it moves and computes: the busiest resource decides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from infinity.cli.planning.machines import MACHINES
from infinity.config import load_config
from infinity.plan.disk import DiskLimits
from infinity.plan.plan import Plan
from infinity.plan.plan_input import NO_PEERS, PeerFacts, Sharing
from infinity.plan.planner import make_plan
from infinity.plan.step_time import OVERLAPPED, StepTimePrediction, predict
from infinity.state.discover import discover
from infinity.state.machine_rates import MachineRates
from infinity.state.offload_arguments import OffloadArguments
from infinity.state.shard import RankPartition
from infinity.state.training_step import StepWork

NUMEL = 8 * 1024 * 1024
IDLE = StepWork(flops=0.0, forward_flops=0.0, tokens=1, landings=1, peak_bytes=0)
CPU = MachineRates(
    name="a CPU", cores=2, dram=1e15, disk_read=1e9, disk_write=5e8, adam={"fp32": 1e15}, checksums=1e18, land=1e15,
    flops=1e12, host_bytes=1 << 34, device_bytes=1 << 34, disk_bytes=1 << 40,
)  # fmt: skip


def planned(device: str = "cpu", ranks: int = 1, sharing: Sharing = "nothing", **config: Any) -> Plan:
    with torch.device("meta"):
        blocks = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(8)).bfloat16()
    given = {
        "weights": "nvme", "optimizer": "nvme", "commit_every": 0, "nvme": {"paths": ["/not/there"]},
        "memory": {"device": "16MiB", "host": "1GiB"},
    } | config  # fmt: skip
    peers = NO_PEERS if ranks == 1 else PeerFacts(RankPartition(ranks, 0), ranks, sharing=sharing)
    terms = OffloadArguments(load_config(given), torch.device(device))
    return make_plan(discover(blocks).units, terms, can_recompute=False, peers=peers, disks=DiskLimits(1 << 40))


def of(plan: Plan, machine: MachineRates = CPU, work: StepWork = IDLE, **options: bool) -> StepTimePrediction:
    return predict(plan, work, machine, **options)


def test_a_step_that_computes_nothing_takes_as_long_as_its_bytes() -> None:
    plan = planned()
    moved, found = plan.forecast.moved, of(plan)
    expected = moved.read_bytes / 1e9 + moved.written_bytes / 5e8
    assert found.busy["disk"] == pytest.approx(expected)
    assert found.seconds == pytest.approx(OVERLAPPED * expected)
    assert found.bound == "disk"


def test_without_overlap_the_passes_and_the_updates_are_added_up() -> None:
    work = replace(IDLE, flops=3e12)
    found = of(planned(overlap="off"), work=work)
    disk_of_updates = found.busy["disk"] - planned(overlap="off").forecast.moved.weights / 1e9
    assert found.seconds == pytest.approx(3.0 + disk_of_updates, rel=1e-3)
    assert found.compute_s == pytest.approx(3.0)


def test_the_processor_computes_where_there_is_no_device_and_the_device_where_there_is_one() -> None:
    work = replace(IDLE, flops=3e15)
    assert of(planned(), work=work).bound == "processor"
    gpu = of(planned("cuda", memory={"device": "64MiB", "host": "1GiB"}), MACHINES["h200"], work)
    assert gpu.bound == "compute"
    assert gpu.busy["compute"] == pytest.approx(3e15 / MACHINES["h200"].flops)
    assert gpu.busy["up"] > 0
    assert gpu.busy["down"] > 0


@pytest.mark.parametrize("slow", ["adam", "land", "checksums", "dram"])
def test_each_rate_of_a_machine_counts(slow: str) -> None:
    value: Any = {"fp32": 1e3} if slow == "adam" else 1e3
    plan = planned()
    assert of(plan, replace(CPU, **{slow: value})).seconds > 100 * of(plan).seconds


def test_reads_and_writes_of_as_many_bytes_get_what_the_mix_of_both_gets() -> None:
    """A profile's three rates, of steps that only read, and of some that write as much."""
    plan, half = planned(), replace(CPU, disk_mixed=0.5)
    moved = plan.forecast.moved
    both = min(moved.read_bytes, moved.written_bytes)
    by_turns = moved.read_bytes / 1e9 + moved.written_bytes / 5e8
    assert 0 < both < moved.read_bytes
    weights, updates = moved.weights / 1e9, min(moved.states, moved.written) * (1 / 1e9 + 1 / 5e8)
    assert of(plan, half).busy["disk"] == pytest.approx(by_turns + updates)
    assert of(plan).busy["disk"] == pytest.approx(by_turns)
    assert weights > 0


def test_checksums_cost_nothing_where_there_are_none() -> None:
    plan, slow = planned(), replace(CPU, checksums=1e3)
    assert of(plan, slow, checksums=False).seconds == pytest.approx(of(plan).seconds, rel=1e-3)


def test_weights_and_gradients_go_between_the_devices() -> None:
    def seconds(work: StepWork = IDLE, **ranks: Any) -> float:
        memory = {"device": "16MiB", "host": "1GiB"}
        return of(planned("cuda", ranks=2, memory=memory, **ranks), MACHINES["8xh200"], work).busy["between"]

    alone = 16 * 1024 * 1024  # the weights' bytes, of which half come from the other rank, and so it is with gradients
    once = seconds()
    assert once == pytest.approx((2 * alone + alone) / 2 / MACHINES["8xh200"].between, rel=0.25)
    assert seconds(replace(IDLE, landings=5)) - once == pytest.approx(4 * alone / 2 / MACHINES["8xh200"].between)


def test_several_ranks_share_the_disks_and_the_cores() -> None:
    one, two = (of(planned(ranks=ranks, memory={"device": "64MiB", "host": "1GiB"})) for ranks in (1, 2))
    assert two.busy["disk"] == pytest.approx(one.busy["disk"], rel=0.25)  # half the bytes at half the rate
    work = replace(IDLE, flops=1e12)
    plan = planned(ranks=2, memory={"device": "64MiB", "host": "1GiB"})
    assert of(plan, work=work).compute_s == pytest.approx(2.0)


def test_each_rank_uploads_whole_units_and_the_gradients_of_all_ranks_land() -> None:
    """In the flow of the units, as in the totals."""
    ram = {"weights": "host", "optimizer": "host", "memory": {"device": "64MiB", "host": "1GiB"}}
    one, two = planned("cuda", **ram), planned("cuda", ranks=2, sharing="weights", **ram)
    for plan in (one, two):
        moved = plan.forecast.moved
        assert moved.up == sum(load.fetched * (load.forwards + load.backwards) for load in moved.loads)
        assert moved.down == sum(load.down for load in moved.loads)
    lands = replace(MACHINES["8xh200"], land=1e6)
    assert of(two, lands).busy["processor"] == pytest.approx(2 * of(one, lands).busy["processor"], rel=1e-3)
    assert of(two, lands).seconds == pytest.approx(2 * of(one, lands).seconds, rel=1e-2)


def test_clipping_keeps_updates_from_speculating_so_that_they_read_weights_again() -> None:
    plan = planned()
    assert of(plan, clips=True).moved.states > of(plan).moved.states
    fixed = planned(overlap="during_backward")
    assert of(fixed, clips=True).moved == of(fixed).moved
