"""Errors for scripts that use DeepSpeed or FSDP under `infinity run`.

The error is raised before DeepSpeed or FSDP is loaded, and says what to remove from the script.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from infinity.errors import ConfigError
from infinity.integrations.patches import Patches


def refuse_argument(arguments: Sequence[str]) -> None:
    """Raise ConfigError if the arguments of a script have --deepspeed. Nothing was imported for the script yet."""
    for number, word in enumerate(arguments):
        name, sign, value = word.partition("=")
        if name != "--deepspeed":
            continue
        file = value if sign else next(iter(arguments[number + 1 :]), "-")
        if file:
            known = not file.startswith(("-", "{"))
            given = f"--deepspeed {shlex.quote(file)}" if known else "--deepspeed"
            raise _refusal(given, "--deepspeed", file if known else None)


def refuse_arguments(patches: Patches, training_args: ModuleType) -> None:
    """Make TrainingArguments raise ConfigError if `deepspeed` or `fsdp` is given."""
    patches.wrap(training_args.TrainingArguments, "__post_init__", _arguments)


def refuse_plugin(patches: Patches, dataclasses: ModuleType) -> None:
    """Make accelerate's DeepSpeedPlugin and FullyShardedDataParallelPlugin raise ConfigError."""
    patches.wrap(dataclasses.DeepSpeedPlugin, "__post_init__", _plugin)
    patches.wrap(dataclasses.FullyShardedDataParallelPlugin, "__post_init__", _fsdp_plugin)


def _arguments(original: Callable[..., None], arguments: Any, *args: Any) -> None:
    given = arguments.deepspeed
    if arguments.fsdp and not given:
        config = arguments.fsdp_config
        both = "--fsdp and --fsdp_config, or fsdp= and fsdp_config="
        raise _refusal("fsdp of TrainingArguments", both, config if isinstance(config, str) else None, "an FSDP")
    if not given:
        original(arguments, *args)
        return
    file = given if isinstance(given, str) and not given.lstrip().startswith("{") else None
    raise _refusal(f"deepspeed={repr(file) if file else '{...}'} of TrainingArguments", "deepspeed=", file)


def _plugin(original: Callable[..., None], plugin: Any, *args: Any) -> None:
    file = plugin.hf_ds_config or os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    file = file if isinstance(file, str) and file != "none" else None
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise _refusal(
            "DeepSpeed in the config of accelerate",
            "--use_deepspeed, or distributed_type: DEEPSPEED, of accelerate",
            file,
        )
    raise _refusal("DeepSpeedPlugin of accelerate", "deepspeed_plugin= of the Accelerator, and the plugin", file)


def _fsdp_plugin(original: Callable[..., None], plugin: Any, *args: Any) -> None:
    out = "--use_fsdp, or distributed_type: FSDP, of accelerate; or fsdp_plugin= of the Accelerator, and the plugin"
    raise _refusal("FSDP of accelerate", out, None, "an FSDP")


def _refusal(what: str, out: str, file: str | None, whose: str = "a DeepSpeed") -> ConfigError:
    name = "FILE" if file is None else shlex.quote(file)
    return ConfigError(
        f"{what}: under `infinity run` infinity offloads the model, without {whose.split()[1]}. Remove {out}; "
        f"`infinity convert {name} -o swap.yaml` converts {whose} config to a swap config."
    )
