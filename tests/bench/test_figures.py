"""The figures that the bench scripts make of what they measure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from large_models.cgroup import find_controller
from large_models.training import limit_in_proportion, usable_bytes
from overhead import summarise
from peers.bounds import bounds, hidden_update_share, host_budget, median_ratio


def step(number: int, seconds: float, *, update: float = 0.0, fetch: float = 0.0, io: float | None = None) -> Any:
    counters = {"update_s": update, "fetch_wait_s": fetch, "read_bytes": 10, "written_bytes": 10}
    found: dict[str, Any] = {"round": number, "seconds": seconds, "counters": counters}
    return found | ({} if io is None else {"replay": {"seconds": io, "read_bytes": 10, "written_bytes": 10}})


def test_ratios_are_taken_within_rounds_only() -> None:
    mine, theirs = [step(1, 1.0), step(2, 4.0), step(3, 9.0)], [step(1, 2.0), step(2, 2.0)]
    assert median_ratio(mine, theirs) == 1.25
    assert median_ratio(mine, [step(7, 1.0)]) is None


def test_the_bound_of_a_round_is_the_larger_of_processor_and_disk() -> None:
    found = bounds([step(1, 3.0, io=2.0), step(2, 3.0, io=0.5)], [step(1, 1.0), step(2, 1.5)])
    assert found["of_bound"] == (3.0 / 2.0 + 3.0 / 1.5) / 2
    assert found["replayed_bytes_ratio"] == 1


def test_what_is_hidden_is_what_compute_did_not_wait_for() -> None:
    serial = [step(1, 3.0, update=2.0)]
    assert hidden_update_share([step(1, 2.0, update=0.4, fetch=0.1)], serial) == 0.75
    assert hidden_update_share(serial, serial) == 0
    assert hidden_update_share(serial, []) is None


def test_a_budget_like_anothers_memory_adds_what_is_left() -> None:
    assert host_budget(100, 70, 40) == 70
    with pytest.raises(ValueError, match="nothing can be cached"):
        host_budget(50, 70, 40)


def test_a_limit_in_proportion_leaves_as_much_for_each_parameter() -> None:
    limit = limit_in_proportion(6_000_000_000, 1, 4)
    assert usable_bytes(limit) == pytest.approx(usable_bytes(6_000_000_000) / 4, rel=1e-6)


def test_the_memory_controller_of_version_1_is_found_in_the_mounts(tmp_path: Path) -> None:
    mounts = f"30 25 0:26 / {tmp_path} rw,nosuid - cgroup cgroup rw,memory\n"
    found = find_controller(mounts, "5:memory:/mine\n4:cpu:/other\n")
    assert found.root == tmp_path
    assert found.own == tmp_path / "mine"
    assert found.limit == "memory.limit_in_bytes"


def test_the_cost_of_a_layer_is_what_rounds_take_longer_than_torchs() -> None:
    row = summarise({"torch": [1.0, 2.0, 3.0], "ram": [3.0, 3.0, 9.0]}, layers=2)["ram"]
    assert (row["median_s"], row["ratio"], row["per_layer_s"]) == (3.0, 3.0, 1.0)
    assert (row["p5_ratio"], row["p95_ratio"]) == (1.5, 3.0)
