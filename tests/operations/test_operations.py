"""Unchanged code gives the same log each time, and another order of operations another one."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from infinity.plan.policy import to_prefetch, victims
from infinity.units import fetcher
from tests import sampling
from tests.operations.__main__ import compare
from tests.operations.scenarios import scenarios

SCENARIOS = scenarios()
SPLIT = "deep, weights in the store"
FEW = [*(name for name in SCENARIOS if name[:2] in ("01", "02")), SPLIT, "two ranks, store"]
NAMES = FEW if sampling.SHARE < 1 else list(SCENARIOS)

LOCAL = [name for name in NAMES if not name.startswith("two ranks")]


def _nearest_first(*given: Any) -> list[int]:
    return list(victims(*given))[::-1]


def _second_next(*given: Any) -> islice[tuple[int, int]]:
    return islice(to_prefetch(*given), 1, None)


CHANGED = {"the nearest goes first": ("victims", _nearest_first), "second next": ("to_prefetch", _second_next)}


def test_there_are_40_scenarios() -> None:
    assert len(SCENARIOS) == 40


@pytest.mark.parametrize("name", NAMES)
def test_two_recordings_of_the_same_code_are_equal(name: str, tmp_path: Path) -> None:
    first, second = (SCENARIOS[name](tmp_path / folder) for folder in ("first", "second"))
    assert first == second
    assert len(first) > (50 if "resident='all'" not in first[0] else 10)  # the device moves nothing


@pytest.mark.parametrize("policy", CHANGED)
def test_a_third_of_the_logs_are_others_where_the_policy_is(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {name: SCENARIOS[name](tmp_path / name) for name in LOCAL}
    monkeypatch.setattr(fetcher, *CHANGED[policy])
    differ = [name for name in LOCAL if SCENARIOS[name](tmp_path / name / "again") != before[name]]
    assert 3 * len(differ) >= len(LOCAL)


def test_recordings_that_differ_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, text in (("before", "read\nland\n"), ("after", "land\nread\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "one.log").write_text(text)
        (tmp_path / folder / "same.log").write_text("read\n")
    assert compare(tmp_path / "before", tmp_path / "after") == 1
    said = capsys.readouterr().out
    assert "one.log differs" in said
    assert "1 of 2 scenarios have the same log" in said
