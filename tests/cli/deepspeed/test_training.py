"""The training settings in a DeepSpeed config: options that `infinity finetune` takes, arguments that transformers'
Trainer takes, and infinity's optimizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser, TrainingArguments
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

import infinity
from infinity.cli.deepspeed.config_reader import read
from infinity.cli.deepspeed.keys import KEYS
from infinity.cli.deepspeed.training import TrainingSettings, training_of
from infinity.cli.finetune_options import build_finetune_parser
from tests.cli.deepspeed.public import PUBLIC, Public
from tests.cli.deepspeed.test_conversion import by_source, file_of, written
from tests.models import llama


def training(values: Any, directory: Path) -> TrainingSettings:
    return training_of(read(written({"zero_optimization": {"stage": 3}} | values, directory)))


def words(options: Mapping[str, str]) -> list[str]:
    return [word for option in options.items() for word in option]


def options(values: Any, directory: Path) -> str:
    return " ".join(words(training(values, directory).options))


def adam(kind: str = "AdamW", **params: object) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": {"weight_decay": "auto"} | params}, "bf16": {"enabled": "auto"}}


@pytest.mark.parametrize("public", PUBLIC, ids=by_source)
def test_the_options_for_a_public_config_are_options(public: Public, tmp_path: Path) -> None:
    build_finetune_parser().parse_args(words(training_of(read(file_of(public, tmp_path))).options))


def test_an_optimizer_and_a_schedule_become_options(tmp_path: Path) -> None:
    values = adam(lr=3e-5, betas=[0.8, 0.999], eps=1e-8, weight_decay=3e-7) | {
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"warmup_num_steps": 5, "total_num_steps": 50, "cos_min_ratio": 0.1},
        },
        "gradient_clipping": 0.5,
        "steps_per_print": 10,
    }
    assert options(values, tmp_path) == (
        "--optimizer adamw --lr 3e-05 --beta1 0.8 --beta2 0.999 --eps 1e-08 --weight-decay 3e-07 --max-grad-norm 0.5 "
        "--schedule cosine --warmup-steps 5 --steps 50 --min-lr 3e-06"
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            "--batch-size 4 --gradient-accumulation 2",
        ),
        (
            {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "train_batch_size": 64},
            "--batch-size 4 --gradient-accumulation 16",
        ),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 8}, "--batch-size 8 --gradient-accumulation 8"),
        ({"train_batch_size": 64}, "--batch-size 64"),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}, ""),
        ({"train_batch_size": -1, "gradient_clipping": -1, "steps_per_print": 1.5}, ""),
        ({"train_batch_size": "many", "gradient_clipping": "0.5"}, ""),
        ({"steps_per_print": 10_000_000}, ""),
        ({"gradient_clipping": 0}, "--max-grad-norm 0"),
        ({"bf16": {"enabled": True}}, "--dtype bf16"),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": True}}, "--dtype fp16"),
        ({"bf16": {"enabled": False}}, "--dtype fp32"),
        ({"bf16": None, "bfloat16": {"enabled": "auto"}}, ""),
        (adam("Adam", lr=1e-3), "--optimizer adamw --lr 0.001 --schedule constant"),
        (adam("Adam", lr="auto", adam_w_mode=False), "--optimizer adam"),
        (adam("Lion", betas=[0.9, 0.99], eps=1e-8), "--optimizer lion --beta1 0.9 --beta2 0.99"),
        (adam("SGD", lr=0.1, betas=[0.9, 0.99], momentum=0.9), "--optimizer sgd --lr 0.1 --schedule constant"),
        (adam("Lamb", lr=0.1), "--lr 0.1 --schedule constant"),
        (adam(lr="auto", betas="auto", eps="auto"), "--optimizer adamw"),
        (adam(betas=[0.9], lr=[1]), "--optimizer adamw"),
        ({"optimizer": {"type": "AdamW"}, "bf16": {"enabled": "auto"}}, "--optimizer adamw --weight-decay 0.0"),
        (
            {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}, "bf16": {"enabled": "auto"}},
            "--optimizer adamw",
        ),
    ],
)
def test_values_become_options_where_the_option_takes_them(values: Any, expected: str, tmp_path: Path) -> None:
    assert options({"bf16": {"enabled": "auto"}} | values, tmp_path) == expected


@pytest.mark.parametrize(
    ("values", "call"),
    [
        (
            adam(lr=3e-5, betas=[0.8, 0.999], eps=1e-8) | {"gradient_clipping": 1.0},
            "AdamW(lr=3e-05, betas=(0.8, 0.999), eps=1e-08, max_grad_norm=1.0)",
        ),
        (adam("Adam", lr=1e-3, adam_w_mode=False), "Adam(lr=0.001)"),
        (adam("Lion", lr=1e-3, eps=1.0), "Lion(lr=0.001)"),
        (adam("Adagrad", lr=1e-3, eps=1e-8), "Adagrad(lr=0.001, eps=1e-08)"),
        (adam("SGD", lr=0.1, momentum=0.9, weight_decay=0.1), "SGD(lr=0.1, weight_decay=0.1, momentum=0.9)"),
        (adam(lr=1e-3, betas=[0.9, 2.0]), "AdamW(lr=0.001)"),
        (adam("Lamb"), None),
        ({}, None),
    ],
)
def test_the_optimizer_of_a_loop_of_ones_own_can_be_made(values: Any, call: str | None, tmp_path: Path) -> None:
    got = training(values, tmp_path).optimizer_call
    expected = "" if call is None else f"infinity.{call}".replace("(", "(model.parameters(), ", 1)
    assert got == expected
    if got:
        model = infinity.offload(llama(layers=1)[0], {"weights": "host", "optimizer": "host"})
        eval(got, {"infinity": infinity, "model": model})
        infinity.close(model, discard=True)


# -- arguments of the Trainer ------------------------------------------------------------------------------------------

ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.9, 0.95], "eps": 1e-7, "weight_decay": 0.1}}}
WARMUP = {"warmup_num_steps": 5, "total_num_steps": 50}


def arguments(values: Any, directory: Path) -> list[str]:
    return words(training(values, directory).arguments)


def parsed(said: list[str], directory: Path) -> TrainingArguments:
    parser = HfArgumentParser(TrainingArguments)
    found: TrainingArguments
    (found,) = parser.parse_args_into_dataclasses([*said, "--output_dir", str(directory), "--use_cpu", "True"])
    return found


@pytest.mark.parametrize("public", PUBLIC, ids=by_source)
def test_the_arguments_for_a_public_config_are_arguments(public: Public, tmp_path: Path) -> None:
    parsed(words(training_of(read(file_of(public, tmp_path))).arguments), tmp_path)


def test_the_words_of_the_trainer_are_its_words() -> None:
    told = [words[1].split() for key in KEYS.values() for words in key.words.values() if isinstance(words, list)]
    named = {
        name: {value for argument, value in filter(None, told) if argument == f"--{name}"}
        for name in ("optim", "lr_scheduler_type", "bf16", "fp16")
    }
    assert set() < named["optim"] <= {each.value for each in OptimizerNames}
    assert set() < named["lr_scheduler_type"] <= {each.value for each in SchedulerType}
    assert named["bf16"] == named["fp16"] == {"True"}


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
    said = arguments(ADAM | {"gradient_clipping": "auto", "bf16": {"enabled": "auto"}}, tmp_path)
    assert not {"--lr_scheduler_type", "--max_grad_norm", "--bf16", "--warmup_steps"} & set(said)
    assert json.dumps(said).count("--") == 6
