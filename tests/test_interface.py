"""The names that users write, frozen: the public names with their parameters, the keys of the swap config with their
defaults, and the options of the command line. A change of a list below is a change that every user sees."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

import infinity
from infinity.cli import main as infinity_main
from infinity.cli.bench import main as bench_main

NAMES = {
    "SGD": (
        "(params, lr=0.001, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, *, maximize=False,"
        " max_grad_norm=None, seed=0, accumulation_steps=None, **torchs)"
    ),
    "Adagrad": (
        "(params, lr=0.01, lr_decay=0.0, weight_decay=0.0, initial_accumulator_value=0.0, eps=1e-10, *, "
        "maximize=False, max_grad_norm=None, seed=0, accumulation_steps=None, **torchs)"
    ),
    "Adam": (
        "(params, lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0, amsgrad=False, *, "
        "maximize=False, max_grad_norm=None, seed=0, accumulation_steps=None, **torchs)"
    ),
    "AdamW": (
        "(params, lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01, amsgrad=False, *, "
        "maximize=False, max_grad_norm=None, seed=0, accumulation_steps=None, **torchs)"
    ),
    "ConfigError": "(InfinityError, ValueError)",
    "DamagedFileError": "(ManifestError)",
    "DeviceCopyError": "(SwapIOError, DeviceError)",
    "DeviceError": "(InfinityError, RuntimeError)",
    "DirtyStoreError": "(ResumeError)",
    "ForkError": "(InfinityError)",
    "InfinityConfig": "(swap=None, *, resume=None)",
    "InfinityError": "(Exception)",
    "Lion": (
        "(params, lr=0.0001, betas=(0.9, 0.99), weight_decay=0.0, *, maximize=False, max_grad_norm=None, "
        "seed=0, accumulation_steps=None, **torchs)"
    ),
    "ManifestError": "(ResumeError)",
    "ModelError": "(InfinityError)",
    "NewerVersionError": "(ManifestError)",
    "NonFiniteGradientError": "(InfinityError)",
    "NotAvailableError": "(ConfigError)",
    "PeerError": "(InfinityError)",
    "PlanError": "(InfinityError)",
    "ReleasedParameterError": "(ModelError)",
    "ResumeError": "(InfinityError)",
    "StaleWeightsError": "(ModelError)",
    "Statistics": (
        "(numel, trainable_numel, state_bytes, read_bytes, written_bytes, weight_bytes_read, io_busy_s, "
        "stall_s, device_idle_s, adam_s, steps, updates, committed, cached_bytes, cached_weight_bytes, "
        "arena_bytes, slot_bytes, engine, device, plan)"
    ),
    "StoreLockedError": "(InfinityError)",
    "StoreNotEmptyError": "(InfinityError)",
    "SwapCorruptionError": "(SwapIOError)",
    "SwapIOError": "(InfinityError, OSError)",
    "SwapTimeoutError": "(SwapIOError)",
    "backward": "(model, loss_fn, micro_batches, *, vertical=True)",
    "chunked_cross_entropy": (
        "(hidden, weight, labels, *, bias=None, scale=1.0, softcap=None, ignore_index=-100, divisor=None, "
        "chunk_bytes=268435456)"
    ),
    "close": "(model, *, discard=False)",
    "commit": "(model)",
    "export_checkpoint": "(store_directory, out, *, step=None, config=None, max_shard_size='5GB', also=None)",
    "gathered": "(model, *modules, write=False, grads=False)",
    "load_config": "(source)",
    "load_pretrained": (
        "(path, config=None, *, dtype=torch.bfloat16, model_class=None, device=None, optimizer='adamw', "
        "accumulation_steps=None, tokens=None, resume=False, from_checkpoint=False, defer=False, **kwargs)"
    ),
    "no_sync": "(model)",
    "offload": (
        "(model, config=None, *, device=None, optimizer='adamw', accumulation_steps=None, tokens=None, source=None, "
        "faults=())"
    ),
    "offload_from_checkpoint": (
        "(model, directory, config=None, *, device=None, optimizer='adamw', accumulation_steps=None, tokens=None, "
        "faults=())"
    ),
    "resume": (
        "(model, config=None, *, device=None, optimizer='adamw', accumulation_steps=None, tokens=None, step=None, "
        "folder=None, faults=())"
    ),
    "save_pretrained": "(model, directory, *, max_shard_size='5GB')",
    "state_dict": "(model)",
    "statistics": "(model)",
    "synchronize": "(model)",
    "tile": "(module, tiles)",
    "tile_tokens": "(module, tiles)",
    "trace": "(model, path)",
    "track": "(*objects, model=None, **named)",
    "use_chunked_loss": "(model, use=True)",
}
KEYS: dict[str, object] = {
    "weights": "auto",
    "optimizer": "auto",
    "gradients": "auto",
    "activations": "auto",
    "recompute": "auto",
    "memory.device": None,
    "memory.host": None,
    "nvme.paths": [],
    "nvme.engine": "auto",
    "nvme.block": None,
    "nvme.in_flight": None,
    "nvme.queue_depth": 128,
    "nvme.deadline_s": 300.0,
    "nvme.checksums": True,
    "update.tile": None,
    "update.threads": None,
    "ranks.gather": "auto",
    "ranks.wire": "auto",
    "ranks.deadline_s": None,
    "overlap": "auto",
    "vertical": False,
    "commit_every": "auto",
    "keep": 1,
    "pins": 0,
    "master": "split16",
    "moments": "fp32",
    "experts": "auto",
    "frozen": "auto",
}
OPTIONS = {
    "infinity run": "--verbose --resume config script arguments",
    "infinity finetune": (
        "--options --model --revision --trust-remote-code --data --columns --eval-data --eval-split --eval-steps "
        "--config --output --from-checkpoint --resume --keep-store --method --steps --epochs --batch-size "
        "--micro-batches --gradient-accumulation --sequence-length --loss-on --no-packing --dtype --optimizer --lr "
        "--min-lr --beta1 --beta2 --eps --schedule --warmup-steps --weight-decay --max-grad-norm "
        "--seed --verify-output --lora --lora-alpha --lora-dropout --lora-targets --lora-experts "
        "--merge --freeze --frozen --save-every --save-limit --save-best --sample --sample-tokens --log-every --logger "
        "--verbose --trace --trace-steps"
    ),
    "infinity generate": (
        "--model --revision --trust-remote-code --config --prompt --system --raw --max-tokens --temperature "
        "--seed --dtype --frozen --verbose"
    ),
    "infinity checkpoint list": "directory --verbose",
    "infinity checkpoint verify": "directory --verbose --step",
    "infinity checkpoint export": "directory --verbose --step --output",
    "infinity checkpoint unpin": "directory --verbose --folder --all-gone",
    "infinity checkpoint remove": "directory --verbose --pinned",
    "infinity checkpoint": "",
    "infinity plan": (
        "--model --config --set --swap-dir --revision --trust-remote-code --json --verbose --machine --cpu --ranks "
        "--batch-size --sequence-length --micro-batches --gradient-accumulation --dtype --optimizer --lora "
        "--lora-experts --frozen --clips"
    ),
    "infinity doctor": "config --swap-dir --json --report",
    "infinity convert": "input -o/--output --force",
    "infinity": "--version",
    "infinity-bench": "--version --path --size --engine --json --sustained",
}


def signature(value: Any) -> str:
    """Parameters and their defaults, without types; of an exception its base classes."""
    if isinstance(value, type) and issubclass(value, BaseException):
        return f"({', '.join(base.__name__ for base in value.__bases__)})"
    parameters = inspect.signature(value).parameters.values()
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    return str(inspect.Signature(bare))


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field.get_default(call_default_factory=True)


def options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Return the options and the arguments of each command, in their order."""
    named: list[str] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from options(command)
        elif not isinstance(action, argparse._HelpAction):
            named.append("/".join(action.option_strings) or action.dest)
    yield parser.prog, " ".join(named)


def test_the_public_names_and_their_parameters_are_these() -> None:
    public = {name: getattr(infinity, name) for name in infinity.__all__ if name != "SwapConfig"}
    assert {name: signature(value) for name, value in public.items()} == NAMES


def test_the_keys_of_the_swap_config_and_their_defaults_are_these() -> None:
    assert dict(keys(infinity.SwapConfig)) == KEYS


def test_the_options_of_the_command_line_are_these() -> None:
    made = [infinity_main.build_parser(), bench_main.build_parser()]
    assert dict(found for parser in made for found in options(parser)) == OPTIONS
