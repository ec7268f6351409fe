"""If the batch is known, activations get what they need; with the rates of the machine, the fastest plan is taken."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from infinity.cli.planning.machines import MACHINES
from infinity.cli.planning.model import build
from infinity.config import load_config
from infinity.errors import PlanError
from infinity.plan import link_traffic
from infinity.plan.disk import DiskLimits
from infinity.plan.fastest_plan import _key, needs_rates
from infinity.plan.plan import Plan
from infinity.plan.plan_input import PeerFacts
from infinity.plan.planner import make_plan
from infinity.state.discover import DiscoveredUnits, discover
from infinity.state.model_shape import ModelShape, shape_of
from infinity.state.offload_arguments import OffloadArguments
from infinity.state.shard import RankPartition
from infinity.state.training_step import BatchShape, StepFacts, TrainingStep, facts_of

GIB = 1 << 30
H200 = {"device": "125GiB", "host": "97GiB"}
CONSUMER = {"device": "21.6GiB", "host": "46GiB"}


@cache
def eight_billion() -> tuple[Any, DiscoveredUnits]:
    model = build("llama-3-8b", torch.bfloat16)
    return model, discover(model)


@cache
def shape(sequences: int) -> ModelShape:
    return shape_of(eight_billion()[0], sequences, 2048)


def step_of(tokens: int, rates: str | None = None, **facts: Any) -> TrainingStep:
    batch = BatchShape(tokens // 2048, 2048)
    known = StepFacts(batch, None if rates is None else MACHINES[rates], **facts)
    return TrainingStep(shape(batch.sequences), known)


def planned(step: TrainingStep | None, memory: dict[str, str] = H200, ranks: int = 0, **config: Any) -> Plan:
    _, found = eight_billion()
    given = {"memory": memory, "nvme": {"paths": ["/not/there"]}, "commit_every": 0, "update": {"threads": 16}} | config
    terms = OffloadArguments(load_config(given), torch.device("cuda:0"), accumulation_steps=1, step=step)
    more = {"peers": PeerFacts(RankPartition(ranks, 0), ranks, sharing="weights")} if ranks else {}
    return make_plan(found.units, terms, can_recompute=True, sites=found.sites, disks=DiskLimits(32 << 40), **more)


def activations(step: TrainingStep, plan: Plan) -> int:
    away = {"keep": 0, "host": plan.budgets.activation_bytes, "nvme": math.inf}[plan.placement.activations]
    return step.work(recompute=plan.placement.recompute, vertical=False, away=away).peak_bytes


def test_32768_tokens_of_8b_fit_24_gb_because_the_slots_shrink() -> None:
    step = step_of(32768)
    plan = planned(step, CONSUMER)
    assert activations(step, plan) == pytest.approx(16.1 * GIB, rel=0.01)
    assert plan.device_bytes + activations(step, plan) <= 21.6 * GIB
    assert plan.device_bytes > planned(step_of(49152), CONSUMER, activations="keep", recompute="blocks").device_bytes
    without = planned(None, CONSUMER)
    assert without.device_bytes + activations(step, without) > 21.6 * GIB


@pytest.mark.covering(strength=2)
@pytest.mark.parametrize("memory", [CONSUMER, H200])
@pytest.mark.parametrize("tokens", [2048, 8192, 16384, 40960])
@pytest.mark.parametrize("rates", [None, "h200-4"])
def test_a_plan_never_needs_more_than_the_device_has(tokens: int, rates: str | None, memory: dict[str, str]) -> None:
    step = step_of(tokens, rates)
    plan = planned(step, memory)
    limits = plan.budgets.limits
    least = planned(step_of(1 << 20), memory).device_bytes
    assert plan.device_bytes <= max(limits.device - activations(step, plan), least)
    assert plan.device_bytes <= limits.device
    assert plan.host_bytes <= limits.host


def test_few_tokens_leave_more_than_half_of_the_device_to_weights() -> None:
    assert planned(step_of(2048), CONSUMER, optimizer="nvme", weights="nvme").budgets.slot_bytes > 10.8 * GIB


def test_without_tokens_nothing_changes_and_without_rates_as_many_units_as_fit_stay_on_the_device() -> None:
    known, unknown = planned(step_of(8192)), planned(None)
    assert unknown.budgets.limits.activations is None
    assert len(unknown.placement.optimizer.resident) < len(known.placement.optimizer.resident)
    assert known.placement.recompute
    assert unknown.placement.recompute


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("machine", ["h200", "8xh200"])
def test_no_other_share_of_the_units_is_predicted_to_be_faster(machine: str, clips: bool) -> None:
    step, config = step_of(8192, machine, clips=clips), load_config(None)
    memory = H200 if machine == "h200" else H200 | {"host": "1600GiB"}
    plan = planned(step, memory, recompute="blocks")
    resident = len(plan.placement.optimizer.resident)
    assert resident < 35
    for tier in ("host", "device"):
        other = planned(step, memory, recompute="blocks", optimizer=tier, gradients="auto")
        assert _key(plan, config, step) < _key(other, config, step)


def test_activations_are_kept_if_this_is_faster_and_they_fit() -> None:
    assert not planned(step_of(8192, "h200-4")).placement.recompute
    assert planned(step_of(8192, "h200-4"), recompute="blocks").placement.recompute
    assert planned(step_of(65536, "h200-4")).placement.recompute
    assert planned(step_of(8192, "consumer"), CONSUMER).placement.recompute


def test_a_plan_whose_units_are_all_on_the_device_does_not_say_that_states_are_in_ram() -> None:
    plan = planned(None, H200 | {"device": "200GiB"}, optimizer="device")
    assert plan.placement.updates.reason == "the device updates all units that are trained"


@pytest.mark.parametrize(
    ("config", "needed"),
    [({}, True), ({"optimizer": "nvme"}, True), ({"optimizer": "nvme", "recompute": "blocks"}, False)],
)
def test_rates_are_needed_only_if_a_choice_depends_on_predicted_steps(config: dict[str, Any], needed: bool) -> None:
    assert needs_rates(load_config(config)) == needed
    known, unknown = (planned(step_of(8192, rates), CONSUMER, **config) for rates in ("consumer", None))
    assert needed or known.placement == unknown.placement


@pytest.mark.parametrize("rates", [None, "consumer"])
def test_activations_go_to_ram_only_if_the_device_has_no_room(rates: str | None) -> None:
    assert planned(step_of(32768, rates), CONSUMER).placement.activations == "keep"
    step = step_of(49152, rates)
    plan = planned(step, CONSUMER)
    assert plan.placement.activations == "host"
    assert plan.placement.recompute
    assert plan.device_bytes + activations(step, plan) <= 21.6 * GIB
    assert plan.budgets.activation_bytes == 32 * 49152 * 8192  # the inputs of 32 blocks, which no state takes
    assert plan.host_bytes <= 46 * GIB
    assert planned(step, CONSUMER, activations="keep", recompute="blocks").placement.activations == "keep"
    assert planned(step, CONSUMER, ranks=2).placement.activations == "keep"


@pytest.mark.parametrize("rates", [None, "consumer"])
def test_activations_go_to_drives_only_if_no_other_plan_fits(rates: str | None) -> None:
    little = CONSUMER | {"host": "16GiB"}  # no room for the inputs of the blocks
    fits_in_tiles = planned(step_of(49152, rates), little)
    assert fits_in_tiles.placement.activations == "keep"
    step = step_of(65536, rates)
    plan = planned(step, little)
    assert plan.placement.activations == "nvme"
    assert plan.needs_store
    assert (
        "nvme    the inputs of blocks, which are recomputed, through 2.00 GiB of RAM; each pass writes 16.00 GiB"
        in (plan.describe())
    )
    assert plan.device_bytes + activations(step, plan) <= 21.6 * GIB
    assert planned(step, CONSUMER).placement.activations == "host"
    in_ram = {"device": "21.6GiB", "host": "160GiB"}  # RAM has room for all states
    assert planned(step, in_ram, nvme={}).placement.activations == "host"


def test_several_ranks_do_not_compare_plans_because_each_measures_other_rates() -> None:
    """So `infinity plan`, which knows rates, shows the plan of a run."""
    memory = {"device": "60GiB", "host": "400GiB"}
    slow = replace(MACHINES["8xh200"], up=1e9)
    resident = set()
    for rates in (None, MACHINES["8xh200"], slow):
        facts = StepFacts(BatchShape(32, 2048), rates)
        plan = planned(TrainingStep(shape(32), facts), memory, ranks=8)
        assert plan.placement.recompute
        resident.add(plan.placement.optimizer.resident)
    assert [len(each) > 10 for each in resident] == [True]


def test_a_share_without_room_in_ram_is_left_out() -> None:
    step = step_of(8192, "h200")
    small = {"device": "125GiB", "host": "30GiB"}
    with pytest.raises(PlanError, match=r"memory\.host"):
        planned(step, small, nvme={}, optimizer="host")
    assert len(planned(step, small, nvme={}).placement.optimizer.resident) > 20


def test_plans_that_use_the_same_slots_share_the_simulation_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated: list[Any] = []

    class Simulator(link_traffic.SlotSimulator):
        def steady(self, void: Any) -> Any:
            simulated.append(void)
            return super().steady(void)

    monkeypatch.setattr(link_traffic, "SlotSimulator", Simulator)
    small = {"device": "21.3GiB", "host": "46GiB"}
    planned(step_of(8192, "consumer"), small, commit_every="auto")
    count = len(simulated)
    assert 0 < count < 10  # six shares of the units, two frequencies of commits, clipped or not
    planned(step_of(8192, "consumer", clips=True), small, commit_every="auto")
    planned(step_of(8192, "consumer"), small)
    assert len(simulated) == count


@pytest.mark.parametrize("tokens", [0, -1, 2.5, "many"])
def test_a_number_of_tokens_that_cannot_be_is_refused(tokens: Any) -> None:
    with pytest.raises(Exception, match="tokens must be a whole number of at least 1, or None"):
        facts_of(tokens, 1)
    facts = facts_of(8192, 2)
    assert facts is not None
    assert (facts.batch.tokens, facts.batch.passes) == (8192, 2)
