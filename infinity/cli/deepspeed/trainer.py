"""What a DeepSpeed config says about training, as arguments of transformers' Trainer (TrainingArguments)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from infinity.cli.deepspeed.reading import Source
from infinity.cli.deepspeed.training import finetune_options

_NAMES = MappingProxyType(
    {
        "--batch-size": "per_device_train_batch_size",
        "--gradient-accumulation": "gradient_accumulation_steps",
        "--lr": "learning_rate",
        "--beta1": "adam_beta1",
        "--beta2": "adam_beta2",
        "--eps": "adam_epsilon",
        "--weight-decay": "weight_decay",
        "--max-grad-norm": "max_grad_norm",
        "--warmup-steps": "warmup_steps",
        "--steps": "max_steps",
        "--log-every": "logging_steps",
    }
)
"""The arguments with the same values as the options of `infinity finetune`."""
OPTIMIZERS = MappingProxyType({"adamw": "adamw_torch", "lion": "lion_32bit", "adagrad": "adagrad", "sgd": "sgd"})
"""What `optim` calls the optimizers of `--optimizer`. Trainer has no Adam."""
SCHEDULES = MappingProxyType({"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"})
"""What `lr_scheduler_type` calls the schedules of `--schedule`, each with its warm-up."""


def trainer_arguments(source: Source) -> list[str]:
    """Arguments that say what the config says, as words of a command line; without a value that is open ("auto")."""
    words, values = finetune_options(source), {item.key: item.value for item in source.items}
    given = dict(zip(words[::2], words[1::2], strict=True))
    if "scheduler.type" not in values:
        given.pop("--schedule", None)  # a Trainer makes its own where DeepSpeed has none
    ratio = values.get("scheduler.params.cos_min_ratio")
    arguments = [*_same(given), *_optimizer(given), *_schedule(given, ratio), *_precision(given)]
    return [word for name, value in arguments for word in (f"--{name}", value)]


def _same(given: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for option, name in _NAMES.items():
        if option in given:
            yield name, given[option]


def _optimizer(given: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    name = OPTIMIZERS.get(given.get("--optimizer", ""))
    if name is not None:
        yield "optim", name


def _schedule(given: Mapping[str, str], ratio: object) -> Iterator[tuple[str, str]]:
    name = SCHEDULES.get(given.get("--schedule", ""))
    if name == "cosine" and "--min-lr" in given:
        yield "lr_scheduler_type", "cosine_with_min_lr"
        yield "lr_scheduler_kwargs", json.dumps({"min_lr_rate": ratio})
    elif name is not None:
        yield "lr_scheduler_type", name


def _precision(given: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    if given.get("--dtype") in ("bf16", "fp16"):
        yield given["--dtype"], "True"
