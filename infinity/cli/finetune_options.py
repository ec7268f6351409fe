"""The table of the options of `infinity finetune`. The parser, the options file and resumed runs use this table."""

from __future__ import annotations

import argparse
from dataclasses import Field, dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from infinity.cli.fields import DATA_HELP, column
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
    Parser,
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
from infinity.sizes import THREADS_MAX
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


class Role(Enum):
    """What a resumed run does with an option of the original run. An option without a role has the role TRAINING."""

    PROCESS = "belongs to one process; a run does not keep it"
    PLACE = "is kept; its files may have moved: text is compared by its tokens, a model by its layout"
    MEANWHILE = "is kept, and may change: it decides nothing of the trained model"
    TRAINING = "is kept, and may not change: it decides the bits of the result"


_PROCESS: dict[str, Any] = {"role": Role.PROCESS}
_PLACE: dict[str, Any] = {"role": Role.PLACE}
_MEANWHILE: dict[str, Any] = {"role": Role.MEANWHILE}


@dataclass(frozen=True)
class _WhatAndWhere:
    options: Path | None = argument(
        "take options from a YAML file, such as `lr: 1e-5`; what the command line says goes before it",
        path,
        metavar="FILE",
        **_PROCESS,
    )
    model: str = argument("directory of a Hugging Face checkpoint, or a hub id", name, **_PLACE)
    revision: str | None = argument("of the hub's model: a branch, a tag or a commit", word)
    trust_remote_code: bool = argument(
        "run the Python files that come with the model, where it needs them; by default they are not run", **_PROCESS
    )
    data: list[Path] = argument(DATA_HELP, path, nargs="+", **_PLACE)
    columns: list[str] | None = argument(
        "columns of the rows to read, and as what, such as instruction=title output=body; no others are read",
        column,
        nargs="+",
        metavar="NAME=COLUMN",
    )
    eval_data: list[Path] | None = argument(
        "data as --data, for the loss on what is not trained on", path, nargs="+", excludes="eval_split", **_PLACE
    )
    eval_split: float | None = argument(
        "hold a share of the sequences of --data out for that, such as 0.05", number(1e-6, 0.9), metavar="SHARE"
    )
    eval_steps: int | None = argument(
        "every N steps; by default after the last step only", _STEPS, metavar="N", needs=_HELD_OUT
    )
    config: Path = argument("swap config: where states live (YAML or JSON)", path, **_PROCESS)
    output: Path = argument("directory for the trained model and the report", path, **_PLACE)
    from_checkpoint: Path | None = argument(
        "go on with a run from the copy that `infinity checkpoint export` wrote to EXPORT_DIR, on any disks and with "
        "any swap config; the run's options need not be given again",
        path,
        metavar="EXPORT_DIR",
        excludes="resume",
        **_PROCESS,
    )
    resume: str | None = argument(
        "go on with the run whose generations are in SWAP_DIR (default: the config's nvme.paths), and end in the bits "
        "of a run that never stopped; the run's options need not be given again",
        name,
        nargs="?",
        const=False,  # an empty name is refused
        metavar="SWAP_DIR",
        **_PROCESS,
    )
    keep_store: bool = argument(
        "keep the generations of a run that has ended, so that it can go on later (--resume with more --steps); by "
        "default they are removed once the output is complete on disk",
        **_MEANWHILE,
    )


@dataclass(frozen=True)
class _Training:
    method: str = argument(
        "learn text and answers (sft, the default), or of two answers which is better: as a model that gives it (dpo), "
        "or as a model that says how good an answer is (reward)",
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
        "micro-batches that go through one layer of the model before the next one, so that its weights are fetched "
        "once for all (default 1); with --gradient-accumulation all of a step do",
        _TOKENS,
        1,
        metavar="N",
    )
    gradient_accumulation: int = argument("backward passes per step (default 1)", _TOKENS, 1)
    sequence_length: int = argument("tokens per sequence (default 1024)", _TOKENS, 1024)
    loss_on: Literal["answers", "all"] = argument(
        "of rows with a prompt or messages: learn the completion, or what the assistant says (answers, the default), "
        "or everything (all)",
        word,
        "answers",
        choices=("answers", "all"),
        methods="sft",
    )
    no_packing: bool = argument(
        "one row with a prompt or messages per sequence; by default as many as fit, which do not see each other",
        methods="sft",
    )
    dtype: str = argument(
        f"of the weights, whatever the checkpoint has ({DEFAULT_DTYPE}); with fp16 the loss is scaled",
        word,
        choices=DTYPE_NAMES,
    )
    optimizer: OptimizerName = argument(
        f"default adamw; sgd has momentum {SGD_MOMENTUM}. Lion wants a third to a tenth of AdamW's --lr",
        word,
        "adamw",
        choices=OPTIMIZERS,
    )
    lr: float = argument(
        "peak learning rate (default 1e-5, with --method dpo 1e-6; with --lora ten times that)", number(1e-12, 1e6)
    )
    min_lr: float = argument("rate that the schedules linear and cosine fall to (default 0)", number(0, 1e6), 0.0)
    beta1: float | None = argument("of Adam, AdamW and Lion (default 0.9)", number(0, 1 - 1e-9))
    beta2: float | None = argument("of the same (default 0.999; Lion: 0.99)", number(0, 1 - 1e-9))
    eps: float | None = argument("of Adam and AdamW (default 1e-8), and Adagrad (1e-10)", number(1e-30, 1))
    schedule: str = argument(
        "schedule of the learning rate (default cosine): constant, linear, cosine, or another one of transformers, "
        "such as inverse_sqrt",
        word,
        "cosine",
        choices=(*SCHEDULES, *_OTHER_SCHEDULES),
        metavar="NAME",
    )
    warmup_steps: int = argument("steps in which the rate rises (default 0)", whole(0, STEPS_MAX), 0)
    weight_decay: float = argument("default 0.01", number(0, 1e3), 0.01)
    max_grad_norm: float = argument(
        "norm to clip to; 0: no clipping (default 1.0)", number(1e-12, 1e12, or_zero=True), 1.0
    )
    seed: int = argument("default 0", whole(0, SEED_MAX), 0)
    threads: int | None = argument(
        "torch's compute threads; default: torch's choice", whole(1, THREADS_MAX), **_PROCESS
    )
    verify_output: bool = argument("reload the result with plain transformers and compare logits", **_PROCESS)


@dataclass(frozen=True)
class _PartOfTheModel:
    lora: int | None = argument(
        "train adapters of rank R beside the model's linear layers, and nothing else (LoRA, by PEFT); the output is "
        "the adapters, or with --merge one model",
        whole(1, LORA_MAX),
        metavar="R",
    )
    lora_alpha: float | None = argument(
        "the adapters count A / R times (default 2 R)", number(1e-6, 1e6), metavar="A", needs="lora"
    )
    lora_dropout: float | None = argument(
        "of what adapters see (default 0)", number(0, 0.99), metavar="P", needs="lora"
    )
    lora_targets: list[str] | None = argument(
        "layers that have adapters, such as q_proj v_proj (default: all linear ones but the head)",
        text,
        nargs="+",
        metavar="NAME",
        needs="lora",
    )
    merge: bool = argument(
        "write one model in place of the adapters: that which they are of, with them merged into it",
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
        "how weights of blocks rest that are not trained: in 4 bits (nf4), in 8 (int8), or as they are (bf16); "
        "default: `frozen` of the swap config",
        word,
        choices=FROZEN_NAMES,
    )


@dataclass(frozen=True)
class _WhileItTrains:
    save_every: int | None = argument(
        "save the model after every N steps, as OUTPUT-steps/checkpoint-N, for use (a run goes on with --resume)",
        _STEPS,
        metavar="N",
        **_MEANWHILE,
    )
    save_limit: int | None = argument(
        "keep the newest K of these (default: all)", _STEPS, metavar="K", needs="save_every", **_MEANWHILE
    )
    save_best: bool = argument(
        "keep the model with the lowest loss on held-out data, too; the run's last lines say which it is",
        needs=_HELD_OUT,
        **_MEANWHILE,
    )
    sample: list[str] | None = argument(
        "after each evaluation, let the model go on from these",
        text,
        nargs="+",
        metavar="PROMPT",
        needs=_HELD_OUT,
        methods="sft dpo",
        **_MEANWHILE,
    )
    sample_tokens: int | None = argument(
        "for at most N tokens each (default 64)", _TOKENS, metavar="N", needs="sample", **_MEANWHILE
    )


@dataclass(frozen=True)
class _WhatIsSaid:
    log_every: int | None = argument(
        "a line, and an entry of each --logger, every N steps", _STEPS, metavar="N", **_MEANWHILE
    )
    logger: list[str] | None = argument(
        f"where the figures of the steps go while it trains: any of {', '.join(LOGGERS)}; or none",
        word,
        nargs="+",
        choices=(*LOGGERS, "none"),
        **_MEANWHILE,
    )
    verbose: bool = argument("log the plan, the engine and why it was chosen", **_PROCESS)
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
class FinetuneOptions(_WhatIsSaid, _WhileItTrains, _PartOfTheModel, _Training, _WhatAndWhere):
    """All options of a run. An option that the user does not give has its default value.

    Attributes:
        trainer: values for fields of TRL's config that no other option sets.
    """

    trainer: Given | None = None


_GROUPS: dict[type, tuple[str, str | None]] = {
    _WhatAndWhere: ("what and where", None),
    _Training: ("training", None),
    _PartOfTheModel: ("a part of the model", "By default all parameters are trained."),
    _WhileItTrains: ("while it trains", None),
    _WhatIsSaid: ("what is said of the run", None),
}
"""Groups of options in the order of --help, with their titles and descriptions."""
OF_TRAINER: dict[str, Any] = {
    "take": take,
    "renamed": OURS,
    "epilog": "Every other field of TRL's SFTConfig (--method dpo: DPOConfig, reward: RewardConfig) is an option by "
    "its own name, such as --neftune_noise_alpha 5 or --beta 0.2; so are those that have a short name here, such as "
    "--learning_rate.",
}
"""Arguments for the constructor of a Parser that also accepts the fields of TRL's configs."""


def add_finetune_options(parser: argparse.ArgumentParser) -> None:
    for group, (title, about) in _GROUPS.items():
        add_arguments(parser.add_argument_group(title, about), group, given_only=True)


def build_finetune_parser() -> Parser:
    """Return a parser for the options of `infinity finetune`.

    The command name is not a part of the parsed arguments.
    """
    parser = Parser(prog="infinity finetune", **OF_TRAINER)
    add_finetune_options(parser)
    return parser


def defaults(*roles: Role) -> dict[str, Any]:
    """Return the default values of the options that have one of these roles.

    The default of `dtype` depends on the machine.
    """
    return {each.name: each.default for each in fields(FinetuneOptions) if _role_of(each) in roles}


def _role_of(option: Field[Any]) -> Role:
    role: Role = option.metadata.get("role", Role.TRAINING)
    return role
