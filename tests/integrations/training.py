"""A Trainer that trains the small checkpoint, and the Trainer's log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

Rows = list[dict[str, torch.Tensor]]
SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}


def trainer(checkpoint: Path, rows: Rows, output: Path, **options: Any) -> Trainer:
    given: dict[str, Any] = {
        "output_dir": str(output),
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=options.pop("dtype", "auto"))
    return Trainer(model=model, args=TrainingArguments(**(given | options)), train_dataset=rows, eval_dataset=rows[:6])


def log_of(trainer: Trainer) -> list[float]:
    """Return losses, norms and metrics, in order."""
    keys = ("loss", "eval_loss", "grad_norm")
    return [entry[key] for entry in trainer.state.log_history for key in keys if key in entry]
