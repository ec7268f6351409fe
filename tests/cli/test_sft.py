"""`infinity finetune` on conversations and completions trains as TRL's SFTTrainer does."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli.test_examples import CHATML, byte_level
from tests.cli.test_finetune import run
from tests.models import llama

STEPS, BATCH, ACCUMULATION, LENGTH, HELD_OUT = 4, 2, 2, 96, 5
COUNT = STEPS * BATCH * ACCUMULATION
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"say {index}"},
            {"role": "assistant", "content": "fox " * (1 + index % 5)},
        ]
    }
    for index in range(COUNT)
]
ANSWERS = [{"prompt": f"say {index}:", "completion": " fox" * (1 + index % 5)} for index in range(COUNT)]


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    """Arguments of a run in fp32 on examples, one in each sequence."""
    model, _ = llama()
    model.resize_token_embeddings(500)
    model.save_pretrained(tmp_path / "model")
    by = byte_level()
    by.chat_template = CHATML
    by.save_pretrained(tmp_path / "model")
    config = {
        "weights": "nvme",
        "optimizer": "nvme",
        "memory": {"device": "8MiB", "host": "64MiB"},
        "nvme": {"paths": [str(tmp_path / "swap")]},
    }
    (tmp_path / "swap.yaml").write_text(yaml.safe_dump(config))
    return {
        "--model": tmp_path / "model",
        "--data": tmp_path / "rows.jsonl",
        "--config": tmp_path / "swap.yaml",
        "--output": tmp_path / "out",
        "--epochs": 1,
        "--sequence-length": LENGTH,
        "--batch-size": BATCH,
        "--gradient-accumulation": ACCUMULATION,
        "--dtype": "fp32",
        "--lr": 1e-3,
        "--schedule": "constant",
    }


def write(job: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    job["--data"].write_text("".join(json.dumps(row) + "\n" for row in rows))


def losses_of(job: dict[str, Any]) -> list[float]:
    with (job["--output"] / "loss.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def plain(job: dict[str, Any], rows: list[dict[str, Any]]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the steps of TRL with the same batches, that on held-out rows, and the weights at the end."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    order = np.random.default_rng((0, 0)).permutation(COUNT)
    options: dict[str, Any] = {
        "output_dir": str(job["--output"].parent / "trl"),
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": HELD_OUT,  # else TRL takes the mean of the batches' means
        "gradient_accumulation_steps": ACCUMULATION,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "max_length": LENGTH,
        "assistant_only_loss": "messages" in rows[0],
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "bf16": False,
        "gradient_checkpointing": False,
    }
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(job["--model"], dtype=torch.float32),
        SFTConfig(**options),
        train_dataset=Dataset.from_list([rows[index] for index in order]),
        eval_dataset=Dataset.from_list(rows[:HELD_OUT]),
        processing_class=AutoTokenizer.from_pretrained(job["--model"]),
    )
    # No decay apart for norms: infinity finetune has one rate of decay for all.
    trainer.get_decay_parameter_names = lambda model: [name for name, _ in model.named_parameters()]  # type: ignore[method-assign]
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)  # type: ignore
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    losses.append(trainer.evaluate()["eval_loss"])
    return losses, {name: value.detach() for name, value in trainer.model.named_parameters()}


@pytest.mark.parametrize("rows", [CHATS, ANSWERS], ids=["chats", "answers"])
def test_losses_and_weights_are_those_of_trl(rows: list[dict[str, Any]], job: dict[str, Any]) -> None:
    write(job, rows)
    expected, weights = plain(job, rows)
    apart = job["--data"].with_name("apart.jsonl")
    write(job | {"--data": apart}, rows[:HELD_OUT])
    assert run(job | {"--eval-data": apart}, "--no-packing", "--verify-output") == 0
    report = json.loads((job["--output"] / "report.json").read_text())
    assert [*losses_of(job), report["evaluations"][-1]["loss"]] == pytest.approx(expected, rel=1e-6)
    for name, value in AutoModelForCausalLM.from_pretrained(job["--output"]).named_parameters():
        torch.testing.assert_close(value.detach(), weights[name], rtol=0, atol=1e-5)


def test_packed_examples_are_fewer_sequences_and_end_verified(job: dict[str, Any], capsys: Any) -> None:
    write(job, CHATS)
    assert run(job | {"--gradient-accumulation": 1, "--sequence-length": 256}, "--verify-output") == 0
    out = capsys.readouterr().out
    assert f"{COUNT} examples in " in out
    assert "bit for bit" in out
    assert len(losses_of(job)) < STEPS * ACCUMULATION
