"""Processors, and a torch that cannot be imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from infinity.base import accelerator
from infinity.cli.default_dtype import default_dtype
from infinity.cli.doctor.probes import ProbeFinding
from infinity.cli.doctor.with_torch import processor, with_torch
from infinity.config import SwapConfig
from tests.io.test_disks import write

CONFIG = SwapConfig.model_validate({"memory": {"host": "1GiB"}})


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
    found = processor(tmp_path)
    assert found.state == state
    assert found.finding.startswith("Some CPU; this processor has ")
    assert f"so --dtype is {dtype} by default" in found.finding
    assert default_dtype("cpu", tmp_path).name == dtype


def test_where_a_gpu_computes_the_processor_has_no_default_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "current_device", lambda: torch.device("cuda"))
    write(tmp_path, {"proc/cpuinfo": "model name\t: Some CPU\nflags\t: avx2"})
    assert processor(tmp_path) == ProbeFinding("ok", "Some CPU")


def test_a_torch_that_cannot_be_imported_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = with_torch(CONFIG).probes[0].look()
    assert isinstance(found, ProbeFinding)
    assert found.state == "missing"
    assert "--force-reinstall 'torch>=2.6'" in found.mend


def test_this_machine_has_an_answer_to_every_probe() -> None:
    for probe in with_torch(CONFIG).probes:
        assert all(row.finding for row in probe.rows(probe.look())), probe.what
