"""The options of `infinity finetune` that TRL's SFTConfig has, by its own names. The names are read from the libraries'
sources: importing the libraries takes seconds, and a wrong option is to be said at once."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError

Given = dict[str, list[str]]
"""The values of such options, as the command line has them, by name."""

_SOURCES = (("transformers", "training_args.py"), ("trl", "trainer/base_config.py"), ("trl", "trainer/sft_config.py"))
_CLASSES = ("TrainingArguments", "_BaseConfig", "SFTConfig")

OURS = {
    "learning_rate": "lr",
    "num_train_epochs": "epochs",
    "max_steps": "steps",
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation",
    "max_length": "sequence_length",
    "output_dir": "output",
    "save_steps": "save_every",
    "save_total_limit": "save_limit",
    "logging_steps": "log_every",
    "report_to": "logger",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_epsilon": "eps",
}
"""Fields that have a short name here."""

_REFUSED = {
    "give --dtype": ("bf16", "fp16", "bf16_full_eval", "fp16_full_eval"),
    "give --optimizer": ("optim", "optim_args", "optim_target_modules"),
    "give --save-every or --save-best": (
        *("save_strategy", "save_only_model", "save_on_each_node", "enable_jit_checkpoint"),
        *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    ),
    "give --eval-steps": ("eval_strategy", "eval_on_start"),
    "give --resume": ("resume_from_checkpoint", "restore_callback_states_from_checkpoint", "ignore_data_skip"),
    "give --model": ("model_init_kwargs",),
    "the swap config says where states live": (
        *("deepspeed", "fsdp", "fsdp_config", "parallelism_config", "accelerator_config", "use_cpu", "ddp_backend"),
        *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "local_rank"),
        *("torch_compile", "torch_compile_backend", "torch_compile_mode", "activation_offloading"),
    ),
    "the data are read, cut and packed here": (
        *("dataset_text_field", "dataset_kwargs", "dataset_num_proc", "packing", "packing_strategy", "padding_free"),
        *("eval_packing", "pad_to_multiple_of", "truncation_mode", "shuffle_dataset", "completion_only_loss"),
        *("assistant_only_loss", "chat_template_path", "eos_token", "pad_token", "remove_unused_columns"),
        *("train_sampling_strategy", "length_column_name", "dataloader_drop_last", "data_seed", "label_names"),
        *("auto_find_batch_size", "batch_eval_metrics", "include_for_metrics"),
    ),
    "upload the output when it is there": (
        *("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push"),
        "hub_revision",
    ),
    "leave it out": ("do_train", "do_eval", "do_predict", "disable_tqdm", "use_liger_kernel", "liger_kernel_config"),
}
"""Fields that a run decides otherwise, by what to do instead."""


@cache
def names() -> frozenset[str]:
    """Of all fields. Those of a library that is not installed are missing."""
    return frozenset(name for package, file in _SOURCES for name in _fields_in(package, file))


def _fields_in(package: str, file: str) -> Iterator[str]:
    spec = importlib.util.find_spec(package)
    for root in () if spec is None else spec.submodule_search_locations or ():
        for made in ast.parse(Path(root, file).read_text(encoding="utf-8")).body:
            if isinstance(made, ast.ClassDef) and made.name in _CLASSES:
                yield from (
                    each.target.id
                    for each in made.body
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and _is_field(each)
                )


def _is_field(assigned: ast.AnnAssign) -> bool:
    made = assigned.value
    return isinstance(made, ast.Call) and isinstance(made.func, ast.Name) and made.func.id == "field"


def require_passed_on(name: str, where: str = "") -> None:
    """Raises ConfigError for a field that a run decides otherwise. Args: where: it is given, for the message."""
    for instead, refused in _REFUSED.items():
        if name in refused:
            raise ConfigError(f"{where}{name} of TRL's SFTConfig is no option of infinity finetune: {instead}")


def take(arguments: Sequence[str]) -> tuple[Given | None, list[str]]:
    """Of arguments that nobody knows, those that are fields, by name, and the others. Raises ConfigError."""
    found: Given = {}
    others: list[str] = []
    values = others
    for text in arguments:
        flag, sign, value = text.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and name in names():
            require_passed_on(name)
            values = found[name] = [value] if sign else []
        elif text.startswith("--"):
            values = others
            others.append(text)
        else:
            values.append(text)
    return found or None, others


def typed(given: Given) -> dict[str, Any]:
    """The values as SFTConfig has them. Raises ConfigError."""
    if not given:
        return {}
    from transformers import HfArgumentParser
    from trl import SFTConfig

    class Checking(HfArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> None:
            raise ConfigError(message)

    arguments = [part for name, values in given.items() for part in (f"--{name}", *values)]
    found = Checking(SFTConfig, allow_abbrev=False).parse_args(arguments)
    return {name: getattr(found, name) for name in given}
