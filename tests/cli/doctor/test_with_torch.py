"""Limits of locked memory, threads beside quotas, processors, and a torch that cannot be imported."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.base import accelerator
from infinity.cli import machine_facts
from infinity.cli.default_dtype import default_dtype
from infinity.cli.doctor.rows import Found
from infinity.cli.doctor.with_torch import WithTorch, with_torch
from infinity.config import SwapConfig
from tests.io.test_disks import write

CONFIG = SwapConfig.model_validate({"memory": {"host": "1GiB"}})
GIB = 1 << 30


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have the machine allow so much locked memory."""
    there = machine_facts.describe_machine()

    def set_to(soft: int | None, hard: int | None, *, can_lock_any: bool = False) -> None:
        machine = dataclasses.replace(
            there, memlock_soft_bytes=soft, memlock_hard_bytes=hard, can_lock_any=can_lock_any
        )
        monkeypatch.setattr(machine_facts, "describe_machine", lambda root: machine)

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
    limits(soft, hard, can_lock_any=any_)
    found = WithTorch(CONFIG, tmp_path).locked()
    assert found.state == state
    assert found.mend.startswith(mend)
    assert bool(found.mend) == bool(mend)
    assert "a run registers up to 1.00 GiB" in found.finding


def test_in_docker_the_limit_is_one_of_its_options(limits: Any, tmp_path: Path) -> None:
    limits(8 << 20, 8 << 20)
    write(tmp_path, {".dockerenv": ""})
    assert WithTorch(CONFIG, tmp_path).locked().mend == "docker run --ulimit memlock=-1 …"


def test_without_a_budget_the_planners_counts(limits: Any, tmp_path: Path) -> None:
    limits(None, None)
    write(tmp_path, {"sys/fs/cgroup/memory.max": str(10 << 20), "sys/fs/cgroup/memory.current": "0"})
    assert "a run registers up to 8.00 MiB" in WithTorch(SwapConfig(), tmp_path).locked().finding


@pytest.mark.parametrize(
    ("quota", "state", "mend"),
    [
        ("max 100000", "ok", ""),
        ("800000 100000", "ok", ""),
        ("250000 100000", "slower", "export OMP_NUM_THREADS=2"),
        ("50000 100000", "slower", "export OMP_NUM_THREADS=1"),
    ],
)
def test_more_threads_than_the_quota_wait(quota: str, state: str, mend: str, tmp_path: Path) -> None:
    write(tmp_path, {"sys/fs/cgroup/cpu.max": quota, "proc/self/cgroup": "0::/"})
    config = SwapConfig.model_validate({"update": {"threads": 8}})
    found = WithTorch(config, tmp_path).threads()
    assert (found.state, found.mend) == (state, mend)
    assert found.finding.startswith("8 for the update")


@pytest.mark.parametrize(
    ("line", "state", "dtype"),
    [
        ("flags\t: avx2 avx512f", "slower", "fp32"),
        ("flags\t: avx2 avx512_fp16", "ok", "fp16"),
        ("flags\t: amx_bf16", "ok", "bf16"),
        ("Features\t: asimd", "slower", "fp32"),
    ],
)
def test_the_processor_and_the_default_dtype_by_its_flags_are_named(
    line: str, state: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    write(tmp_path, {"proc/cpuinfo": f"model name\t: Some CPU\n{line}"})
    found = WithTorch(CONFIG, tmp_path).processor()
    assert found.state == state
    assert found.finding.startswith("Some CPU; this processor has ")
    assert f"so --dtype is {dtype} by default" in found.finding
    assert default_dtype("cpu", tmp_path).name == dtype


def test_where_a_gpu_computes_the_processor_has_no_default_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "current_device", lambda: torch.device("cuda"))
    write(tmp_path, {"proc/cpuinfo": "model name\t: Some CPU\nflags\t: avx2"})
    assert WithTorch(CONFIG, tmp_path).processor() == Found("ok", "Some CPU")


def test_a_torch_that_cannot_be_imported_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = WithTorch(CONFIG).torch()
    assert found.state == "missing"
    assert "--force-reinstall 'torch>=2.6'" in found.mend


def test_this_machine_has_an_answer_to_every_probe() -> None:
    for probe in with_torch(CONFIG).probes:
        assert all(row.finding for row in probe.rows(probe.look())), probe.what
