"""The replay of a step: the bytes of a real one, the bits left alone, and the numbers that follow."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import infinity
from infinity.access.replay import replay_step
from infinity.cli.bench.main import main
from infinity.coordinator import registry
from tests.conftest import states_of, weights_of
from tests.models import llama, loss_of


def moved(model: torch.nn.Module) -> tuple[int, int]:
    now = infinity.statistics(model)
    return now.read_bytes, now.written_bytes


def train(model: Any, optim: Any, batch: Any) -> None:
    loss_of(model, batch).backward()
    optim.step()
    optim.zero_grad()


@pytest.mark.parametrize("weights", ["nvme", "host"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_replay_moves_what_a_step_moves_and_changes_nothing(weights: str, dtype: torch.dtype, offload: Any) -> None:
    model, batch = llama()
    memory = {"device": "500KiB", "host": "64MiB"}
    model = offload(model.to(dtype).train(), weights=weights, memory=memory, overlap="off")
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        train(model, optim, batch)
    coordinator = registry.coordinator_of(model)
    replay_step(coordinator)
    before = moved(model)
    train(model, optim, batch)
    real = tuple(after - earlier for after, earlier in zip(moved(model), before, strict=True))
    step = replay_step(coordinator)
    bits = weights_of(model) | states_of(model)
    for _ in range(2):
        replay_step(coordinator)
    assert (step.read_bytes, step.written_bytes) == real
    assert 0 < step.io_s <= step.seconds
    again = weights_of(model) | states_of(model)
    assert all(torch.equal(again[name], value) for name, value in bits.items())


def test_training_goes_on_after_a_replay_as_if_there_had_been_none(offload: Any) -> None:
    ends = []
    for replays in (0, 2):
        torch.manual_seed(0)
        model, batch = llama()
        model = offload(model.bfloat16().train())
        optim = infinity.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            train(model, optim, batch)
            for _ in range(replays):
                replay_step(registry.coordinator_of(model))
        ends.append(weights_of(model) | states_of(model))
        infinity.close(model)
    assert all(torch.equal(ends[1][name], value) for name, value in ends[0].items())


def test_the_command_tells_seconds_tokens_and_wear(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = llama()
    model.config.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    swap = tmp_path / "swap"
    config = {
        "weights": "nvme",
        "optimizer": "nvme",
        "activations": "keep",
        "memory": {"device": "1MiB", "host": "64MiB"},
        "nvme": {"paths": [str(swap)]},
        "commit_every": 0,
    }
    (tmp_path / "swap.yaml").write_text(yaml.safe_dump(config))
    arguments = ["step", "--model", str(tmp_path / "model" / "config.json"), "--config", str(tmp_path / "swap.yaml")]
    report = tmp_path / "step.json"
    options = ["--steps", "2", "--tflops", "10", "--cpu"]
    assert main(arguments + options) == 0
    assert "not known; give --rated-tb (the drive's TBW)" in capsys.readouterr().out
    assert main([*arguments, *options, "--rated-tb", "600", "--json", str(report)]) == 0
    out = capsys.readouterr().out
    found = json.loads(report.read_text())
    assert "of 600 TB rated" in out
    assert f"{found['tokens_bound']:,} tokens per step" in out
    assert found["written_tb"] == pytest.approx(found["written_bytes"] * 1000 / 1e12)
    numel = sum(parameter.numel() for parameter in model.parameters())
    assert found["tokens_bound"] == -int(-found["step_s"] * 10e12 // (6 * numel))
    assert not swap.exists()


def test_a_config_with_nothing_on_nvme_has_nothing_to_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _ = llama()
    model.config.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    (tmp_path / "swap.yaml").write_text("{weights: host, optimizer: host, memory: {host: 64MiB, device: 64MiB}}")
    assert main(["step", "--model", str(tmp_path / "model"), "--config", str(tmp_path / "swap.yaml"), "--cpu"]) == 1
    assert "nothing is on NVMe" in capsys.readouterr().err


def test_a_run_that_is_in_the_directory_is_left_alone(tmp_path: Path) -> None:
    """A config with generations, whose directory holds some: what the bench writes is beside them, and goes."""
    swap = tmp_path / "swap"
    swap.mkdir()
    (swap / "generation-000000000003.infinity").write_text("somebody's")
    (swap / "store.infinity").write_text("somebody's")
    config = {
        "weights": "nvme",
        "optimizer": "nvme",
        "nvme": {"paths": [str(swap)]},
        "commit_every": 1,
        "memory": {"device": "64MiB", "host": "256MiB"},
    }
    (tmp_path / "swap.yaml").write_text(json.dumps(config))
    llama()[0].save_pretrained(tmp_path / "model")
    assert main(["step", "--model", str(tmp_path / "model"), "--config", str(tmp_path / "swap.yaml"), "--cpu"]) == 0
    assert sorted(os.listdir(swap)) == ["generation-000000000003.infinity", "store.infinity"]
