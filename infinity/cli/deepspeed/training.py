"""What a DeepSpeed config says about training, as options of `infinity finetune` and as a call of infinity.AdamW. The
swap config says nothing about training."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from infinity.cli.arguments import build_finetune_parser
from infinity.cli.deepspeed.keys import OPTIMIZERS, SCHEDULES
from infinity.cli.deepspeed.placement import whole_number
from infinity.cli.deepspeed.reading import AUTO, Source

_HAVE_BETAS, _HAVE_EPS = ("adamw", "adam", "lion"), ("adamw", "adam", "adagrad")
_PARAMS = "optimizer.params."
_MOST = 2**63
_NEVER = 100_000
"""From so many steps per print on a config says that nothing is to be printed."""


def finetune_options(source: Source) -> list[str]:
    """Options of `infinity finetune` that say what the config says; without a value that is open ("auto"), or that the
    option does not take."""
    values = _told(source)
    parsers = {name: action for action in build_finetune_parser()._actions for name in action.option_strings}
    words: list[str] = []
    for option, value in (*_sizes(values), *_optimizer(values), *_schedule(values), *_forms(values, source)):
        text = repr(value) if isinstance(value, float) else str(value)
        if option not in words and _takes(parsers[option], text):
            words += [option, text]
    return words


def optimizer_call(source: Source) -> str:
    """The optimizer of the config in a script of one's own; "" where the config has none that infinity has."""
    values = _told(source)
    name = optimizer_name(values)
    if name is None:
        return ""
    given = {key.removeprefix(_PARAMS): value for key, value in values.items() if key.startswith(_PARAMS)}
    shown = [f"{key}={given[key]!r}" for key in ("lr", "eps", "weight_decay") if _is_number(given.get(key))]
    if name == "adagrad" or name in ("lion", "sgd"):
        shown = [each for each in shown if name == "adagrad" or not each.startswith("eps")]
    betas = given.get("betas")
    if name in _HAVE_BETAS and isinstance(betas, list) and len(betas) == 2 and all(map(_is_number, betas)):
        shown.insert(1 if "lr" in given else 0, f"betas=({betas[0]!r}, {betas[1]!r})")
    if name == "sgd" and _is_number(given.get("momentum")):
        shown.append(f"momentum={given['momentum']!r}")
    if _is_number(values.get("gradient_clipping")) and values["gradient_clipping"] > 0:
        shown.append(f"max_grad_norm={values['gradient_clipping']!r}")
    classes = {"adamw": "AdamW", "adam": "Adam", "lion": "Lion", "adagrad": "Adagrad", "sgd": "SGD"}
    return f"infinity.{classes[name]}({', '.join(('model.parameters()', *shown))})"


def _told(source: Source) -> dict[str, Any]:
    """The keys that have a value. Adam of DeepSpeed's own has no weight decay unless it is told; torch's has."""
    named = {item.key for item in source.items}
    values = {item.key: item.value for item in source.items if item.value is not None and item.value != AUTO}
    is_torchs = values.get(f"{_PARAMS}torch_adam") is True
    if "optimizer.type" in values and f"{_PARAMS}weight_decay" not in named and not is_torchs:
        values[f"{_PARAMS}weight_decay"] = 0.0
    return values


def _takes(action: argparse.Action, text: str) -> bool:
    convert: Any = action.type
    try:
        value = convert(text)
    except argparse.ArgumentTypeError:
        return False
    return action.choices is None or value in action.choices


def _sizes(values: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Micro-batch and accumulation: the same batch of a step in one process."""
    micro = whole_number(values.get("train_micro_batch_size_per_gpu"))
    passes = whole_number(values.get("gradient_accumulation_steps"))
    batch = whole_number(values.get("train_batch_size"))
    if micro and batch and batch % micro == 0:
        passes = batch // micro
    if micro is None and batch is not None:
        micro = batch // passes if passes and batch % passes == 0 else batch
    if micro is not None:
        yield "--batch-size", micro
    if passes is not None:
        yield "--gradient-accumulation", passes


def optimizer_name(values: Mapping[str, Any]) -> str | None:
    """What `--optimizer` calls the optimizer; None where the config has none that infinity has.

    Args:
        values: of the config, by DeepSpeed's keys.
    """
    kind = str(values.get("optimizer.type", "")).lower()
    if kind == "adam" and values.get(f"{_PARAMS}adam_w_mode") is False:
        return "adam"
    return OPTIMIZERS.get(kind)


def _optimizer(values: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    name = optimizer_name(values)
    if name is not None:
        yield "--optimizer", name
    rate = next((values[key] for key in (f"{_PARAMS}lr", "scheduler.params.warmup_max_lr") if key in values), None)
    if _is_number(rate):
        yield "--lr", rate
    betas = values.get(f"{_PARAMS}betas")
    if isinstance(betas, list) and len(betas) == 2 and all(map(_is_number, betas)) and name in _HAVE_BETAS:
        yield "--beta1", betas[0]
        yield "--beta2", betas[1]
    if _is_number(values.get(f"{_PARAMS}eps")) and name in _HAVE_EPS:
        yield "--eps", values[f"{_PARAMS}eps"]
    if _is_number(values.get(f"{_PARAMS}weight_decay")):
        yield "--weight-decay", values[f"{_PARAMS}weight_decay"]
    for key in ("gradient_clipping", f"{_PARAMS}max_grad_norm"):
        if _is_number(values.get(key)):
            yield "--max-grad-norm", values[key]


def _schedule(values: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    kind, has_one = values.get("scheduler.type"), any(key.startswith("scheduler.") for key in values)
    if isinstance(kind, str) and kind in SCHEDULES:
        yield "--schedule", SCHEDULES[kind]
    elif not has_one and _is_number(values.get(f"{_PARAMS}lr")):
        yield "--schedule", "constant"  # DeepSpeed without a scheduler changes nothing
    for key, option in (("warmup_num_steps", "--warmup-steps"), ("total_num_steps", "--steps")):
        steps = whole_number(values.get(f"scheduler.params.{key}"))
        if steps is not None:
            yield option, steps
    ratio, rate = values.get("scheduler.params.cos_min_ratio"), values.get(f"{_PARAMS}lr")
    if kind == "WarmupCosineLR" and _is_number(ratio) and _is_number(rate):
        yield "--min-lr", float(f"{ratio * rate:.6g}")


def _forms(values: Mapping[str, Any], source: Source) -> Iterator[tuple[str, object]]:
    open_ones = {item.key for item in source.items if item.value == AUTO}
    precision = values.get("accelerate.mixed_precision")
    if values.get("bf16.enabled") is True or values.get("bfloat16.enabled") is True or precision == "bf16":
        yield "--dtype", "bf16"
    elif values.get("fp16.enabled") is True or precision == "fp16":
        yield "--dtype", "fp16"
    elif not open_ones & {"bf16.enabled", "fp16.enabled", "bfloat16.enabled"} and not (
        source.accelerate or source.fsdp
    ):
        yield "--dtype", "fp32"
    every = whole_number(values.get("steps_per_print"))
    if every is not None and every < _NEVER:
        yield "--log-every", every


def _is_number(value: Any) -> TypeGuard[int | float]:
    """Whether it is a number that an optimizer may be given: finite, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_MOST < value < _MOST
