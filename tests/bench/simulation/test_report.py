"""The tables about a scenario."""

from __future__ import annotations

from typing import Any

import pytest
from simulation.report import compared, meets, tables

from tests.bench.simulation.machines import GPU

ROW: dict[str, Any] = {
    "machine": "gpu", "model": "8B", "moments": "fp32", "clipped": False, "policy": "as is", "seconds": 2.3,
    "bounds": {"disk": 2.0, "compute": 1.0}, "of_bound": 1.15, "lead": 2.0,
    "read_per_parameter": 10.0, "written_per_parameter": 10.0,
    "placed": {"weights_in_ram": 1.0, "states_in_ram": 0.0, "gradients_in_ram": 1.0},
}  # fmt: skip


@pytest.mark.parametrize(
    ("of_bound", "lead", "wanted"), [(1.10, 1.5, True), (1.11, 1.5, False), (1.20, 1.4, True), (1.21, 1.4, False)]
)
def test_a_bound_that_leads_leaves_less_room(of_bound: float, lead: float, wanted: bool) -> None:
    assert meets(ROW | {"of_bound": of_bound, "lead": lead}) is wanted


def test_a_table_says_that_it_is_simulated_and_where_each_rate_is_from() -> None:
    text = tables([ROW], {"gpu": GPU})
    assert text.startswith("**Simulated")
    assert "disk 2.00, compute 1.00 | 1.15 | **no** (1.10)" in text
    assert "| cores | 2 | as given |" in text


def test_clipped_rows_are_reported_only_and_refused_plans_say_why() -> None:
    refused = {
        "machine": "gpu",
        "model": "70B",
        "moments": "int8",
        "clipped": True,
        "policy": "as is",
        "refused": "why",
    }
    text = tables([ROW | {"clipped": True}, refused], {"gpu": GPU})
    assert "| reported |" in text
    assert "no plan: why" in text


def test_policies_are_compared_where_a_step_never_clips() -> None:
    other = ROW | {"policy": "other", "of_bound": 1.05, "seconds": 2.1}
    text = compared([ROW, other, ROW | {"clipped": True, "seconds": 9.0}], ["as is", "other", "third"])
    assert "| gpu 8B fp32 | 2.30 (1.15 of disk) | 2.10 (**1.05** of disk) |  |" in text
    assert "9.00" not in text
    assert compared([ROW], ["as is", "other"]) == ""


def test_another_number_of_tokens_is_named() -> None:
    assert "| 8B (1 × 2,048 tokens) fp32 |" in tables([ROW | {"batch": 1}], {"gpu": GPU})
