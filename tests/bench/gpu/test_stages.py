"""The stages' own code, run where there is no GPU: over a fake one whose copies are done at once."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_check
import pytest
import torch
from gpu import cuda, seam, seam_chaining, seam_order, seam_training, stage_copies, stage_pinning, stage_seam
from gpu.cuda import Sleeper
from gpu.record import Options, Record
from gpu.runner import BENCH_DIR
from gpu.stages import STAGES

from infinity.base.accelerator import TorchAccelerator
from tests.bench.gpu import fake_cuda
from tests.bench.gpu.fake_cuda import Fake
from tests.sim.accelerator import SimAccelerator
from tests.sim.fixtures import Simulate, simulate
from tests.sim.queues import EAGER

__all__ = ["simulate"]


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = fake_cuda.install(monkeypatch)
    for module in (cuda, seam_chaining, seam_order, stage_copies, stage_pinning):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(cuda, "current_device", lambda: torch.device("cpu"))
    return fake


def lines_of(module: Any, tmp_path: Path, **settings: Any) -> dict[str, dict[str, Any]]:
    return lines_of_part(module.stage, tmp_path, **settings)


def lines_of_part(
    part: Callable[[Record, Options], None], tmp_path: Path, **settings: Any
) -> dict[str, dict[str, Any]]:
    channel = io.StringIO()
    part(Record(channel, 300.0), Options(300.0, tmp_path, tmp_path, {}, settings))
    return {line["name"]: line for line in map(json.loads, channel.getvalue().splitlines()) if "name" in line}


def test_the_stages_fit_ten_minutes_and_exist() -> None:
    # Stage 0 is to take 90 seconds and may take more: then the budget shortens the later ones.
    assert gpu_check.build_parser().parse_args([]).budget <= 570
    # The stage of two GPUs is over at once on a machine with one.
    assert 90 + sum(stage.limit_s for stage in STAGES[1:-1] if stage.name != "ranks") + 100 <= 570
    assert sorted(stage.number for stage in STAGES) == list(range(10))
    assert STAGES[-1].name == "rows"
    for stage in STAGES:
        assert (BENCH_DIR / f"{stage.module.replace('.', '/')}.py").exists()


@pytest.mark.usefixtures("fake_gpu")
def test_pinning_tells_a_refusal_from_a_registration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_pinning, "available_host_bytes", lambda: 14 << 30)
    monkeypatch.setattr(stage_pinning, "GIB", 1 << 20)  # what is pinned becomes resident
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
def test_the_canaries_die_where_copies_and_kernels_are_never_late() -> None:
    sleeper = Sleeper()
    assert seam_order.missing_wait_shows(sleeper) == {"unwaited is stale": False, "waited is right": True}
    assert seam_order.missing_last_use_shows(sleeper) == {
        "with the last use both are right": True,
        "without it the kernel reads what came later": False,
    }
    assert not seam_order.upload_overlaps(sleeper, queued_before=False)["overlapped"]
    assert seam_order.upload_overlaps(sleeper, queued_before=True)["right"]


@pytest.mark.usefixtures("fake_gpu")
def test_right_values_pass_and_wrong_ones_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = Sleeper()
    for side_stream in (False, True):
        assert seam_order.evict_under_sleep(sleeper, side_stream=side_stream, rounds=2) == {"rounds": 2, "wrong": 0}
    assert seam_order.random_schedules(sleeper, 20) == {"schedules": 20, "wrong seeds": []}
    upload = seam.Seam.upload

    def stale(made: seam.Seam, home: Any) -> Any:
        slot = upload(made, home)
        slot.tensor[-1] ^= 1
        return slot

    monkeypatch.setattr(seam.Seam, "upload", stale)
    assert seam_order.evict_under_sleep(sleeper, side_stream=False, rounds=2)["wrong"] == 2 * 8
    assert seam_order.random_schedules(sleeper, 20)["wrong seeds"]


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize("left_out", ["up", "down"])
def test_a_copy_that_is_left_out_late_in_the_schedules_shows(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data that an earlier schedule left behind must not be taken for data that this one copied."""
    copy, calls = TorchAccelerator.copy, []

    def some(accelerator: Any, into: torch.Tensor, source: torch.Tensor, *, on: Any, after: Any = ()) -> Any:
        down = on is made[0].down
        if down == (left_out == "down"):
            calls.append(into)
            if len(calls) >= 100:
                return accelerator.record(on)
        return copy(accelerator, into, source, on=on, after=after)

    made: list[seam.Seam] = []
    opened = seam.Seam.__init__

    def noted(one: seam.Seam, **options: Any) -> None:
        made.append(one)
        opened(one, **options)

    monkeypatch.setattr(seam.Seam, "__init__", noted)
    monkeypatch.setattr(TorchAccelerator, "copy", some)
    wrong = seam_order.random_schedules(Sleeper(), 60)["wrong seeds"]
    assert len(calls) > 100
    assert wrong


def test_native_threads_call_the_runtime_that_was_found(fake_gpu: Fake, tmp_path: Path) -> None:
    assert all(int(address, 16) for address in seam_chaining.runtime().values())
    sleeper, nbytes, piece = Sleeper(), 1 << 20, 64 << 10
    found = seam_chaining.stored_weights(tmp_path, sleeper, nbytes=nbytes, piece=piece)
    assert found == {"arrived": True, "behind the last use": True, "pieces": 2 * nbytes // piece, "bytes": 2 * nbytes}
    assert fake_gpu.library.calls["MemcpyAsync"] == found["pieces"]
    assert fake_gpu.library.calls["EventRecord"] == found["pieces"] + 2
    assert fake_gpu.library.calls["StreamWaitEvent"] == 1  # the last use of the slot
    assert fake_gpu.library.calls["SetDevice"] > 0
    assert seam_chaining.failed_read(tmp_path) == {"failed as": "SwapCorruptionError", "the next is right": True}


@pytest.mark.usefixtures("fake_gpu")
def test_gradients_land_in_the_cpus_bits() -> None:
    found = seam_chaining.landings(Sleeper(), numel=1 << 16)
    assert len(found) == 5
    assert all(found.values())


# -- training, on a simulated device -----------------------------------------------------------------------------------


@pytest.fixture
def sim(simulate: Simulate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimAccelerator:
    monkeypatch.setenv("GPU_WORK", str(tmp_path))
    monkeypatch.setattr(seam_training, "DEVICE", "cpu")
    for name in ("synchronize", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    return simulate(EAGER)


@pytest.mark.usefixtures("sim")
@pytest.mark.long(kept="only here stage 3 is shown to find a wrong bit")
def test_updates_during_backward_end_in_the_same_bits_and_a_wrong_bit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seam_training, "BLOCKS", 3)
    exact = functools.cache(seam_training._exact_weights)
    monkeypatch.setattr(seam_training, "_exact_weights", exact)
    found = seam_training.overlap_modes(steps=3)
    assert found["other bits"] == []
    assert found["early updates"] > 0

    def wrong(tier: str, *arguments: Any, **options: Any) -> Any:
        weights, early = exact(tier, *arguments, **options)
        if arguments[1] == "auto":
            weights = {name: weight.clone() for name, weight in weights.items()}
            next(iter(weights.values()))[0, 0] += 1
        return weights, early

    monkeypatch.setattr(seam_training, "_exact_weights", wrong)
    assert len(seam_training.overlap_modes(steps=3)["other bits"]) == 6


@pytest.mark.long
@pytest.mark.usefixtures("sim")
def test_what_stage_3_expects_of_training_holds_on_a_simulated_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = functools.partial(seam_training.events_in_evaluation, 12)
    monkeypatch.setattr(seam_training, "BLOCKS", 6)
    monkeypatch.setattr(
        seam_training, "overlap_modes", lambda: {"other bits": [], "early updates": 1}
    )  # the test above
    monkeypatch.setattr(seam_training, "events_in_evaluation", lambda: {"after 10": few()["after 2"]} | renamed(few()))
    monkeypatch.setattr(seam_training, "reserved_memory", lambda: {"reserved_mib": 1, "memory_device_mib": 2})
    lines = lines_of_part(lambda record, options: stage_seam._training(record, options), tmp_path)
    assert {name: line["verdict"] for name, line in lines.items()} == dict.fromkeys(lines, "ok")
    assert len(lines) == 7
    moved = lines["bytes per parameter in a step"]["value"]
    assert 0 < moved["of it weights"] < moved["read"]
    assert lines["what a step keeps the host for"]["value"]["units"] == seam_training.BLOCKS


def renamed(found: dict[str, int]) -> dict[str, int]:
    return {"after 60": found["after 12"]}


def test_what_stage_3_expects_of_native_threads_holds_where_copies_are_done_at_once(
    fake_gpu: Fake, tmp_path: Path
) -> None:
    lines = lines_of_part(lambda record, options: stage_seam._chaining(record, options, Sleeper()), tmp_path)
    assert {name: line["verdict"] for name, line in lines.items()} == dict.fromkeys(lines, "ok")
    assert len(lines) == 4


@pytest.mark.long
def test_what_stage_3_expects_of_order_is_right_and_never_late_where_copies_are_done_at_once(
    fake_gpu: Fake, tmp_path: Path
) -> None:
    lines = lines_of_part(lambda record, options: stage_seam._order(record, Sleeper()), tmp_path)
    assert {name: line["verdict"] for name, line in lines.items()} == {
        "canary: a missing wait shows": "failed",
        "canary: a missing last use shows": "failed",
        "an upload overlaps compute queued after it": "failed",
        "an upload into fresh memory overlaps compute queued before it": "failed",
        "eviction under a sleeping kernel": "ok",
        "eviction under a sleeping kernel on a side stream": "ok",
    }
    assert not any("error" in line for line in lines.values())
