"""bench/gpu_step.py: contenders, figures and sizes, with tiny shapes on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpu import sizes
from gpu.step_worker import covered, setup, turn
from gpu.steps import CONTENDERS, LLAMA, PEAK_FLOPS, config_of, figures, model_flops
from peers.workload import Job

from infinity.config import load_config
from infinity.plan.planner import make_plan
from infinity.state.discover import discover
from infinity.state.offload_arguments import OffloadArguments

TINY = replace(LLAMA, layers=2, hidden=64, intermediate=128, heads=4, kv_heads=2, vocabulary=256)
TINY = replace(TINY, batch=1, tokens=32, recompute=False)


def test_torch_with_an_fp32_master_and_infinity_train_alike(tmp_path: Path) -> None:
    losses = {}
    for name in ("torch", "nvme-nvme"):
        options = {"device": "cpu", "config": config_of(name, TINY), "warmups": 1, "steps": 3, "trace": ""}
        contender = setup(Job(TINY, str(tmp_path) if "nvme" in name else "", options))
        measured = turn(contender)
        losses[name] = measured["losses"]
        row = figures(TINY, contender.facts, measured)
        contender.close()
        assert row["device"] == "cpu"
        assert ("read_bytes_per_parameter" in row) == (name != "torch")
    assert losses["nvme-nvme"] == pytest.approx(losses["torch"], rel=1e-5)


def test_every_contender_has_a_plan_at_full_size(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = LLAMA.build_model()
    slots = {}
    for name in CONTENDERS[1:]:
        config = load_config(config_of(name, LLAMA) | {"nvme": {"paths": [str(tmp_path)]}})
        plan = make_plan(discover(model).units, OffloadArguments(config, torch.device("cuda")), can_recompute=True)
        assert f"{plan.placement.weights.tier}-{plan.placement.optimizer.tier}" == name.removesuffix("-tight")
        assert plan.layout.swap.nbytes < 40 << 30
        assert plan.layout.arena.nbytes < 40 << 30
        slots[name] = plan.budgets.slot_bytes / plan.layout.weight_bytes
    assert slots.pop("host-host-tight") < 0.7
    assert min(slots.values()) >= 1


def test_figures_hold_a_step_against_the_peak_of_its_gpu() -> None:
    measured = {"seconds": 0.5, "counters": {}}
    row = figures(LLAMA, {"device": "NVIDIA H200", "numel": LLAMA.numel, "slot_waits": "timed"}, measured)
    assert row["mfu"] == pytest.approx(model_flops(LLAMA, LLAMA.numel) / 0.5 / PEAK_FLOPS["H200"], rel=1e-2)
    assert row["tokens_per_s"] == 16384
    assert "mfu" not in figures(LLAMA, {"device": "cpu", "numel": LLAMA.numel, "slot_waits": ""}, measured)


def test_the_model_has_the_parameters_it_is_named_for() -> None:
    assert LLAMA.numel == sizes.numel(LLAMA.layers) == pytest.approx(1.24e9, rel=0.01)
    assert model_flops(LLAMA, LLAMA.numel) * 4 / 3 == pytest.approx(8.1e13, rel=0.1)


def test_overlapping_intervals_count_once() -> None:
    assert covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4
    assert covered([]) == 0


def test_a_fast_disk_gets_the_whole_model_and_a_slow_one_less() -> None:
    room = 120 << 30
    fast = sizes.choose(20e9, room, room, 145.0)
    assert (fast["layers"], fast["warmups"], fast["steps"], fast["left_out"]) == (16, 2, 4, {})
    slow = sizes.choose(1e9, room, room, 145.0)
    assert slow["layers"] < 16
    assert slow["planned_s"] <= 145
    assert set(sizes.choose(1e7, room, room, 145.0)["left_out"]) == {"host-nvme", "nvme-nvme"}


def test_a_full_disk_or_little_memory_gets_a_smaller_model() -> None:
    assert sizes.choose(20e9, 10 << 30, 120 << 30, 145.0)["layers"] < 16
    assert sizes.choose(20e9, 120 << 30, 16 << 30, 145.0)["layers"] < 16
