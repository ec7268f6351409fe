"""The training settings of a DeepSpeed config. A swap config has no such settings.

The settings become options of `infinity finetune`, arguments of transformers' Trainer (TrainingArguments), and a call
of infinity.AdamW.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from infinity.cli.deepspeed.config_reader import AUTO, ConfigItem, SourceConfig
from infinity.cli.deepspeed.conversion import whole_number, words_of
from infinity.cli.deepspeed.keys import ROWS
from infinity.cli.finetune_options import build_finetune_parser

_LR, _RATIO, _MOMENTUM = "optimizer.params.lr", "scheduler.params.cos_min_ratio", "optimizer.params.momentum"
_PRECISIONS = {"bf16.enabled", "bfloat16.enabled", "fp16.enabled"}
_MOST = 2**63


@dataclass(frozen=True)
class TrainingSettings:
    """The training settings of a config.

    Attributes:
        options: options of `infinity finetune` with their values. An option is missing if the value is "auto", or if
            `infinity finetune` does not accept the value.
        arguments: arguments of TrainingArguments. Trainer has AdamW but not Adam. If the DeepSpeed config has no
            schedule, Trainer uses its own default schedule.
        optimizer_call: the call that makes the optimizer in a user's own script; "" if the config names no optimizer
            that infinity has.
    """

    options: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    optimizer_call: str = ""


def training_of(source: SourceConfig) -> TrainingSettings:
    """Return the training settings of a config."""
    items, options, arguments = _told(source), dict[str, str](), dict[str, str]()
    parsers = {name: action for action in build_finetune_parser()._actions for name in action.option_strings}

    def add(option: str, value: object, argument: str = "", theirs: object = None) -> None:
        if option not in options and _takes(parsers[option], _text(value)):
            options[option] = _text(value)
            if argument:
                arguments[f"--{argument.removeprefix('--')}"] = _text(value if theirs is None else theirs)

    for key in [key for key in ROWS if key.name in items]:
        words = words_of(key, items)
        if isinstance(words, list):
            add(*words[0].split(), *words[1].split())
        elif key.takes and (not key.only or options.get("--optimizer") in key.only):
            values = _values(key.takes, items[key.name].value)
            for option, argument, value in zip(key.to.split(", "), key.trainer.split(", "), values, strict=False):
                if value < key.below:
                    add(option, value, argument)
    rate, ratio = (items[key].value if key in items else None for key in (_LR, _RATIO))
    if _is_number(rate) and not any(key.startswith("scheduler.") for key in items):
        add("--schedule", "constant")  # if there is no scheduler, DeepSpeed keeps the learning rate constant
    if options.get("--schedule") == "cosine" and _is_number(rate) and _is_number(ratio):
        add("--min-lr", float(f"{ratio * rate:.6g}"), "lr_scheduler_kwargs", json.dumps({"min_lr_rate": ratio}))
        arguments["--lr_scheduler_type"] = "cosine_with_min_lr"
    open_ones = {item.key for item in source.items if item.value == AUTO}
    if not (open_ones & _PRECISIONS or source.accelerate or source.fsdp):
        add("--dtype", "fp32")
    return TrainingSettings(options, arguments, _call(options, items))


def _call(options: dict[str, str], items: dict[str, ConfigItem]) -> str:
    if "--optimizer" not in options:
        return ""
    given = {
        name: options.get(f"--{name.replace('_', '-')}") for name in ("lr", "eps", "weight_decay", "max_grad_norm")
    }
    if {"--beta1", "--beta2"} <= options.keys():
        given = {"lr": given.pop("lr"), "betas": f"({options['--beta1']}, {options['--beta2']})"} | given
    momentum = items[_MOMENTUM].value if _MOMENTUM in items else None
    if options["--optimizer"] == "sgd" and _is_number(momentum):
        given["momentum"] = repr(momentum)
    if float(given["max_grad_norm"] or 0) == 0:
        del given["max_grad_norm"]
    shown = [f"{name}={value}" for name, value in given.items() if value is not None]
    classes = {"adamw": "AdamW", "sgd": "SGD"}
    name = classes.get(options["--optimizer"], options["--optimizer"].capitalize())
    return f"infinity.{name}({', '.join(['model.parameters()', *shown])})"


def _told(source: SourceConfig) -> dict[str, ConfigItem]:
    """Return the values of the keys, and further values that follow from them.

    The further values are the batch sizes with which one process has the same batch per step, and sometimes a weight
    decay of 0. DeepSpeed's own Adam decays no weights unless the config says so, but the default of torch.optim.AdamW
    is 0.01.
    """
    named = {item.key for item in source.items}
    items = {item.key: item for item in source.items if item.value is not None and item.value != AUTO}

    def follows(key: str, value: object) -> None:
        items[key] = ConfigItem(key, value, key)

    sizes = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    micro, passes, batch = (whole_number(items[key].value) if key in items else None for key in sizes)
    if micro and batch and batch % micro == 0:
        follows(sizes[1], batch // micro)
    if micro is None and batch is not None:
        follows(sizes[0], batch // passes if passes and batch % passes == 0 else batch)
    is_torchs = "optimizer.params.torch_adam" in items and items["optimizer.params.torch_adam"].value is True
    if "optimizer.type" in items and "optimizer.params.weight_decay" not in named and not is_torchs:
        follows("optimizer.params.weight_decay", 0.0)
    return items


def _values(takes: str, value: Any) -> list[Any]:
    """Return the values for an option as a list. The list is empty if `value` does not have the type of the option."""
    if takes == "whole":
        number = whole_number(value)
        return [] if number is None else [number]
    values = value if takes == "pair" and isinstance(value, list) and len(value) == 2 else [value]
    return values if all(map(_is_number, values)) and len(values) == (2 if takes == "pair" else 1) else []


def _takes(action: argparse.Action, text: str) -> bool:
    convert: Any = action.type or str
    try:
        value = convert(text)
    except (argparse.ArgumentTypeError, ValueError):
        return False
    return action.choices is None or value in action.choices


def _text(value: object) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def _is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether a value is a number that an optimizer accepts: finite, and not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_MOST < value < _MOST
