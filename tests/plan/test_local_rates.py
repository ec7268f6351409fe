"""Runs know the rates that `infinity plan` knows for this machine, and come to the same plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinity.access import opening
from infinity.cli import finetuned_model
from infinity.cli.main import main
from infinity.cli.planning import main as planning
from infinity.cli.planning.machines import MACHINES
from infinity.cli.planning.model import build
from infinity.cli.planning.scenario import PlanScenario
from infinity.config import load_config
from infinity.plan import local_rates
from infinity.plan.local_rates import rates_for
from infinity.plan.plan import Plan
from infinity.plan.plan_input import NO_PEERS, PeerFacts
from infinity.state.discover import discover
from infinity.state.offload_arguments import OffloadArguments
from infinity.state.shard import RankPartition
from infinity.state.training_step import BatchShape, StepFacts
from tests.models import llama

GPU = torch.device("cuda", 0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Arguments of the measurements; each measurement finds an H200 with four disks."""
    found: list[Any] = []

    def measured(*given: Any) -> Any:
        found.append(given)
        return MACHINES["h200-4"]

    monkeypatch.setattr(local_rates, "_measured_once", measured)
    monkeypatch.setattr(opening, "why_not_there", lambda *_: "")
    monkeypatch.setattr(planning, "_device", lambda options: GPU)
    return found


def of_run(model: Any, config: dict[str, Any], passes: int, facts: StepFacts, peers: PeerFacts = NO_PEERS) -> Plan:
    terms = OffloadArguments(load_config(config), GPU, accumulation_steps=passes, facts=facts)
    return opening.plan_for(model, discover(model), terms, peers)


@pytest.mark.covering(most=2)
@pytest.mark.parametrize(("micro_batches", "accumulation"), [(1, 1), (1, 2), (2, 2)])
def test_a_run_makes_the_plan_that_infinity_plan_shows(
    micro_batches: int, accumulation: int, asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Plan] = []
    monkeypatch.setattr(planning, "report", lambda scenario, outcome, others: shown.append(outcome.plan))
    monkeypatch.setattr(PlanScenario, "alternatives", lambda *_: [])
    memory = {"host": "120GiB", "device": "125GiB"}
    options = ["--model", "llama-3-8b", "--dtype", "bf16", "--batch-size", "4", "--sequence-length", "2048"]
    options += ["--micro-batches", str(micro_batches), "--gradient-accumulation", str(accumulation)]
    options += ["--swap-dir", str(tmp_path), "--set", "commit_every=0"]
    main(["plan", *options, *(f"memory.{name}={size}" for name, size in memory.items())])
    vertical = {"vertical": True} if micro_batches > 1 else {}
    config = {"memory": memory, "nvme": {"paths": [str(tmp_path)]}, "commit_every": 0, **vertical}
    passes = 1 if vertical else accumulation
    given = SimpleNamespace(
        method="sft",
        batch_size=4,
        sequence_length=2048,
        micro_batches=micro_batches,
        gradient_accumulation=accumulation,
    )
    facts = finetuned_model._step_of(given, passes)  # type: ignore[arg-type]
    made = of_run(build("llama-3-8b", torch.bfloat16), config, passes, facts)
    assert made.describe() == shown[0].describe()
    assert made.placement == shown[0].placement
    assert asked[0] == asked[1]
    asked.clear()
    unknown = replace(MACHINES["h200-4"], flops=1e18)  # recomputing costs nothing
    assert of_run(build("llama-3-8b", torch.bfloat16), config, passes, replace(facts, rates=unknown)) != made
    assert not asked


def test_ranks_and_runs_in_ram_measure_nothing(asked: list[Any]) -> None:
    model, facts = llama(2)[0], StepFacts(BatchShape(1, 16))
    config = {"memory": {"host": "1GiB", "device": "1GiB"}, "commit_every": 0}
    of_run(model, config, 1, facts, PeerFacts(RankPartition(2, 0), 2))
    terms = OffloadArguments(load_config(config), torch.device("cpu"), facts=facts)
    opening.plan_for(model, discover(model), terms)
    assert not asked
    of_run(model, config, 1, facts)
    assert asked


def test_without_memory_for_the_measurement_the_rates_are_not_known(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory for a block")

    monkeypatch.setattr(local_rates, "_measured_once", fails)
    monkeypatch.setattr(opening.logger, "info", lambda text, *given: said.append(text % given))
    config = {"memory": {"host": "1GiB", "device": "1GiB"}, "commit_every": 0}
    assert of_run(llama(2)[0], config, 1, StepFacts(BatchShape(1, 16))).placement.recompute
    assert said == ["the plan does not know the rates of this machine: no memory for a block"]


def test_a_process_measures_once_and_draws_none_of_its_random_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn: list[torch.Tensor] = []

    def measure(*_: Any, **given: Any) -> Any:
        drawn.append(torch.randn(4))
        return MACHINES["h200"]

    monkeypatch.setattr(local_rates, "local_machine", measure)
    model, config = llama(1)[0], load_config({"nvme": {"paths": [str(tmp_path)]}})
    before = torch.get_rng_state()
    rates = [rates_for(model, config, torch.device("cpu"), 16) for _ in range(2)]
    assert rates == 2 * [MACHINES["h200"]]
    assert len(drawn) == 1
    assert torch.equal(torch.get_rng_state(), before)
