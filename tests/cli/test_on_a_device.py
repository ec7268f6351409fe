"""Every command, and every group of `infinity finetune`'s options, where the model computes on a device with memory of
its own, which refuses what stays in host memory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import Trainer

from infinity.base import accelerator
from infinity.cli import evaluation_callback, generate, trainer
from infinity.cli.batches import TokenBatch
from infinity.cli.main import main
from tests.cli.test_finetune import job, run
from tests.sim.fixtures import Simulate, simulate
from tests.sim.queues import LAZY

__all__ = ["job", "simulate"]

ROW = {"prompt": "the quick brown fox", "completion": " jumps over the lazy dog"}


class Host:
    """Tensors that are in host memory, as far as a device could tell."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []  # so that no other tensor gets their memory

    def keep(self, *tensors: torch.Tensor | None) -> None:
        self._kept += [tensor for tensor in tensors if tensor is not None]

    def has(self, tensor: torch.Tensor) -> bool:
        memory = tensor.untyped_storage().data_ptr()
        return any(kept.untyped_storage().data_ptr() == memory for kept in self._kept)


@pytest.fixture
def device(simulate: Simulate, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated device. Its tensors look like those of the host, so batches and prompts are noted where they are
    made, and a look-up of what was not brought from there fails as CUDA's does."""
    simulate(LAZY)
    host, init, embedding = Host(), TokenBatch.__init__, torch.nn.functional.embedding

    def noted(batch: Any, *given: Any, **named: Any) -> None:
        init(batch, *given, **named)
        host.keep(batch.ids, batch.labels, batch.positions)

    def prompt(*given: Any, prompt_ids: Any = evaluation_callback.prompt_ids, **named: Any) -> torch.Tensor:
        ids = prompt_ids(*given, **named)
        host.keep(ids)
        return ids

    def look_up(indices: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        if host.has(indices):
            raise RuntimeError("Expected all tensors to be on the same device, but got index is on cpu")
        return embedding(indices, *given, **named)

    monkeypatch.setattr(accelerator, "bring", lambda tensor, device: tensor.clone())
    monkeypatch.setattr(
        Trainer, "_prepare_inputs", lambda self, batch: {key: each.clone() for key, each in batch.items()}
    )
    monkeypatch.setattr(TokenBatch, "__init__", noted)
    for module in (evaluation_callback, generate):
        monkeypatch.setattr(module, "prompt_ids", prompt)
    monkeypatch.setattr(torch.nn.functional, "embedding", look_up)


def config_of(job: dict[str, Any]) -> list[str]:
    """For a command that moves weights only."""
    config = yaml.safe_load(job["--config"].read_text()) | {"commit_every": 0}
    path = job["--config"].with_name("again.yaml")
    path.write_text(yaml.safe_dump(config | {"nvme": {"paths": [str(path.with_name("again"))]}}))
    return ["--config", str(path)]


pytestmark = pytest.mark.usefixtures("device")


def test_what_stays_in_host_memory_is_refused_and_told_as_it_is(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(Trainer, "_prepare_inputs", lambda self, batch: batch)
    assert run(job) == 2
    error = capsys.readouterr().err
    assert (
        "the model's forward failed with sequences of 16 tokens, 2 at a time: RuntimeError: Expected all tensors"
        in error
    )
    assert "--sequence-length" not in error


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (IndexError("index out of range in self"), "cannot compute sequences.*give a smaller --sequence-length"),
        (
            RuntimeError("The size of tensor a (9) must match"),
            "cannot compute sequences.*give a smaller --sequence-length",
        ),
        (torch.OutOfMemoryError("CUDA out of memory"), "too little memory for sequences.*a smaller memory.device"),
        (
            RuntimeError("cuBLAS failed"),
            "forward failed with sequences of 4 tokens, 2 at a time: RuntimeError: cuBLAS failed$",
        ),
    ],
)
def test_an_error_of_a_forward_is_blamed_on_what_it_is_about(raised: Exception, said: str) -> None:
    assert re.search(said, str(trainer._refusal(torch.Size((2, 4)), raised)))


GROUPS: dict[str, list[Any]] = {
    "evaluation": ["--eval-split", 0.2, "--eval-steps", 1, "--sample", "the quick", "--sample-tokens", 2],
    "accumulation": ["--gradient-accumulation", 2],
    "micro-batches": ["--micro-batches", 2],
    "lion": ["--optimizer", "lion"],
    "lora": ["--lora", 2],
    "lora, nf4": ["--lora", 2, "--frozen", "nf4"],
    "frozen": ["--freeze", "model.embed_tokens.*"],
    "saved steps": ["--save-every", 1, "--save-limit", 1],
}


@pytest.mark.covering(most=5)
@pytest.mark.parametrize("group", GROUPS)
def test_every_group_of_options_trains(group: str, job: dict[str, Any]) -> None:
    assert run(job | {"--steps": 2}, *map(str, GROUPS[group])) == 0


@pytest.mark.covering
@pytest.mark.parametrize("packing", [[], ["--no-packing"]], ids=["packed", "padded"])
def test_examples_train_and_the_saved_model_is_compared(
    packing: list[str], job: dict[str, Any], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text((json.dumps(ROW) + "\n") * 20)
    assert run(job | {"--data": rows, "--steps": 2}, "--verify-output", *packing) == 0


def test_a_run_on_two_paths_is_resumed_and_its_model_writes(job: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    config = yaml.safe_load(job["--config"].read_text())
    config["nvme"]["paths"] = [str(tmp_path / "one"), str(tmp_path / "two")]
    job["--config"].write_text(yaml.safe_dump(config | {"commit_every": 1}))
    assert run(job | {"--steps": 1}, "--keep-store") == 0
    assert run(job | {"--steps": 2, "--output": tmp_path / "further"}, "--resume", str(tmp_path / "one")) == 0
    assert "resumed after step 1 of 2" in capsys.readouterr().out
    assert (
        main(
            [
                "generate",
                "--model",
                str(tmp_path / "further"),
                "--prompt",
                "the quick",
                "--max-tokens",
                "2",
                *config_of(job),
            ]
        )
        == 0
    )


def test_adapters_write(job: dict[str, Any], tmp_path: Path) -> None:
    assert run(job | {"--steps": 1}, "--lora", "2") == 0
    assert (
        main(
            [
                "generate",
                "--model",
                str(tmp_path / "out"),
                "--prompt",
                "the quick",
                "--max-tokens",
                "2",
                *config_of(job),
            ]
        )
        == 0
    )
