"""The figures of a run's report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

import infinity
from infinity.cli.history import EvaluationLoss
from infinity.cli.progress import StepFacts
from infinity.cli.run_report import make_report
from infinity.runtime.statistics import Statistics

FACTS = [
    StepFacts(step=1, loss=1.0, learning_rate=1e-3, grad_norm=1.0, seconds=2.0, tokens=8, read_bytes=0, written_bytes=0)
]


@pytest.fixture
def counted(offload: Any) -> Statistics:
    return infinity.statistics(offload(nn.Linear(8, 8).bfloat16(), "host"))


def test_compute_is_what_the_hosts_stalls_leave_of_a_step_on_the_cpu(counted: Statistics) -> None:
    after = replace(counted, stall_s={**counted.stall_s, "fetch": counted.stall_s["fetch"] + 0.5}, device_idle_s=9.0)
    report = make_report(FACTS, 0, counted, after)
    assert report.compute_s == pytest.approx(1.5)
    assert "GPU idle" not in report.text()


def test_a_gpu_that_starves_while_the_host_runs_ahead_lowers_the_efficiency(counted: Statistics) -> None:
    before = replace(counted, device="cuda")
    reports = []
    for idle_s in (0.0, 1.5):
        stalls = {**before.stall_s, "gradient": before.stall_s["gradient"] + 1.9}  # the host waits for the backward
        after = replace(before, device_idle_s=idle_s, stall_s=stalls)
        reports.append(make_report(FACTS, 0, before, after))
    busy, starving = reports
    assert (busy.compute_s, starving.compute_s) == pytest.approx((2.0, 0.5))
    assert (busy.efficiency, starving.efficiency) == pytest.approx((1.0, 0.25))
    assert "  GPU idle            1.500 s" in starving.text()


@pytest.mark.parametrize(
    ("losses", "first", "last", "count"),
    [
        ([9.0, 1.0, 2.0], 9.0, 1.5, 2),
        ([9.0], 9.0, 9.0, 1),
        ([9.0, *[1.0] * 5, *[2.0] * 10], 9.0, 2.0, 10),
        ([float("nan"), 9.0, 1.0, float("inf"), 3.0], 9.0, 2.0, 2),
    ],
)
def test_the_last_loss_is_a_mean_without_the_first_and_without_what_is_not_finite(
    losses: list[float], first: float, last: float, count: int, counted: Statistics
) -> None:
    report = make_report([replace(FACTS[0], loss=loss) for loss in losses], 0, counted, counted)
    assert (report.first_loss, report.last_loss, report.last_steps) == (first, last, count)
    assert (f"(mean of the last {count})" in report.text()) == (count > 1)


def test_the_report_of_a_resumed_run_has_losses_of_the_whole_run_and_times_of_the_steps_after_the_resume(
    counted: Statistics,
) -> None:
    facts = [replace(FACTS[0], step=step, loss=10.0 - step, seconds=float(step)) for step in range(1, 6)]
    facts[0] = replace(facts[0], grad_norm=float("nan"))  # skipped
    before = replace(counted, read_bytes=100, written_bytes=50)
    after = replace(counted, read_bytes=120, written_bytes=60)
    report = make_report(facts, 2, before, after)
    assert (report.steps, report.first_step, report.first_measured_step, report.skipped_steps) == (5, 3, 4, 1)
    assert (report.first_loss, report.step_s, report.read_bytes, report.written_bytes) == (9.0, 4.5, 20, 10)
    rows = {line[:22].strip(): line[22:] for line in report.text().splitlines()}
    assert rows["steps"] == "1–5 (1 skipped), loss 9.0000 → 6.5000 (mean of the last 4); after the resume: 3–5"
    assert rows["time per step"].endswith("this and the lines below are of steps 4–5, after the warm-up")
    assert "; after the resume: none after 5\n" in make_report(facts, 5, before, after).text()


def test_one_evaluation_is_one_number(counted: Statistics) -> None:
    def row(*evaluations: EvaluationLoss) -> str:
        text = make_report(FACTS, 0, counted, counted, evaluations=evaluations).text()
        return next(line[22:] for line in text.splitlines() if line.startswith("held-out loss"))

    assert row(EvaluationLoss(5, 2.0)) == "2.0000 after step 5"
    assert row(EvaluationLoss(2, 3.0), EvaluationLoss(5, 2.0)).startswith("3.0000 after step 2 → 2.0000 after step 5;")
