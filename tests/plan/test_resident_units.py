"""Resident units, and states of ranks on their devices, take memory of the device that nothing else needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from infinity.config import load_config
from infinity.errors import PlanError
from infinity.plan.plan import Plan
from infinity.plan.plan_input import FLAG_BYTES, NO_PEERS, PeerFacts
from infinity.plan.planner import make_plan
from infinity.sizes import parse_bytes
from infinity.state.discover import discover
from infinity.state.offload_arguments import OffloadArguments
from infinity.state.shard import RankPartition

SIZES = [f"{size}MiB" for size in (26, 40, 56, 80, 120, 200, 400, 1000)]


def plan(device: str, *, host: str = "1GiB", peers: PeerFacts = NO_PEERS, **config: Any) -> Plan:
    """Return the plan of a model with 24 MiB of weights, and 168 to 192 MiB of states and gradients."""
    with torch.device("meta"):
        model = nn.ModuleList(nn.Sequential(nn.Linear(1024, 1024, bias=False)) for _ in range(12)).bfloat16()
    found = discover(model)
    terms = OffloadArguments(
        load_config({"memory": {"device": device, "host": host}, **config}), torch.device("cuda:0")
    )
    return make_plan(found.units, terms, can_recompute=False, sites=found.sites, peers=peers)


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


TWO = PeerFacts(RankPartition(2, 0), 2, sharing="weights")
STATES = 10 * 6 << 20
"""Bytes of a rank's states in split16, of half of 12 M parameters."""


def test_the_states_of_a_rank_are_on_the_device_and_nothing_else_of_it() -> None:
    """A gradient in fp32 and a weight go up for each update, and a weight comes down."""
    alone, made = plan("1GiB", optimizer="host", peers=TWO), plan("1GiB", optimizer="device", peers=TWO)
    arena, before = made.layout.arena, alone.layout.arena
    assert [before.states, arena.states] == [STATES, 0]
    assert [arena.gradients, arena.shared_weights] == [before.gradients, before.shared_weights] == [24 << 20, 12 << 20]
    assert made.budgets.slot_bytes == alone.budgets.slot_bytes
    states = STATES + 12 * FLAG_BYTES
    assert made.budgets.resident_bytes == states + made.budgets.scratch_bytes + 2 * (2 + 4) * (1 << 19)
    moved, was = made.forecast.moved, alone.forecast.moved
    assert (moved.operands, moved.results) == ((2 + 4) * 6 << 20, 2 * 6 << 20)
    assert (was.operands, was.results) == (0, 0)
    assert (moved.up, moved.down) == (was.up, was.down)


def test_more_device_memory_never_puts_fewer_states_of_ranks_there() -> None:
    counts = [len(plan(device, peers=TWO).placement.optimizer.resident) for device in SIZES]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 12)
    assert len(set(counts)) > 3


def test_states_of_ranks_stay_off_the_device_if_their_gradients_have_no_room_in_ram() -> None:
    nvme = {"nvme": {"paths": ["/tmp/never-made"]}, "commit_every": 0, "peers": TWO}
    made = plan("1GiB", host="80MiB", **nvme)
    assert made.peers.sharing == "weights"
    assert not made.placement.optimizer.resident
    assert made.placement.gradients.tier == "nvme"
    assert len(plan("1GiB", host="96MiB", **nvme).placement.optimizer.resident) == 12


def test_states_of_ranks_leave_half_of_the_device_to_slots_or_as_much_as_all_weights_take() -> None:
    """The weights are 24 MiB. Half of 40 MiB is for activations, half of the rest for slots."""
    assert plan("40MiB", peers=TWO).budgets.slot_bytes >= 10 << 20
    assert plan("200MiB", peers=TWO).budgets.slot_bytes == 24 << 20


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"weights": "nvme"}, "only if they share all weights in RAM"),
        ({"peers": replace(TWO, sharing="nothing")}, "only if they share all weights in RAM"),
        ({"gradients": "nvme"}, "updates from gradients in RAM"),
        ({"moments": "int8"}, "moments: int8 is updated on the CPU only"),
        ({"device": "26MiB", "weights": "host"}, "for optimizer states, and the rest for weights and updates"),
        ({"device": "26MiB", "weights": "auto"}, "for optimizer states, and the rest for weights and updates"),
    ],
)
def test_why_states_of_ranks_cannot_be_on_the_device_is_said(config: dict[str, Any], said: str) -> None:
    given = {"device": "1GiB", "peers": TWO, "nvme": {"paths": ["/tmp/never-made"]}, "commit_every": 0} | config
    with pytest.raises(PlanError, match=said):
        plan(given.pop("device"), optimizer="device", **given)
