"""Fields of TRL's SFTConfig, DPOConfig and RewardConfig as options of `infinity finetune`.

The names of the fields are read from the source files of the libraries. Importing the libraries would take seconds, and
a wrong option should be an error at once.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError

Given = dict[str, list[str]]
"""Values of fields of TRL's configs, by name, as they are written on the command line."""

CONFIGS = {"sft": "SFTConfig", "dpo": "DPOConfig", "reward": "RewardConfig"}
"""Names of TRL's config classes, by --method."""
_OF_ALL = (("transformers", "training_args.py", "TrainingArguments"), ("trl", "trainer/base_config.py", "_BaseConfig"))

OURS = {
    "learning_rate": "lr",
    "lr_scheduler_type": "schedule",
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
"""Options of infinity that set a field of TRL's configs, by the name of the field."""

_REFUSED = {
    "give --dtype": ("bf16", "fp16", "bf16_full_eval", "fp16_full_eval"),
    "give --optimizer": ("optim", "optim_args", "optim_target_modules"),
    "give --save-every or --save-best": (
        *("save_strategy", "save_only_model", "save_on_each_node", "enable_jit_checkpoint"),
        *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    ),
    "give --eval-steps": ("eval_strategy", "eval_on_start", "eval_delay"),
    "give --log-every": ("logging_strategy",),
    "give --resume": ("resume_from_checkpoint", "restore_callback_states_from_checkpoint", "ignore_data_skip"),
    "give --model": ("model_init_kwargs",),
    "the swap config says where states are kept": (
        *("deepspeed", "fsdp", "fsdp_config", "parallelism_config", "accelerator_config", "use_cpu", "ddp_backend"),
        *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "local_rank"),
        *("torch_compile", "torch_compile_backend", "torch_compile_mode", "activation_offloading"),
    ),
    "`recompute` of the swap config says what is computed again": (
        *("activation_checkpointing", "activation_checkpointing_kwargs"),
        *("gradient_checkpointing", "gradient_checkpointing_kwargs"),
    ),
    "infinity itself reads, cuts and packs the data": (
        *("dataset_text_field", "dataset_kwargs", "dataset_num_proc", "packing", "packing_strategy", "padding_free"),
        *("eval_packing", "pad_to_multiple_of", "truncation_mode", "shuffle_dataset", "completion_only_loss"),
        *("assistant_only_loss", "chat_template_path", "eos_token", "pad_token", "remove_unused_columns"),
        *("train_sampling_strategy", "length_column_name", "data_seed", "label_names"),
        *("auto_find_batch_size", "batch_eval_metrics", "include_for_metrics"),
        *("dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
        *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order"),
    ),
    "upload the output after the run": (
        *("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push"),
        "hub_revision",
    ),
    "the loss is the model's own, in which each learned token has the same weight: leave it out": (
        *("label_smoothing_factor", "average_tokens_across_devices"),
    ),
    "the reference is computed beside each batch: leave it out": (
        *("precompute_ref_log_probs", "precompute_ref_batch_size"),
    ),
    "the reference stays the model that --model names: leave it out": (
        *("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"),
    ),
    "set output_router_logits and router_aux_loss_coef in the model's config.json": ("router_aux_loss_coef",),
    "packed examples would attend to each other: leave it out": ("use_cache",),
    "it would do nothing: leave it out": (
        *("do_train", "do_eval", "do_predict", "disable_tqdm", "use_liger_kernel", "liger_kernel_config", "debug"),
        *("prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps"),
        *("log_on_each_node", "ddp_timeout", "skip_memory_metrics"),
    ),
}
"""Fields that infinity refuses, by the advice in the error.

Infinity chooses their values, or they would have no effect.
"""

_DO_NOTHING_WITHOUT = {
    "label_smoothing": ("loss_type", {"robust", "exo_pair", "aot", "aot_unpaired"}),
    "discopop_tau": ("loss_type", {"discopop"}),
    "f_alpha_divergence_coef": ("f_divergence_type", {"alpha_divergence"}),
}
"""Fields of DPOConfig that have an effect only for some values of another field."""

VALUES = {
    "loss_type": {
        *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
        *("apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
    },
    "f_divergence_type": {"reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"},
}
"""Values that DPOTrainer accepts, by field. DPOTrainer itself would refuse other values only in the first step."""


@cache
def names(method: str | None = None) -> frozenset[str]:
    """Return the names of all fields for a method. If `method` is None, return the fields for all methods.

    Fields of libraries that are not installed are missing from the result.
    """
    own = [("trl", f"trainer/{each}_config.py", CONFIGS[each]) for each in CONFIGS if method in (None, each)]
    return frozenset(name for package, file, kind in (*_OF_ALL, *own) for name in _fields_in(package, file, kind))


def _fields_in(package: str, file: str, kind: str) -> Iterator[str]:
    spec = importlib.util.find_spec(package)
    for root in () if spec is None else spec.submodule_search_locations or ():
        for made in ast.parse(Path(root, file).read_text(encoding="utf-8")).body:
            if isinstance(made, ast.ClassDef) and made.name == kind:
                yield from (
                    each.target.id
                    for each in made.body
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and _is_field(each)
                )


def _is_field(assigned: ast.AnnAssign) -> bool:
    made = assigned.value
    return isinstance(made, ast.Call) and isinstance(made.func, ast.Name) and made.func.id == "field"


def require_passed_on(name: str, where: str = "") -> None:
    """Check that a field is passed on to TRL.

    Args:
        name: name of the field.
        where: place where the field is given, for the message.

    Raises:
        ConfigError: the field is not passed on. The message says what to do instead.
    """
    for instead, refused in _REFUSED.items():
        if name in refused:
            raise ConfigError(f"{where}TRL's {name} is not an option of infinity finetune: {instead}")


def require_of_method(given: Given, method: str) -> None:
    """Check that each given field has an effect with this --method and with the other given fields.

    Raises:
        ConfigError: a field has no effect, or has a value that TRL does not know.
    """
    for name in given:
        if name not in names(method):
            has = ", ".join(f"--method {each}" for each in CONFIGS if name in names(each))
            raise ConfigError(f"--{name} does nothing with --method {method}: leave it out, or give {has}")
        if method == "sft" and name == "loss_type":
            raise ConfigError(f"--{name} does nothing with --method sft: the loss is the model's own. Leave it out")
        if unknown := [each for each in given[name] if each not in VALUES.get(name, {each})]:
            raise ConfigError(f"--{name} {unknown[0]}: it must be one of {', '.join(sorted(VALUES[name]))}")
        other, values = _DO_NOTHING_WITHOUT.get(name, ("", set()))
        if other and values.isdisjoint(given.get(other, ())):
            raise ConfigError(f"--{name} does nothing without --{other} {' or '.join(sorted(values))}")


def take(arguments: Sequence[str]) -> tuple[Given | None, list[str]]:
    """Find the fields of TRL's configs among arguments that the parser does not know.

    Returns:
        The values of the fields by name, or None if there are no fields; and the other arguments.

    Raises:
        ConfigError: a field is not passed on to TRL.
    """
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


def typed(given: Given, method: str) -> dict[str, Any]:
    """Return the values, converted to the types of the fields in TRL's config.

    Raises:
        ConfigError: a value has another type.
    """
    if not given:
        return {}
    import trl
    from transformers import HfArgumentParser

    class TrainerArgumentParser(HfArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> None:
            raise ConfigError(message)

    arguments: list[str] = []
    for name, values in given.items():
        # A value may begin with a dash, such as -1.
        arguments += [f"--{name}={values[0]}"] if len(values) == 1 else [f"--{name}", *values]
    found = TrainerArgumentParser(getattr(trl, CONFIGS[method]), allow_abbrev=False).parse_args(arguments)
    return {name: getattr(found, name) for name in given}
