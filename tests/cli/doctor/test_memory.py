"""RAM and its limits, huge pages, the limit of locked memory."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import psutil
import pytest

from infinity.cli.doctor.memory import huge_pages, locked, ram
from infinity.config import SwapConfig
from infinity.sizes import format_bytes
from tests.io.test_disks import write

CONFIG = SwapConfig.model_validate({"memory": {"host": "1GiB"}})
GIB = 1 << 30
THP = "sys/kernel/mm/transparent_hugepage/enabled"


def test_ram_says_what_can_be_taken(tmp_path: Path) -> None:
    assert ram(SwapConfig(), tmp_path).state == "ok"
    assert "control group" not in ram(SwapConfig(), tmp_path).finding


def test_a_control_group_limits_ram(tmp_path: Path) -> None:
    limit = {"sys/fs/cgroup/memory.max": str(64 << 20), "sys/fs/cgroup/memory.current": str(16 << 20)}
    write(tmp_path, limit)
    found = ram(SwapConfig(), tmp_path)
    assert (found.state, "48.00 MiB is available" in found.finding) == ("ok", True)
    assert found.finding.endswith("the control group allows 64.00 MiB")


def test_a_budget_that_is_not_there_is_missing(tmp_path: Path) -> None:
    total = psutil.virtual_memory().total
    config = SwapConfig.model_validate({"memory": {"host": total + 1}})
    found = ram(config, tmp_path)
    assert found.state == "missing"
    assert f"memory.host is {format_bytes(total + 1)}" in found.finding


@pytest.mark.parametrize(
    ("setting", "state"),
    [
        ("[always] madvise never", "ok"),
        ("always [madvise] never", "ok"),
        ("always madvise [never]", "slower"),
        ("", "unknown"),
    ],
)
def test_huge_pages_are_wanted(setting: str, state: str, tmp_path: Path) -> None:
    write(tmp_path, {THP: setting})
    found = huge_pages(tmp_path)
    assert found.state == state
    assert found.mend == (f"echo madvise | sudo tee /{THP}" if state == "slower" else "")


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have the machine allow so much locked memory; None is no limit."""

    def set_to(*given: int | None) -> None:
        found = tuple(resource.RLIM_INFINITY if each is None else each for each in given)
        monkeypatch.setattr(resource, "getrlimit", lambda which: found)

    return set_to


@pytest.mark.parametrize(
    ("soft", "hard", "any_", "state", "mend"),
    [
        (None, None, False, "ok", ""),
        (8 << 20, 8 << 20, True, "ok", ""),
        (2 * GIB, 2 * GIB, False, "ok", ""),
        (8 << 20, None, False, "slower", "ulimit -l unlimited"),
        (8 << 20, 4 * GIB, False, "slower", f"ulimit -l {4 << 20}"),
        (8 << 20, 8 << 20, False, "slower", 'echo "$USER - memlock unlimited" | sudo tee /etc/security/limits.d/'),
    ],
)
def test_the_limit_of_locked_memory_is_compared_with_what_a_run_registers(
    soft: int | None, hard: int | None, any_: bool, state: str, mend: str, limits: Any, tmp_path: Path
) -> None:
    limits(soft, hard)
    write(tmp_path, {"proc/self/status": f"Name:\tpython\nCapEff:\t{1 << 14 if any_ else 0:016x}"})
    found = locked(CONFIG, tmp_path)
    assert found.state == state
    assert found.mend.startswith(mend)
    assert bool(found.mend) == bool(mend)
    assert "a run registers up to 1.00 GiB" in found.finding


def test_in_docker_the_limit_is_one_of_its_options(limits: Any, tmp_path: Path) -> None:
    limits(8 << 20, 8 << 20)
    write(tmp_path, {".dockerenv": ""})
    assert locked(CONFIG, tmp_path).mend == "docker run --ulimit memlock=-1 …"


def test_without_a_budget_the_planners_counts(limits: Any, tmp_path: Path) -> None:
    limits(None, None)
    write(tmp_path, {"sys/fs/cgroup/memory.max": str(10 << 20), "sys/fs/cgroup/memory.current": "0"})
    assert "a run registers up to 8.00 MiB" in locked(SwapConfig(), tmp_path).finding


def test_capabilities_that_are_no_number_allow_nothing(limits: Any, tmp_path: Path) -> None:
    limits(8 << 20, 8 << 20)
    write(tmp_path, {"proc/self/status": "CapEff:\tjunk"})
    assert locked(CONFIG, tmp_path).state == "slower"
