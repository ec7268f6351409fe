"""Features of TRL's trainers beyond Trainer: a fused head that evaluates, references, reward models."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import infinity
from examples.make_demo_checkpoint import make_checkpoint
from infinity.coordinator import registry
from tests.integrations.conftest import Launch

if TYPE_CHECKING:
    from datasets import Dataset

Made = Callable[[Path, Path], Any]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 165,000 parameters with a tokenizer, and data."""
    directory = tmp_path_factory.mktemp("inputs")
    make_checkpoint(directory, hidden=64, layers=4, vocabulary=512, dtype=torch.float32, text_bytes=100_000)
    return directory


def rows_of(inputs: Path, name: str) -> Dataset:
    from datasets import Dataset

    return Dataset.from_list([json.loads(line) for line in (inputs / f"{name}.jsonl").read_text().splitlines()[:16]])


def options(output: Path) -> dict[str, Any]:
    return {
        "output_dir": str(output),
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "max_length": 256,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
    }


def causal(inputs: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(inputs / "checkpoint", dtype=torch.float32)


def sft_that_evaluates(inputs: Path, output: Path) -> Any:
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(**options(output), eval_strategy="steps", eval_steps=1, eval_on_start=True)
    rows = rows_of(inputs, "texts")
    tokenizer = AutoTokenizer.from_pretrained(inputs / "checkpoint")
    return SFTTrainer(causal(inputs), args, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer)


def dpo(inputs: Path, output: Path, model: Any = None, trainer: Any = None, **more: Any) -> Any:
    """Args: trainer: arguments of the DPOTrainer."""
    from trl import DPOConfig, DPOTrainer

    args, rows = DPOConfig(**options(output), **more), rows_of(inputs, "preferences")
    tokenizer = AutoTokenizer.from_pretrained(inputs / "checkpoint")
    return DPOTrainer(
        model or causal(inputs), args=args, train_dataset=rows, processing_class=tokenizer, **(trainer or {})
    )


def dpo_with_precomputed_reference(inputs: Path, output: Path) -> Any:
    return dpo(inputs, output, precompute_ref_log_probs=True)


def reward(inputs: Path, output: Path) -> Any:
    from trl import RewardConfig, RewardTrainer

    torch.manual_seed(0)  # of the new head
    model = AutoModelForSequenceClassification.from_pretrained(inputs / "checkpoint", num_labels=1, dtype=torch.float32)
    args = RewardConfig(**options(output))
    tokenizer = AutoTokenizer.from_pretrained(inputs / "checkpoint")
    return RewardTrainer(model, args, train_dataset=rows_of(inputs, "preferences"), processing_class=tokenizer)


@pytest.mark.parametrize(
    "made",
    [
        reward,
        dpo,
        pytest.param(sft_that_evaluates, marks=pytest.mark.long),
        pytest.param(dpo_with_precomputed_reference, marks=pytest.mark.long),
    ],
    ids=lambda each: each.__name__,
)
def test_losses_are_those_of_the_plain_script(made: Made, inputs: Path, launch: Launch, tmp_path: Path) -> None:
    logs = []
    for context in (nullcontext(), launch(memory={"device": "2MiB", "host": "256MiB"})):
        with context as run:
            trainer = made(inputs, tmp_path / "out")
            trainer.train()
            assert (run is not None) == registry.is_offloaded(trainer.model)
            history = trainer.state.log_history
            logs.append([entry[key] for entry in history for key in ("loss", "eval_loss", "grad_norm") if key in entry])
    assert len(logs[0]) >= 6
    torch.testing.assert_close(logs[1], logs[0], rtol=1e-5, atol=1e-6)


def test_dpo_takes_an_optimizer_that_is_made_first(inputs: Path, tmp_path: Path) -> None:
    """It has no argument for a factory."""
    memory = {"device": "2MiB", "host": "256MiB"}
    config = infinity.InfinityConfig({"memory": memory, "nvme": {"paths": [str(tmp_path / "swap")]}})
    losses = []
    for how in ({}, {"quantization_config": config}):
        model, reference = (
            AutoModelForCausalLM.from_pretrained(inputs / "checkpoint", dtype=torch.float32, **how) for _ in range(2)
        )
        optimizer = infinity.hf.optimizer_factory(model, lr=1e-3) if how else None
        trainer = dpo(inputs, tmp_path / "out", model, {"ref_model": reference, "optimizers": (optimizer, None)})
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert registry.is_offloaded(reference)
    assert registry.coordinator_of(reference).plan.layout.trainable_numel == 0
    config.close()
    assert len(set(losses[0])) == 3
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
