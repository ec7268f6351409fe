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
    StrictArgumentParser,
    add_arguments,
    argument,
    name,
    number,
    path,
    text,
    whole,
    word,
)
from infinity.cli.planning.options import PlannedMachine, PlannedModel, PlannedTraining


def build_parser() -> StrictArgumentParser:
    parser = StrictArgumentParser(
        prog="infinity",
        description="Full fine-tuning of models that are larger than memory. The states are on NVMe, and are moved "
        "just before they are needed.",
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
        help="predict whether a model fits, where its states are placed and how fast it trains",
        description="The weights of the model are not needed. Exit code 1: the model does not fit; the report then "
        "names a change of the swap config with which the model fits.",
    )
    add_arguments(parser, PlannedModel)
    add_arguments(
        parser.add_argument_group("the machine", "The default is this machine, whose rates are measured now."),
        PlannedMachine,
    )
    add_arguments(parser.add_argument_group("the training"), PlannedTraining)


@dataclass(frozen=True)
class GenerateOptions:
    """The options of `infinity generate`."""

    model: str | None = argument("directory of a Hugging Face checkpoint, or a hub id", name)
    revision: str | None = argument("revision of the hub's model: a branch, a tag or a commit", word)
    trust_remote_code: bool = argument(
        "run the Python files that come with the model, if the model needs them; by default they are not run"
    )
    config: Path | None = argument("swap config: where the weights are kept (YAML or JSON)", path)
    prompt: str | None = argument(
        "text that the model continues; without this option the text is read from stdin", text
    )
    system: str | None = argument("system message before the prompt, if the tokenizer has a chat template", text)
    raw: bool = argument(
        "pass the prompt to the model unchanged; by default the prompt is a user's message if the tokenizer has a chat "
        "template"
    )
    max_tokens: int = argument("default 256", whole(1, TOKENS_MAX), 256, metavar="N")
    temperature: float = argument(
        "draw each token by its probability at temperature T; by default each token is the likeliest one",
        number(1e-6, 1e3, or_zero=True),
        0.0,
        metavar="T",
    )
    seed: int | None = argument("default 0", whole(0, SEED_MAX), needs="temperature")
    dtype: str | None = argument(f"of the weights ({DEFAULT_DTYPE})", word, choices=DTYPE_NAMES)
    frozen: str | None = argument(
        "form in which the weights of blocks are kept: 4 bits (nf4), 8 bits (int8), or their own form (bf16); default: "
        "for adapters, the form in which the weights were kept when the adapters were trained; otherwise `frozen` of "
        "the swap config",
        word,
        choices=FROZEN_NAMES,
    )
    verbose: bool = argument("log the plan, and the I/O engine with the reason why it was chosen")


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="continue a prompt with a model whose weights are kept where the swap config says",
        description="Prints the text of a causal language model, token by token.",
    )
    add_arguments(parser, GenerateOptions)


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
        help="resume from the generation that this checkpoint folder pins, in the first trainer.train() of the script, "
        "or in a loop of Accelerate that calls accelerator.load_state(FOLDER). A script of Lightning gives "
        "ckpt_path= instead",
    )
    parser.add_argument("config", type=path, metavar="CONFIG", help="swap config: where states are kept (YAML or JSON)")
    parser.add_argument("script", type=path, metavar="SCRIPT", help="the script that python would run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")


def _add_checkpoint(commands: Any) -> None:
    parser = commands.add_parser(
        "checkpoint", help="list, verify, export, unpin or remove the generations in a swap directory"
    )
    acts = parser.add_subparsers(dest="act", required=True)
    about = {
        "list": "list the generations, with step, time and size",
        "verify": "read all generations and name the damaged ones",
        "export": "write a portable copy of a generation: weights and optimizer states as safetensors",
        "unpin": "unpin generations that checkpoint folders pin",
        "remove": "remove all generations and free their space",
    }
    for verb, told in about.items():
        act = acts.add_parser(verb, help=told, description=told)
        act.add_argument("directory", type=path, nargs="+", help="the run's nvme.paths, in their order")
        act.add_argument("--verbose", action="store_true", help="log what the command does")
        if verb in ("verify", "export"):
            act.add_argument(
                "--step",
                type=whole(1, STEPS_MAX),
                help="only the generation of step N (default of export: the newest complete generation)",
            )
        if verb == "unpin":
            act.add_argument(
                "--folder",
                type=path,
                action="append",
                help="a checkpoint folder whose generation is unpinned; may be given several times",
            )
            act.add_argument(
                "--all-gone",
                action="store_true",
                help="unpin the generations of all checkpoint folders that no longer exist",
            )
        if verb == "remove":
            act.add_argument(
                "--pinned",
                action="store_true",
                help="remove the generations even if checkpoint folders pin them; no run can then resume from these "
                "folders",
            )
        if verb == "export":
            act.add_argument(
                "--output",
                type=path,
                required=True,
                help="directory for the exported checkpoint, which must be missing or empty",
            )


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="report whether this machine is ready, what is missing, and the commands that repair it",
        description="Checks versions, memory, GPUs, disks and limits. Exit code 0: a run can work on this machine; 1: "
        "something that a run needs is missing.",
    )
    parser.add_argument(
        "config", type=path, nargs="?", metavar="SWAP_CONFIG", help="swap config whose nvme.paths are checked"
    )
    parser.add_argument(
        "--swap-dir",
        type=path,
        nargs="+",
        default=[],
        metavar="DIR",
        help="further directories to check, one per disk (default without a swap config: .)",
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
        help="convert a config of DeepSpeed or FSDP to a swap config",
        description="Converts a DeepSpeed config, a Trainer's --fsdp_config (JSON), or a config file of Accelerate "
        "with keys of DeepSpeed or FSDP, to a swap config. The report says for each key how it was "
        "converted.",
    )
    parser.add_argument(
        "input", type=path, metavar="CONFIG", help="the DeepSpeed config or FSDP config, or Accelerate's config file"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=path,
        metavar="FILE",
        help="write the swap config to FILE, and the report to stdout (default: the swap config to stdout, and the "
        "report to stderr)",
    )
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists already")
