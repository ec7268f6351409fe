"""commit_every: auto is resolved with the placement, once, and the plan says to what and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from infinity.config import load_config
from infinity.errors import ConfigError, PlanError
from infinity.io.directory import SWAP_NAME
from infinity.plan import disk
from infinity.plan.commit_frequency import (
    COMMITS_SHARE,
    EVERY_MAX,
    CommitFrequency,
    affordable_every,
    frequency_of,
    rarest,
)
from infinity.plan.plan import Plan
from infinity.plan.planner import make_plan
from infinity.state.discover import discover
from infinity.state.offload_arguments import OffloadArguments

NVME: dict[str, Any] = {"weights": "nvme", "optimizer": "nvme"}
HOST: dict[str, Any] = {"weights": "host", "optimizer": "host"}
STATES = 4 * 1024 * 1024 * 12  # bytes of the weights and the optimizer's states below


def plan(*, resumes: bool = False, trained: bool = True, **config: Any) -> Plan:
    with torch.device("meta"):
        blocks = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(4)).bfloat16()
    blocks.requires_grad_(trained)
    given: dict[str, Any] = {
        "nvme": {"paths": ["/tmp/never-made"]},
        "overlap": "off",
        "memory": {"device": "16MiB", "host": "512MiB"},
    }
    cpu = torch.device("cpu")
    return make_plan(
        discover(blocks).units, OffloadArguments(load_config(given | config), cpu, resumes=resumes), can_recompute=False
    )


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says how many bytes the disks have room for."""

    def has(nbytes: int) -> None:
        monkeypatch.setattr("infinity.plan.disk.room_bytes", lambda paths: nbytes)

    has(1 << 40)
    return has


def said(made: Plan) -> str:
    """Return the plan's line about commits."""
    (line,) = (line for line in made.describe().splitlines() if line.startswith("  commits  "))
    return line.removeprefix("  commits       ")


def test_states_on_nvme_are_committed_every_step(room: Any) -> None:
    made = plan(**NVME)
    assert made.placement.commit_every == 1
    assert said(made).startswith("every step (all states are on NVMe), 1 kept, each state in 2 copies")
    assert made.layout.swap.nbytes == 2 * STATES


def test_auto_is_the_default_and_a_number_is_taken_as_it_is(room: Any) -> None:
    assert plan(**NVME).placement == plan(**NVME, commit_every="auto").placement
    room(0)
    assert plan(**NVME, commit_every=3).placement.commits == CommitFrequency(3)
    assert (
        said(plan(**NVME, commit_every=0)) == "none (commit_every: 0): a run that is killed must start "
        "again from a saved model"
    )


def test_without_a_disk_there_are_no_commits(room: Any) -> None:
    made = plan(nvme={"paths": []})
    assert made.placement.commit_every == 0
    assert said(made).startswith("none (no nvme.paths):")


def test_where_nothing_is_trained_there_are_no_commits(room: Any) -> None:
    made = plan(**NVME, trained=False)
    assert said(made).startswith("none (nothing is trained):")


@pytest.mark.parametrize("keep", [1, 3])
def test_commits_need_room_for_a_copy_more_than_are_kept(keep: int, room: Any) -> None:
    manifests = plan(**NVME, keep=keep).layout.manifest_bytes
    assert manifests > 0
    needed = (keep + 1) * STATES + manifests
    room(needed)
    assert plan(**NVME, keep=keep).placement.commit_every == 1
    room(needed - (3 << 20))
    made = plan(**NVME, keep=keep)
    assert made.placement.commit_every == 0
    copies = "a second copy needs" if keep == 1 else "4 copies need"
    assert said(made).startswith(f"none ({copies} 3.00 MiB more on /tmp/never-made): a run that is killed")
    assert made.layout.swap.nbytes == STATES, "one copy of each state"


def test_states_in_ram_are_committed_as_often_as_the_io_allows(room: Any) -> None:
    made = plan(weights="host", optimizer="nvme")
    # 2 of 20 bytes per parameter: 5 % of two steps.
    assert (made.forecast.commit_bytes * 10, made.placement.commit_every) == (20 * 4 * 1024 * 1024, 2)
    assert said(made).startswith(
        "every 2 steps or more often, as long as commits take at most 5 % of the time (a "
        "commit writes 8.00 MiB of states "
        "in RAM: 5.0 % of the I/O), 1 kept"
    )


def test_where_a_step_moves_nothing_only_measured_times_tell(room: Any) -> None:
    made = plan(**HOST)
    assert made.placement.commits == CommitFrequency(
        EVERY_MAX, "a commit writes 48.00 MiB of states in RAM", at_most=True
    )
    assert made.forecast.written_bytes == STATES // EVERY_MAX


def test_a_resumed_run_commits_although_its_own_store_fills_the_disk(room: Any) -> None:
    room(0)
    assert plan(**NVME, resumes=True).placement.commit_every == 1
    assert plan(weights="host", optimizer="nvme", resumes=True).placement.commit_every == 2
    assert plan(**NVME, trained=False, resumes=True).placement.commit_every == 1
    with pytest.raises(ConfigError, match="nothing to resume without nvme.paths"):
        plan(nvme={"paths": []}, resumes=True)


def test_auto_fits_wherever_a_plan_without_commits_does(room: Any) -> None:
    def least(**config: Any) -> int:
        low, high = 0, 1 << 30
        while low < high:
            middle = (low + high) // 2
            try:
                plan(**NVME, memory={"device": "16MiB", "host": middle}, **config)
                high = middle
            except (PlanError, ConfigError):
                low = middle + 1
        return low

    assert least() == least(commit_every=0) < least(commit_every=1)
    tight = {"device": "16MiB", "host": least()}
    made = plan(**NVME, memory=tight)
    assert said(made).startswith("none (memory.host has no room for the checksums of second copies):")
    with pytest.raises(PlanError):
        plan(**NVME, memory=tight, resumes=True)


@given(st.integers(0, 1 << 50), st.integers(0, 1 << 50))
def test_the_number_of_steps_is_the_smallest_that_keeps_within_the_share(commit: int, step: int) -> None:
    every = affordable_every(commit, step)
    assert 1 <= every <= EVERY_MAX
    assert every == EVERY_MAX or commit <= COMMITS_SHARE * every * step
    assert every == 1 or commit > COMMITS_SHARE * (every - 1) * step


def test_a_small_rest_in_ram_is_written_every_step() -> None:
    assert str(frequency_of(5, 100)) == "every step (a commit writes 5 B of states in RAM: 5.0 % of the I/O)"
    assert frequency_of(6, 100).every == 2


def test_a_tenth_of_the_disk_stays_free_and_what_a_killed_run_left_counts_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000 << 20})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    one, two = tmp_path / "one", tmp_path / "two"
    assert disk.room_bytes([one]) == disk.room_bytes([one, two]) == 900 << 20
    one.mkdir()
    (one / SWAP_NAME).write_bytes(bytes(100 << 20))
    assert disk.room_bytes([one]) == pytest.approx(990 << 20, rel=1e-3)
    (one / "generation-000000000001.infinity").write_text("")
    assert disk.room_bytes([one]) == 900 << 20
    assert disk.room_bytes([]) == 0


def test_ranks_commit_as_rarely_as_any_of_them_must() -> None:
    assert rarest(
        [CommitFrequency(1, "a"), CommitFrequency(4, "b", at_most=True), CommitFrequency(2, "c")]
    ) == CommitFrequency(4, "b", at_most=True)
    assert rarest(
        [CommitFrequency(3, "a"), CommitFrequency(0, "no room"), CommitFrequency(0, "no path")]
    ) == CommitFrequency(0, "no room")
    assert rarest([CommitFrequency(1, "a"), CommitFrequency(1, "b")]) == CommitFrequency(1, "a")
