"""The command line of `infinity`: its commands and their options."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity import __version__
from infinity.cli.finetune_options import OF_TRAINER, add_finetune_options
from infinity.cli.options import (
    DEFAULT_DTYPE,
    DTYPE_NAMES,
    FROZEN_NAMES,
    SEED_MAX,
    STEPS_MAX,
    TOKENS_MAX,
    Parser,
    add_arguments,
    argument,
    name,
    number,
    path,
    text,
    whole,
    word,
)
from infinity.cli.planning.options import PlannedMachine, PlannedModel, Training
from infinity.sizes import THREADS_MAX


def build_parser() -> Parser:
    parser = Parser(
        prog="infinity",
        description="Full fine-tuning of models larger than memory: states on NVMe, moved just in time.",
    )
    parser.add_argument("--version", action="version", version=f"infinity {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    tune = commands.add_parser("finetune", help="fine-tune a causal language model on text or chats", **OF_TRAINER)
    add_finetune_options(tune)
    _add_plan(commands)
    _add_generate(commands)
    _add_run(commands)
    _add_checkpoint(commands)
    _add_doctor(commands)
    _add_convert(commands)
    return parser


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="say whether, where and how fast a model will train, before a byte moves",
        description="Needs no weights. Exit code 1 where the model does not fit; then a change of the swap config is "
        "named with which it does.",
    )
    add_arguments(parser, PlannedModel)
    add_arguments(parser.add_argument_group("the machine", "By default this one, measured now."), PlannedMachine)
    add_arguments(parser.add_argument_group("the training"), Training)


@dataclass(frozen=True)
class Generating:
    """The options of `infinity generate`."""

    model: str | None = argument("directory of a Hugging Face checkpoint, or a hub id", name)
    revision: str | None = argument("of the hub's model: a branch, a tag or a commit", word)
    trust_remote_code: bool = argument(
        "run the Python files that come with the model, where it needs them; by default they are not run"
    )
    config: Path | None = argument("swap config: where the weights live (YAML or JSON)", path)
    prompt: str | None = argument("what the model goes on from; without it stdin is read", text)
    system: str | None = argument("the system's message before it, where there is a chat template", text)
    raw: bool = argument(
        "give the prompt as it is; by default it is a user's message if the tokenizer has a chat template"
    )
    max_tokens: int = argument("default 256", whole(1, TOKENS_MAX), 256, metavar="N")
    temperature: float = argument(
        "draw tokens by their probability at temperature T; by default each is the likeliest one",
        number(1e-6, 1e3, or_zero=True),
        0.0,
        metavar="T",
    )
    top_p: float | None = argument(
        "draw from the likeliest, P in sum", number(1e-6, 1), metavar="P", needs="temperature"
    )
    top_k: int | None = argument("draw from the K likeliest", whole(1, TOKENS_MAX), metavar="K", needs="temperature")
    seed: int | None = argument("default 0", whole(0, SEED_MAX), needs="temperature")
    dtype: str | None = argument(f"of the weights ({DEFAULT_DTYPE})", word, choices=DTYPE_NAMES)
    frozen: str | None = argument(
        "how the weights of blocks rest: in 4 bits (nf4), in 8 (int8), or as they are (bf16); default: as beside the "
        "adapters when they were trained, else `frozen` of the swap config",
        word,
        choices=FROZEN_NAMES,
    )
    threads: int | None = argument("torch's compute threads; default: torch's choice", whole(1, THREADS_MAX))
    verbose: bool = argument("log the plan, the engine and why it was chosen")


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="let a model go on from a prompt, with its weights where the swap config says",
        description="Prints what a causal language model writes, token by token.",
    )
    add_arguments(parser, Generating)


def _add_run(commands: Any) -> None:
    parser = commands.add_parser(
        "run",
        help="run an unchanged training script (Trainer, TRL, PEFT, Accelerate, Lightning) with its model offloaded",
        usage="infinity run [--verbose] [--resume FOLDER] CONFIG SCRIPT [ARGS...]",
    )
    parser.add_argument("--verbose", action="store_true", help="log the plan of each model")
    parser.add_argument(
        "--resume",
        type=path,
        metavar="FOLDER",
        help="go on from the generation that this folder pins: for the first trainer.train() of a script, or a loop of "
        "Accelerate, which calls accelerator.load_state(FOLDER). Scripts of Lightning name ckpt_path=",
    )
    parser.add_argument("config", type=path, metavar="CONFIG", help="swap config: where states live (YAML or JSON)")
    parser.add_argument("script", type=path, metavar="SCRIPT", help="the script, as for python")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")


def _add_checkpoint(commands: Any) -> None:
    parser = commands.add_parser(
        "checkpoint", help="look at, check, copy or remove the generations in a swap directory"
    )
    acts = parser.add_subparsers(dest="act", required=True)
    about = {
        "list": "list the generations: step, time, size",
        "verify": "read all generations and name what is damaged",
        "export": "write a portable copy of a generation: weights and optimizer states as safetensors",
        "unpin": "let the generations go that checkpoint folders pin",
        "remove": "delete all generations and free their space",
    }
    for verb, told in about.items():
        act = acts.add_parser(verb, help=told, description=told)
        act.add_argument("directory", type=path, nargs="+", help="the run's nvme.paths, in their order")
        act.add_argument("--verbose", action="store_true", help="log what the command does")
        if verb in ("verify", "export"):
            act.add_argument(
                "--step",
                type=whole(1, STEPS_MAX),
                help="this generation only (export: default the newest that is whole)",
            )
        if verb == "unpin":
            act.add_argument(
                "--folder", type=path, action="append", help="this checkpoint folder; may be given several times"
            )
            act.add_argument("--all-gone", action="store_true", help="all folders that are not there any more")
        if verb == "remove":
            act.add_argument(
                "--pinned",
                action="store_true",
                help="also where checkpoint folders pin generations: no run can go on from these folders then",
            )
        if verb == "export":
            act.add_argument("--output", type=path, required=True, help="directory for the copy; missing or empty")


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say whether this machine is ready, what is missing, and the command that mends it",
        description="Looks at versions, memory, GPUs, disks and limits. Exit code 0: a run can work here; 1: something "
        "is missing that it needs.",
    )
    parser.add_argument("config", type=path, nargs="?", metavar="SWAP_CONFIG", help="whose nvme.paths are looked at")
    parser.add_argument(
        "--swap-dir",
        type=path,
        nargs="+",
        default=[],
        metavar="DIR",
        help="directories, one per disk, to look at as well (default without a swap config: .)",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the report as JSON")
    form.add_argument(
        "--report",
        action="store_true",
        help="print the report as Markdown to paste into an issue, without names of users, hosts and directories",
    )


def _add_convert(commands: Any) -> None:
    parser = commands.add_parser(
        "convert",
        help="make a swap config of a config of DeepSpeed or FSDP",
        description="Makes a swap config of a DeepSpeed config or Trainer's --fsdp_config (JSON), or of a config file "
        "of Accelerate that has one of both, and says what became of each of its keys.",
    )
    parser.add_argument("input", type=path, metavar="CONFIG", help="that config, or Accelerate's config file")
    parser.add_argument(
        "-o",
        "--output",
        type=path,
        metavar="FILE",
        help="write the swap config there, and the report to stdout (default: to stdout, and the report to stderr)",
    )
    parser.add_argument("--force", action="store_true", help="replace FILE where it is there already")
