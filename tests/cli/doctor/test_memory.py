"""RAM and its limits, swap, huge pages."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from infinity.cli.doctor.memory import huge_pages, ram, swap
from infinity.config import SwapConfig
from infinity.sizes import format_bytes
from tests.io.test_disks import write

THP = "sys/kernel/mm/transparent_hugepage/enabled"


def test_ram_says_what_can_be_taken(tmp_path: Path) -> None:
    assert ram(SwapConfig(), tmp_path).state == "ok"
    assert "control group" not in ram(SwapConfig(), tmp_path).finding


def test_a_control_group_limits_ram(tmp_path: Path) -> None:
    limit = {"sys/fs/cgroup/memory.max": str(64 << 20), "sys/fs/cgroup/memory.current": str(16 << 20)}
    write(tmp_path, limit)
    found = ram(SwapConfig(), tmp_path)
    assert (found.state, "48.00 MiB can be taken" in found.finding) == ("ok", True)
    assert found.finding.endswith("the control group allows 64.00 MiB")


def test_a_budget_that_is_not_there_is_missing(tmp_path: Path) -> None:
    total = psutil.virtual_memory().total
    config = SwapConfig.model_validate({"memory": {"host": total + 1}})
    found = ram(config, tmp_path)
    assert found.state == "missing"
    assert f"memory.host is {format_bytes(total + 1)}" in found.finding


@pytest.mark.parametrize(("total", "said"), [(0, "none"), (2 << 30, "2.00 GiB, of which 1.00 GiB are used")])
def test_swap_is_told(total: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(total=total, used=total // 2))
    assert swap() == ("ok", said, "", "")


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
