"""The table of the options of `infinity finetune`. The parser, the options file and resumed runs use this table."""

from __future__ import annotations

import argparse
from dataclasses import Field, dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from infinity.cli.dataset_rows import DATA_HELP, column
from infinity.cli.options import (
    DEFAULT_DTYPE,
    DTYPE_NAMES,
    FROZEN_NAMES,
    LOGGERS,
    LORA_MAX,
    OPTIMIZERS,
    SEED_MAX,
    SGD_MOMENTUM,
    STEPS_MAX,
    TOKENS_MAX,
    StrictArgumentParser,
    add_arguments,
    argument,
    name,
    number,
    path,
    steps,
    text,
    unless,
    whole,
    word,
)
from infinity.cli.trainer_options import CONFIGS, OURS, Given, take
from infinity.state.moments import OptimizerName

SCHEDULES = ("constant", "linear", "cosine")
"""Schedules of the learning rate that infinity has itself, each with a warm-up.

With linear and cosine, the rate falls to --min-lr.
"""
_OTHER_SCHEDULES = (
    *("constant_with_warmup", "cosine_warmup_with_min_lr", "cosine_with_min_lr", "cosine_with_restarts", "greedy"),
    *("inverse_sqrt", "polynomial", "reduce_lr_on_plateau", "warmup_stable_decay"),
)
"""Other schedules of transformers."""
_HELD_OUT = "eval_data eval_split"
_STEPS, _TOKENS = whole(1, STEPS_MAX), whole(1, TOKENS_MAX)


class ResumeRole(Enum):
    """Effect of an option of the original run on a resumed run. An option without a role has the role TRAINING."""

    PROCESS = "belongs to one process; the run does not record the option"
    PLACE = "is recorded; the files may have moved: a text is compared by its tokens, a model by its layout"
    MEANWHILE = "is recorded, and may change, because it does not affect the trained model"
    TRAINING = "is recorded, and may not change, because it affects the trained model"


_PROCESS: dict[str, Any] = {"role": ResumeRole.PROCESS}
_PLACE: dict[str, Any] = {"role": ResumeRole.PLACE}
_MEANWHILE: dict[str, Any] = {"role": ResumeRole.MEANWHILE}


@dataclass(frozen=True)
class _InputOptions:
    options: Path | None = argument(
        "take options from a YAML file, such as `lr: 1e-5`; an option on the command line overrides the file",
        path,
        metavar="FILE",
        **_PROCESS,
    )
    model: str = argument("directory of a Hugging Face checkpoint, or a hub id", name, **_PLACE)
    revision: str | None = argument("revision of the hub's model: a branch, a tag or a commit", word)
    trust_remote_code: bool = argument(
        "run the Python files that come with the model, if the model needs them; by default they are not run",
        **_PROCESS,
    )
    data: list[Path] = argument(DATA_HELP, path, nargs="+", **_PLACE)
    columns: list[str] | None = argument(
        "columns of the rows to read, with the meaning of each, such as instruction=title output=body; other columns "
        "are not read",
        column,
        nargs="+",
        metavar="NAME=COLUMN",
    )
    eval_data: list[Path] | None = argument(
        "data for evaluation, in the forms of --data; the loss on this data is computed, but the model is not trained "
        "on it",
        path,
        nargs="+",
        excludes="eval_split",
        **_PLACE,
    )
    eval_split: float | None = argument(
        "share of the sequences of --data that are used for evaluation and not for training, such as 0.05",
        number(1e-6, 0.9),
        metavar="SHARE",
    )
    eval_steps: int | None = argument(
        "evaluate after every N steps; by default only after the last step", _STEPS, metavar="N", needs=_HELD_OUT
    )
    config: Path = argument("swap config: where states are kept (YAML or JSON)", path, **_PROCESS)
    output: Path = argument("directory for the trained model and the report", path, **_PLACE)
    from_checkpoint: Path | None = argument(
        "resume a run from the checkpoint that `infinity checkpoint export` wrote to EXPORT_DIR, on any disks and with "
        "any swap config; the run's options need not be given again",
        path,
        metavar="EXPORT_DIR",
        excludes="resume",
        **_PROCESS,
    )
    resume: str | None = argument(
        "resume the run whose generations are in SWAP_DIR (default: nvme.paths of the swap config); the result is bit "
        "for bit that of a run that was not interrupted; the run's options need not be given again",
        name,
        nargs="?",
        const=False,  # an empty name is refused
        metavar="SWAP_DIR",
        **_PROCESS,
    )
    keep_store: bool = argument(
        "keep the generations after the end of the run, so that the run can be continued later (--resume with a larger "
        "--steps); by default they are removed when the output is complete on disk",
        **_MEANWHILE,
    )


@dataclass(frozen=True)
class _TrainingOptions:
    method: str = argument(
        "sft (default): learn text and answers; dpo: learn from pairs of answers to give the better one; reward: learn "
        "from pairs of answers to rate an answer",
        word,
        "sft",
        choices=tuple(CONFIGS),
    )
    steps: int | None = argument(
        "optimizer steps; default: one pass over the data", unless("-1", _STEPS), excludes="epochs"
    )
    epochs: int | None = argument("passes over the data, in place of --steps", _STEPS)
    batch_size: int = argument("sequences per micro-batch (default 1)", _TOKENS, 1)
    micro_batches: int = argument(
        "micro-batches that go through each layer together, so that the layer's weights are fetched only once for all "
        "of them (default 1); with --gradient-accumulation, all micro-batches of a step do",
        _TOKENS,
        1,
        metavar="N",
    )
    gradient_accumulation: int = argument("backward passes per step (default 1)", _TOKENS, 1)
    sequence_length: int = argument("tokens per sequence (default 1024)", _TOKENS, 1024)
    loss_on: Literal["answers", "all"] = argument(
        "tokens that are learned in rows with a prompt or messages: the completion, or what the assistant says "
        "(answers, the default), or all tokens (all)",
        word,
        "answers",
        choices=("answers", "all"),
        methods="sft",
    )
    no_packing: bool = argument(
        "put only one row with a prompt or messages into each sequence; by default as many rows as fit are put into a "
        "sequence, and do not attend to each other",
        methods="sft",
    )
    dtype: str = argument(
        f"dtype of the weights, which need not be the checkpoint's ({DEFAULT_DTYPE}); with fp16 the loss is scaled",
        word,
        choices=DTYPE_NAMES,
    )
    optimizer: OptimizerName = argument(
        f"default adamw; sgd has momentum {SGD_MOMENTUM}. for Lion, use a third to a tenth of the --lr for AdamW",
        word,
        "adamw",
        choices=OPTIMIZERS,
    )
    lr: float = argument(
        "peak learning rate (default 1e-5, with --method dpo 1e-6; with --lora ten times that)", number(1e-12, 1e6)
    )
    min_lr: float = argument(
        "learning rate at the end of the schedules linear and cosine (default 0)", number(0, 1e6), 0.0
    )
    beta1: float | None = argument("beta1 of Adam, AdamW and Lion (default 0.9)", number(0, 1 - 1e-9))
    beta2: float | None = argument("beta2 of Adam, AdamW and Lion (default 0.999; Lion: 0.99)", number(0, 1 - 1e-9))
    eps: float | None = argument(
        "epsilon of Adam and AdamW (default 1e-8) and of Adagrad (default 1e-10)", number(1e-30, 1)
    )
    schedule: str = argument(
        "schedule of the learning rate (default cosine): constant, linear, cosine, or another one of transformers, "
        "such as inverse_sqrt",
        word,
        "cosine",
        choices=(*SCHEDULES, *_OTHER_SCHEDULES),
        metavar="NAME",
    )
    warmup_steps: int = argument(
        "steps at the beginning in which the learning rate rises (default 0)", whole(0, STEPS_MAX), 0
    )
    weight_decay: float = argument("default 0.01", number(0, 1e3), 0.01)
    max_grad_norm: float = argument(
        "maximum norm of the gradients, to which they are clipped; 0: no clipping (default 1.0)",
        number(1e-12, 1e12, or_zero=True),
        1.0,
    )
    seed: int = argument("default 0", whole(0, SEED_MAX), 0)
    verify_output: bool = argument(
        "load the output with plain transformers, and compare its logits with those of the trained model", **_PROCESS
    )


@dataclass(frozen=True)
class _TrainedPartOptions:
    lora: int | None = argument(
        "train only adapters of rank R, which PEFT adds to the model's linear layers (LoRA); the output is the "
        "adapters, or with --merge one model",
        whole(1, LORA_MAX),
        metavar="R",
    )
    lora_alpha: float | None = argument(
        "the output of the adapters is multiplied by A / R (default 2 R)", number(1e-6, 1e6), metavar="A", needs="lora"
    )
    lora_dropout: float | None = argument(
        "dropout of the adapters' inputs (default 0)", number(0, 0.99), metavar="P", needs="lora"
    )
    lora_targets: list[str] | None = argument(
        "layers that get adapters, such as q_proj v_proj (default: all linear layers except the head, and in "
        "mixtures of experts those of attention)",
        text,
        nargs="+",
        metavar="NAME",
        needs="lora",
    )
    lora_experts: bool = argument("train adapters of the experts of a mixture, too", needs="lora")
    merge: bool = argument(
        "write one model in place of the adapters: the base model, with the adapters merged into it",
        needs="lora",
        **_MEANWHILE,
    )
    freeze: list[str] | None = argument(
        "parameters that are not trained, such as 'model.embed_tokens.*' 'model.layers.[0-3].*'",
        text,
        nargs="+",
        metavar="PATTERN",
    )
    frozen: str | None = argument(
        "form in which weights of blocks that are not trained are kept: 4 bits (nf4), 8 bits (int8), or their own form "
        "(bf16); default: `frozen` of the swap config",
        word,
        choices=FROZEN_NAMES,
    )


@dataclass(frozen=True)
class _SavingOptions:
    save_every: int | None = argument(
        "save a model that can be loaded after every N steps, in OUTPUT-steps/checkpoint-N (to resume the run, use "
        "--resume)",
        _STEPS,
        metavar="N",
        **_MEANWHILE,
    )
    save_limit: int | None = argument(
        "keep only the newest K of these models (default: all)", _STEPS, metavar="K", needs="save_every", **_MEANWHILE
    )
    save_best: bool = argument(
        "also keep the model with the lowest held-out loss; the run's last lines say which model it is",
        needs=_HELD_OUT,
        **_MEANWHILE,
    )
    sample: list[str] | None = argument(
        "prompts that the model continues after each evaluation",
        text,
        nargs="+",
        metavar="PROMPT",
        needs=_HELD_OUT,
        methods="sft dpo",
        **_MEANWHILE,
    )
    sample_tokens: int | None = argument(
        "maximum number of tokens of each sample (default 64)", _TOKENS, metavar="N", needs="sample", **_MEANWHILE
    )


@dataclass(frozen=True)
class _ReportingOptions:
    log_every: int | None = argument(
        "print a line, and add an entry to each --logger, every N steps", _STEPS, metavar="N", **_MEANWHILE
    )
    logger: list[str] | None = argument(
        f"trackers that get the figures of the steps during the training: any of {', '.join(LOGGERS)}; or none",
        word,
        nargs="+",
        choices=(*LOGGERS, "none"),
        **_MEANWHILE,
    )
    verbose: bool = argument("log the plan, and the I/O engine with the reason why it was chosen", **_PROCESS)
    trace: Path | None = argument(
        "write a timeline for Perfetto (ui.perfetto.dev) or chrome://tracing: compute, stalls by cause, fetches, "
        "gradients, updates, reads and writes of every unit",
        path,
        metavar="FILE",
        **_PROCESS,
    )
    trace_steps: tuple[int, int] | None = argument(
        "trace steps A to B (default: the second to the sixth); each step of a large model takes megabytes",
        steps,
        metavar="A:B",
        needs="trace",
        **_PROCESS,
    )


@dataclass(frozen=True)
class FinetuneOptions(_ReportingOptions, _SavingOptions, _TrainedPartOptions, _TrainingOptions, _InputOptions):
    """All options of a run. An option that the user does not give has its default value.

    Attributes:
        trainer: values for fields of TRL's config that no other option sets.
    """

    trainer: Given | None = None


_GROUPS: dict[type, tuple[str, str | None]] = {
    _InputOptions: ("what and where", None),
    _TrainingOptions: ("training", None),
    _TrainedPartOptions: ("training a part of the model", "By default all parameters are trained."),
    _SavingOptions: ("during the training", None),
    _ReportingOptions: ("output about the run", None),
}
"""Groups of options in the order of --help, with their titles and descriptions."""
OF_TRAINER: dict[str, Any] = {
    "take": take,
    "renamed": OURS,
    "epilog": "Every other field of TRL's SFTConfig (--method dpo: DPOConfig, reward: RewardConfig) is also an option "
    "under its own name, such as --neftune_noise_alpha 5 or --beta 0.2. A field that has a short name here "
    "can be given under both names, such as --lr and --learning_rate.",
}
"""Arguments for the constructor of a StrictArgumentParser that also accepts the fields of TRL's configs."""


def add_finetune_options(parser: argparse.ArgumentParser) -> None:
    for group, (title, about) in _GROUPS.items():
        add_arguments(parser.add_argument_group(title, about), group, given_only=True)


def build_finetune_parser() -> StrictArgumentParser:
    """Return a parser for the options of `infinity finetune`.

    The command name is not a part of the parsed arguments.
    """
    parser = StrictArgumentParser(prog="infinity finetune", **OF_TRAINER)
    add_finetune_options(parser)
    return parser


def defaults(*roles: ResumeRole) -> dict[str, Any]:
    """Return the default values of the options that have one of these roles.

    The default of `dtype` depends on the machine.
    """
    return {each.name: each.default for each in fields(FinetuneOptions) if _role_of(each) in roles}


def _role_of(option: Field[Any]) -> ResumeRole:
    role: ResumeRole = option.metadata.get("role", ResumeRole.TRAINING)
    return role
