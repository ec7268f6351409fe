"""The arguments of TRL's SFTTrainer for the options of a run."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

from trl import SFTConfig

from infinity.base.accelerator import current_device
from infinity.cli.trainer_options import typed
from infinity.echo import raised
from infinity.errors import ConfigError


def arguments_of(
    options: argparse.Namespace, steps: int, directory: Path, *, evaluates: bool, balances: bool
) -> SFTConfig:
    """All of them. What differs from TRL's own defaults is written out here. Raises ConfigError for options that TRL
    refuses.

    Args:
        steps: of the run.
        directory: for the models of --save-every and --save-best, and for the files of trackers.
        evaluates: whether some sequences are held out.
        balances: whether the model's config asks for the loss that spreads tokens over experts.
    """
    given: dict[str, Any] = {
        "output_dir": str(directory),
        "max_steps": steps,
        "per_device_train_batch_size": options.batch_size,
        "per_device_eval_batch_size": options.batch_size,
        "gradient_accumulation_steps": options.gradient_accumulation * options.micro_batches,
        "max_length": options.sequence_length,
        "learning_rate": options.lr,
        "warmup_steps": options.warmup_steps,
        "weight_decay": options.weight_decay,
        "seed": options.seed % 2**32,  # numpy takes no larger one; the order of the data is of all of it
        "use_cpu": current_device().type == "cpu",
        "report_to": [name for name in options.logger or () if name != "tensorboard"],  # training.py
        "run_name": options.output.name,
        "logging_steps": options.log_every or 1,
        # The tokens are made already, and the batches: data.py.
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "remove_unused_columns": False,
        # The weights have the dtype of --dtype, with fp32 masters: there is nothing to cast.
        "bf16": False,
        "fp16": False,
        # `recompute` of the swap config says what is computed again.
        "gradient_checkpointing": False,
        # The optimizer clips in its update, exactly (make_optimizer).
        "max_grad_norm": 0.0,
        "logging_nan_inf_filter": False,
        "router_aux_loss_coef": None if balances else 0.0,
        "disable_tqdm": True,
    }
    given |= _schedule(options) | _evaluation(options, steps, evaluates=evaluates) | _saving(options, steps)
    given |= typed(options.trainer or {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # TRL names some of transformers' arguments by older names
        try:
            return SFTConfig(**given)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"TRL's SFTConfig refuses the options: {raised(error)}") from error


def _schedule(options: argparse.Namespace) -> dict[str, Any]:
    """transformers' schedule, with the rate that it falls to."""
    lowest = options.min_lr
    if "lr_scheduler_type" in (options.trainer or {}):
        return {}
    if options.schedule == "constant" or lowest == options.lr:
        return {"lr_scheduler_type": "constant_with_warmup"}
    if options.schedule == "linear":
        return {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": lowest, "power": 1.0}}
    return {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": lowest}}


def _evaluation(options: argparse.Namespace, steps: int, *, evaluates: bool) -> dict[str, Any]:
    if not evaluates:
        return {"eval_strategy": "no"}
    return {"eval_strategy": "steps", "eval_steps": options.eval_steps or steps}


def _saving(options: argparse.Namespace, steps: int) -> dict[str, Any]:
    """Models for use: a run goes on from its store, so that no checkpoint needs its states. The best one is saved after
    its evaluation (step_watch.py)."""
    if not (options.save_every or options.save_best):
        return {"save_strategy": "no"}
    return {
        "save_strategy": "steps",
        "save_only_model": True,
        "save_steps": options.save_every or steps + 1,
        "save_total_limit": options.save_limit if options.save_every else 1,
        **({"metric_for_best_model": "loss", "greater_is_better": False} if options.save_best else {}),
    }
