"""`infinity plan` puts norms and MLPs into tiles of tokens if a block does not fit otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from infinity.cli.planning.plan_report import report
from infinity.cli.planning.scenario import PlanOutcome, PlanScenario, with_changes
from infinity.state.training_step import BatchShape
from tests.cli.planning.scenarios import scenario_of


@pytest.fixture(scope="module")
def scenario() -> PlanScenario:
    return scenario_of("llama-3-8b", "consumer", recompute="blocks", activations="keep")


def outcome_of(scenario: PlanScenario, tokens: int) -> PlanOutcome:
    return replace(scenario, batch=BatchShape(1, tokens)).outcome()


def test_a_block_that_fits_runs_as_a_whole_and_one_more_token_makes_tiles(scenario: PlanScenario) -> None:
    most = scenario.most_tokens(outcome_of(scenario, 4096))
    whole, tiled = outcome_of(scenario, most), outcome_of(scenario, most + 1)
    assert whole.activations_fit
    assert whole.work.token_tiles == 1
    assert tiled.activations_fit
    assert tiled.work.token_tiles > 1
    assert tiled.work.peak_bytes < whole.work.peak_bytes
    assert tiled.work.flops / (most + 1) > whole.work.flops / most
    longer = replace(scenario, batch=BatchShape(1, most + 1))
    assert longer.most_tokens(tiled) > most
    assert f"norms and MLPs run in {tiled.work.token_tiles} tiles of tokens" in report(longer, tiled, [])


def test_if_a_block_does_not_fit_in_tiles_the_report_names_what_takes_the_memory(scenario: PlanScenario) -> None:
    longer = replace(scenario, batch=BatchShape(1, 1 << 17))
    outcome = longer.outcome()
    assert not outcome.activations_fit
    said = report(longer, outcome, [])
    assert "needs 13.50 GiB for 131,072 tokens in tiles of tokens" in said
    assert "self_attn.o_proj and their gradients take up to 7.50 GiB" in said


def test_inputs_of_blocks_on_nvme_leave_room_for_131072_tokens(scenario: PlanScenario) -> None:
    longer = replace(scenario, batch=BatchShape(1, 1 << 17))
    kept = longer.outcome()
    assert not kept.activations_fit
    assert {"activations": "nvme"} in list(longer.roomier(kept))
    moved = longer.outcome(with_changes(scenario.config, {"activations": "nvme"}))
    assert moved.activations_fit
    assert moved.work.token_tiles > 1
    assert moved.work.moved_bytes == 32 * (1 << 17) * 8192  # 32 blocks, inputs of 4,096 values in bf16
    assert moved.prediction.busy["disk"] > kept.prediction.busy["disk"] + 32 * (1 << 30) / 7e9
    written = moved.prediction.moved.written_bytes + moved.work.moved_bytes
    assert f"{written * 1000 / 1e12:,.2f} TB written per 1,000 steps" in report(longer, moved, [])


def test_drives_keep_activations_only_if_ram_has_no_room_and_the_report_counts_their_wear(
    scenario: PlanScenario,
) -> None:
    longer = replace(scenario, batch=BatchShape(1, 1 << 17))
    in_ram = longer.outcome(with_changes(scenario.config, {"activations": "auto"}))
    assert in_ram.plan.placement.activations == "host"
    assert in_ram.activations_fit
    moved = longer.outcome(with_changes(scenario.config, {"activations": "auto", "memory.host": "24GiB"}))
    assert moved.plan.placement.activations == "nvme"
    assert moved.activations_fit
    written = [each.prediction.moved.written_bytes / 1e9 for each in (in_ram, moved)]
    assert f"; {written[0]:,.2f} TB written per 1,000 steps" in report(longer, in_ram, [])
    assert f"; {written[1] + moved.work.moved_bytes / 1e9:,.2f} TB written per 1,000 steps" in report(longer, moved, [])
