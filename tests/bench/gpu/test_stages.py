"""The stages' own code, run where there is no GPU: over a fake one whose copies are done at once."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import gpu_check
import pytest
import torch
from gpu import seam_order, stage_copies, stage_pinning
from gpu.cuda import Sleeper
from gpu.record import Options, Record
from gpu.runner import BENCH_DIR
from gpu.stages import STAGES

from tests.bench.gpu import fake_cuda


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda.install(monkeypatch)
    for module in (seam_order, stage_copies, stage_pinning):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(seam_order, "current_device", lambda: torch.device("cpu"))


def lines_of(module: Any, tmp_path: Path, **settings: Any) -> dict[str, dict[str, Any]]:
    channel = io.StringIO()
    module.stage(Record(channel, 300.0), Options(300.0, tmp_path, tmp_path, {}, settings))
    return {line["name"]: line for line in map(json.loads, channel.getvalue().splitlines()) if "name" in line}


def test_the_stages_fit_ten_minutes_and_exist() -> None:
    # Stage 0 is to take 90 seconds and may take more: then the budget shortens the later ones.
    assert gpu_check.build_parser().parse_args([]).budget <= 570
    assert 90 + sum(stage.limit_s for stage in STAGES[1:]) <= 570
    assert [stage.number for stage in STAGES] == list(range(7))
    for stage in STAGES:
        assert (BENCH_DIR / f"{stage.module.replace('.', '/')}.py").exists()


@pytest.mark.usefixtures("fake_gpu")
def test_pinning_tells_a_refusal_from_a_registration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_pinning, "available_host_bytes", lambda: 14 << 30)
    lines = lines_of(stage_pinning, tmp_path, sizes_gib=[1, 1 << 20])
    after = lines["a kernel after a refused registration"]
    assert after["verdict"] == "ok"
    assert after["value"]["first"] == ""
    assert "712" in after["value"]["refused"]
    assert lines["register 1 GiB"]["value"]["gb_per_s"] > 0
    assert lines[f"register {1 << 20} GiB"]["verdict"] == "skipped"


@pytest.mark.usefixtures("fake_gpu")
def test_a_kernel_that_a_refusal_poisons_fails_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(*_: Any) -> None:
        raise RuntimeError("CUDA error: part or all of the requested memory range is already mapped")

    monkeypatch.setattr(torch.cuda, "synchronize", poisoned)
    line = lines_of(stage_pinning, tmp_path, sizes_gib=[])["a kernel after a refused registration"]
    assert line["verdict"] == "failed"
    assert "already mapped" in line["error"]


@pytest.mark.usefixtures("fake_gpu")
def test_copies_are_measured_in_every_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_copies, "_ADAM_NUMEL", 1 << 16)
    monkeypatch.setattr(stage_copies, "_ADAM_S", 0.01)
    monkeypatch.setattr(stage_copies, "_COPIES_PER_RUN", 2)
    lines = lines_of(stage_copies, tmp_path, large=64 << 10)
    assert [name for name, line in lines.items() if line["verdict"] == "failed"] == []
    assert set(lines["h2d by size"]["value"]) == {"8 KiB", "64 KiB"}
    assert lines["beside Adam on all cores"]["value"]["adam_gb_per_s"].keys() == {"alone", "beside copies"}


@pytest.mark.usefixtures("fake_gpu")
def test_the_canary_dies_where_copies_are_never_late() -> None:
    sleeper = Sleeper()
    assert seam_order.missing_wait_shows(sleeper) == {"unwaited is stale": False, "waited is right": True}
    assert not seam_order.upload_overlaps(sleeper, queued_before=False)["overlapped"]


@pytest.mark.usefixtures("fake_gpu")
def test_right_values_pass_and_wrong_ones_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = Sleeper()
    for side_stream in (False, True):
        assert seam_order.evict_under_sleep(sleeper, side_stream=side_stream, rounds=2) == {"rounds": 2, "wrong": 0}
    assert seam_order.random_schedules(sleeper, 20) == {"schedules": 20, "wrong seeds": []}
    upload = seam_order.CudaDevice.upload

    def stale(seam: Any, source: torch.Tensor, done: Any) -> Any:
        slot = upload(seam, source, done)
        slot.tensor[-1] ^= 1
        return slot

    monkeypatch.setattr(seam_order.CudaDevice, "upload", stale)
    assert seam_order.evict_under_sleep(sleeper, side_stream=False, rounds=2)["wrong"] == 2 * 8
    assert seam_order.random_schedules(sleeper, 20)["wrong seeds"]


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize("copy", ["upload", "download"])
def test_a_copy_that_is_left_out_late_in_the_schedules_shows(copy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier schedule left behind must not be taken for what this one copied."""
    whole, slots = getattr(seam_order.CudaDevice, copy), {}
    calls = []

    def left_out(seam: Any, source: torch.Tensor, other: Any) -> Any:
        calls.append(copy)
        if len(calls) < 100:
            slots[source.numel()] = done = whole(seam, source, other)
            return done
        return slots[source.numel()] if copy == "upload" else None

    monkeypatch.setattr(seam_order.CudaDevice, copy, left_out)
    wrong = seam_order.random_schedules(Sleeper(), 60)["wrong seeds"]
    assert len(calls) > 100
    assert wrong
