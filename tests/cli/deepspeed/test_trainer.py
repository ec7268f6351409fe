"""What a DeepSpeed config says about training: arguments that transformers' Trainer takes, with its values."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser, TrainingArguments
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

from infinity.cli.deepspeed.reading import read
from infinity.cli.deepspeed.trainer import _NAMES, OPTIMIZERS, SCHEDULES, trainer_arguments
from tests.cli.deepspeed.public import PUBLIC, Public
from tests.cli.deepspeed.test_conversion import by_source, file_of, written

ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.9, 0.95], "eps": 1e-7, "weight_decay": 0.1}}}
WARMUP = {"warmup_num_steps": 5, "total_num_steps": 50}


def arguments(values: Any, directory: Path) -> list[str]:
    return trainer_arguments(read(written({"zero_optimization": {"stage": 3}} | values, directory)))


def parsed(words: list[str], directory: Path) -> TrainingArguments:
    parser = HfArgumentParser(TrainingArguments)
    found: TrainingArguments
    (found,) = parser.parse_args_into_dataclasses([*words, "--output_dir", str(directory), "--use_cpu", "True"])
    return found


@pytest.mark.parametrize("public", PUBLIC, ids=by_source)
def test_the_arguments_for_a_public_config_are_arguments(public: Public, tmp_path: Path) -> None:
    parsed(trainer_arguments(read(file_of(public, tmp_path))), tmp_path)


def test_names_are_those_of_the_trainer() -> None:
    assert set(_NAMES.values()) <= {field.name for field in fields(TrainingArguments)}
    assert set(OPTIMIZERS.values()) <= {each.value for each in OptimizerNames}
    assert set(SCHEDULES.values()) <= {each.value for each in SchedulerType}


def test_a_trainer_has_every_value_that_the_config_fixes(tmp_path: Path) -> None:
    values = ADAM | {
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 16,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
    }
    found = parsed(arguments(values, tmp_path), tmp_path)
    assert (found.learning_rate, found.adam_beta1, found.adam_beta2, found.adam_epsilon) == (2e-5, 0.9, 0.95, 1e-7)
    assert (found.weight_decay, found.max_grad_norm, found.warmup_steps) == (0.1, 0.5, 5)
    assert (found.per_device_train_batch_size, found.gradient_accumulation_steps) == (2, 16)
    assert (found.lr_scheduler_type, found.optim, found.bf16) == ("constant_with_warmup", "adamw_torch", True)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"scheduler": {"type": "WarmupDecayLR", "params": WARMUP}}, ("linear", None)),
        ({"scheduler": {"type": "WarmupCosineLR", "params": WARMUP}}, ("cosine", None)),
        (
            {"scheduler": {"type": "WarmupCosineLR", "params": WARMUP | {"cos_min_ratio": 0.1}}},
            ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ),
    ],
)
def test_a_schedule_has_the_trainers_name(values: Any, expected: tuple[str, Any], tmp_path: Path) -> None:
    found = parsed(arguments(ADAM | values, tmp_path), tmp_path)
    assert (found.lr_scheduler_type, found.lr_scheduler_kwargs) == expected
    assert (found.warmup_steps, found.max_steps) == (5, 50)


def test_what_the_config_leaves_to_the_trainer_is_not_said(tmp_path: Path) -> None:
    words = arguments(ADAM | {"gradient_clipping": "auto", "bf16": {"enabled": "auto"}}, tmp_path)
    assert not {"--lr_scheduler_type", "--max_grad_norm", "--bf16", "--warmup_steps"} & set(words)
    assert json.dumps(words).count("--") == 6
