"""The arguments that TRL's trainers get for the options of a run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import trl
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainingArguments, get_scheduler

from infinity.base.accelerator import current_device
from infinity.cli.finetune_options import SCHEDULES, FinetuneOptions
from infinity.cli.run_directory import directory_of
from infinity.cli.trainer_options import CONFIGS, require_of_method, typed
from infinity.errors import ConfigError
from infinity.quoting import raised

_OF_SCHEDULE = "lr_scheduler_kwargs"


def check(options: FinetuneOptions) -> None:
    """Check the options before any slow work.

    Raises:
        ConfigError: TRL or transformers refuses options, or an option has no effect.
    """
    given = options.trainer or {}
    require_of_method(given, options.method)
    if options.min_lr and (_OF_SCHEDULE in given or options.schedule not in ("linear", "cosine")):
        beside = f"--{_OF_SCHEDULE}" if _OF_SCHEDULE in given else f"--schedule {options.schedule}"
        raise ConfigError(f"--min-lr does nothing with {beside}: leave it out")
    steps = options.steps or options.warmup_steps + 1
    evaluates = bool(options.eval_data or options.eval_split)
    arguments = arguments_of(options, steps, directory_of(options.output), evaluates=evaluates, balances=False)
    schedule = schedule_of(arguments, torch.optim.SGD([torch.zeros(1)], lr=options.lr), steps)
    if isinstance(schedule, LambdaLR):
        with _naming_the_schedule(arguments):
            schedule.lr_lambdas[0](options.warmup_steps)  # a schedule uses some of its arguments only after the warm-up


def schedule_of(arguments: TrainingArguments, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """Return transformers' schedule of the learning rate.

    Raises:
        ConfigError: transformers refuses the schedule or its arguments.
    """
    with _naming_the_schedule(arguments):
        warm = arguments.get_warmup_steps(steps)
        return get_scheduler(arguments.lr_scheduler_type, optimizer, warm, steps, arguments.lr_scheduler_kwargs)


def take_up_rates(optimizer: torch.optim.Optimizer, schedule: Any) -> None:
    """Set the learning rates of the next step.

    The learning rates in the generation may be wrong, because --steps may have changed since then.
    """
    if not isinstance(schedule, LambdaLR):
        return
    factors = (factor(schedule.last_epoch) for factor in schedule.lr_lambdas)
    rates = [peak * factor for peak, factor in zip(schedule.base_lrs, factors, strict=True)]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule.load_state_dict(schedule.state_dict() | {"_last_lr": rates})  # trackers show these learning rates


@contextmanager
def _naming_the_schedule(arguments: TrainingArguments) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, ArithmeticError) as error:
        kind, how = arguments.lr_scheduler_type.value, arguments.lr_scheduler_kwargs
        kwargs = f" with --{_OF_SCHEDULE} {how}" if how else ""
        raise ConfigError(f"--schedule {kind}{kwargs} cannot be used for this run: {raised(error)}") from error


def arguments_of(options: FinetuneOptions, steps: int, directory: Path, *, evaluates: bool, balances: bool) -> Any:
    """Return all arguments for a TRL trainer. This function sets every value that differs from TRL's defaults.

    Args:
        options: options of the run.
        steps: number of steps of the run.
        directory: directory for the models of --save-every and --save-best, and for the files of trackers.
        evaluates: whether there are sequences for evaluation.
        balances: whether the model's config asks for the loss that balances tokens over experts.

    Raises:
        ConfigError: TRL refuses the options.
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
        # numpy accepts no larger seed, but the order of the data depends on the whole seed
        "seed": options.seed % 2**32,
        "use_cpu": current_device().type == "cpu",
        "report_to": [],  # trackers.py makes the callbacks for --logger
        "run_name": options.output.name,
        "logging_steps": options.log_every or 1,
        "remove_unused_columns": False,  # the collator reads the columns
        # The weights have the dtype of --dtype, with fp32 masters. Therefore nothing is cast in the forward.
        "bf16": False,
        "fp16": False,
        # The key `recompute` of the swap config decides which activations are recomputed.
        "gradient_checkpointing": False,
        # The optimizer's update clips the gradients (make_optimizer).
        "max_grad_norm": 0.0,
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,
    }
    if options.method == "sft":
        given["dataset_kwargs"] = {"skip_prepare_dataset": True}  # data.py has already made the tokens
    if options.method != "reward":
        given["router_aux_loss_coef"] = None if balances else 0.0
    given |= _schedule(options, steps) | _evaluation(options, steps, evaluates=evaluates) | _saving(options, steps)
    given |= typed(options.trainer or {}, options.method)
    kind = CONFIGS[options.method]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # for some of transformers' arguments, TRL uses the older name
        try:
            return getattr(trl, kind)(**given)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"TRL's {kind} refuses the options: {raised(error)}") from error


def _schedule(options: FinetuneOptions, steps: int) -> dict[str, Any]:
    """Return the arguments for the schedule: its name in transformers, and the learning rate at its end."""
    lowest = options.min_lr
    if options.schedule not in SCHEDULES or _OF_SCHEDULE in (options.trainer or {}):
        return {"lr_scheduler_type": options.schedule}
    if options.schedule == "constant" or lowest == options.lr or options.warmup_steps >= steps:
        return {"lr_scheduler_type": "constant_with_warmup"}
    if options.schedule == "linear":
        return {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": lowest, "power": 1.0}}
    return {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": lowest}}


def _evaluation(options: FinetuneOptions, steps: int, *, evaluates: bool) -> dict[str, Any]:
    if not evaluates:
        return {"eval_strategy": "no"}
    return {"eval_strategy": "steps", "eval_steps": options.eval_steps or steps}


def _saving(options: FinetuneOptions, steps: int) -> dict[str, Any]:
    """Return the arguments for saving models that a user can load.

    These models are saved without optimizer states, because a run is resumed from its store.

    The best model is saved after its evaluation (step_watch.py). run_directory.py decides which models are kept.
    """
    if not (options.save_every or options.save_best):
        return {"save_strategy": "no"}
    return {
        "save_strategy": "steps",
        "save_only_model": True,
        "save_steps": options.save_every or steps + 1,
        **({"metric_for_best_model": "loss", "greater_is_better": False} if options.save_best else {}),
    }
