"""The simulation against steps that were measured on a quiet machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from simulation.calibration import WITHIN, predict

RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results"


def require_predicted(measured: dict[str, Any]) -> None:
    found = predict(measured)
    assert set(found) == {"infinity-host", "infinity-nvme"}
    assert all(abs(each["ratio"] - 1) <= WITHIN for each in found.values())


def read(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


def test_the_first_steps_that_were_measured_are_predicted() -> None:
    measured = read("2026-11-21-step-overlap-256-clipped")
    first = {name: [step for step in steps if step["round"] == 1] for name, steps in measured["steps"].items()}
    require_predicted(measured | {"steps": first})


@pytest.mark.long
@pytest.mark.parametrize("name", ["2026-11-21-step-overlap-256-clipped", "2026-11-21-step-overlap-2048-clipped"])
def test_steps_that_were_measured_are_predicted(name: str) -> None:
    require_predicted(read(name))
