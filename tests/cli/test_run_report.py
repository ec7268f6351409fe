"""The figures of a run's report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

import infinity
from infinity.cli.progress import StepFacts
from infinity.cli.run_report import make_report
from infinity.runtime.statistics import Statistics

FACTS = [
    StepFacts(step=2, loss=1.0, learning_rate=1e-3, grad_norm=1.0, seconds=2.0, tokens=8, read_bytes=0, written_bytes=0)
]


@pytest.fixture
def counted(offload: Any) -> Statistics:
    return infinity.statistics(offload(nn.Linear(8, 8).bfloat16(), "host"))


def test_compute_is_what_the_hosts_stalls_leave_of_a_step_on_the_cpu(counted: Statistics) -> None:
    after = replace(counted, stall_s={**counted.stall_s, "fetch": counted.stall_s["fetch"] + 0.5}, device_idle_s=9.0)
    report = make_report(FACTS, counted, after, 0, [1.0], warm_up=False)
    assert report.compute_s == pytest.approx(1.5)
    assert "GPU idle" not in report.text()


def test_a_gpu_that_starves_while_the_host_runs_ahead_lowers_the_efficiency(counted: Statistics) -> None:
    before = replace(counted, device="cuda")
    reports = []
    for idle_s in (0.0, 1.5):
        stalls = {**before.stall_s, "gradient": before.stall_s["gradient"] + 1.9}  # the host waits for the backward
        after = replace(before, device_idle_s=idle_s, stall_s=stalls)
        reports.append(make_report(FACTS, before, after, 0, [1.0], warm_up=False))
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
    report = make_report(FACTS, counted, counted, 0, losses, warm_up=False)
    assert (report.first_loss, report.last_loss, report.last_steps) == (first, last, count)
    assert (f"(mean of the last {count})" in report.text()) == (count > 1)
