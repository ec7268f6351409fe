"""The simulation against steps that were measured on a quiet machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from simulation.calibration import WITHIN, predict

RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("2026-11-21-step-overlap-256-clipped", marks=pytest.mark.long),
        pytest.param(
            "2026-11-21-step-overlap-2048-clipped",
            marks=pytest.mark.long(kept="only here the simulation is compared with measurements"),
        ),
    ],
)
def test_steps_that_were_measured_are_predicted(name: str) -> None:
    found = predict(json.loads((RESULTS / f"{name}.json").read_text()))
    assert set(found) == {"infinity-host", "infinity-nvme"}
    assert all(abs(each["ratio"] - 1) <= WITHIN for each in found.values())
