"""The profile of the disks: kept per file system, read strictly, and never in the way."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.coordinator import registry
from infinity.io.disk_profile import load_profiles, profile_of, profile_path, save_profile
from infinity.io.engine import open_engine
from tests.io.test_store import measured
from tests.models import llama


def test_a_disk_is_known_in_all_its_directories_also_those_to_be_made(tmp_path: Path) -> None:
    assert profile_of(tmp_path) is None
    profile = measured(3e9, tmp_path)
    save_profile(tmp_path, profile)
    assert profile_of(tmp_path / "not" / "there" / "yet") == profile
    assert [path.name for path in profile_path().parent.iterdir()] == ["disks.json"]


@pytest.mark.parametrize(
    "content", ["", "not json", "[]", '{"version": 2, "disks": {}}', '{"version": 1, "disks": {"a": {}}}', "\xff\xfe"]
)
def test_a_profile_that_cannot_be_read_is_ignored_with_a_warning(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "disks.json"
    path.write_text(content, encoding="latin-1")
    with caplog.at_level(logging.WARNING, "infinity"):
        assert load_profiles(path) == {}
    assert "run infinity-bench to make a new one" in caplog.text
    save_profile(tmp_path, measured(1e9, tmp_path), path)
    assert len(load_profiles(path)) == 1


def test_what_the_config_omits_comes_from_the_profile(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_profile(
        tmp_path, measured(3e9, tmp_path).model_copy(update={"block_bytes": 512 << 10, "in_flight_bytes": 24 << 20})
    )
    with caplog.at_level(logging.INFO, "infinity"):
        open_engine(infinity.load_config({"nvme": {"paths": [str(tmp_path)]}}).nvme).close()
        assert "blocks of 512 KiB, 24576 KiB in flight" in caplog.text
        caplog.clear()
        open_engine(infinity.load_config({"nvme": {"paths": [str(tmp_path)], "block": "2MiB"}}).nvme).close()
        assert "blocks of 2048 KiB, 24576 KiB in flight" in caplog.text


def test_the_plan_predicts_the_seconds_of_a_step(offload: Any, tmp_path: Path) -> None:
    model, _ = llama()
    save_profile(tmp_path, measured(1e9, tmp_path))
    plan = registry.coordinator_of(offload(model.bfloat16())).resources.plan
    assert plan.forecast.io_s == pytest.approx(plan.forecast.step_bytes / 1e9)
    assert "s at the measured rate" in plan.describe()


def test_without_a_profile_the_plan_says_nothing_about_seconds(offload: Any) -> None:
    model, _ = llama()
    plan = registry.coordinator_of(offload(model)).resources.plan
    assert plan.forecast.io_s is None
    assert "measured rate" not in plan.describe()
