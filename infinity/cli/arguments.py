"""The command line of `infinity`: its commands and their options."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity import __version__
from infinity.cli import trainer_options
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
    whole,
    word,
)
from infinity.cli.planning.options import Training, What, Where
from infinity.sizes import THREADS_MAX

_OF_TRAINER: dict[str, Any] = {
    "take": trainer_options.take,
    "renamed": trainer_options.OURS,
    "epilog": "Every other field of TRL's SFTConfig (--method dpo: DPOConfig, reward: RewardConfig) is an option by "
    "its own name, such as --neftune_noise_alpha 5, --lr_scheduler_type inverse_sqrt or --beta 0.2; so are those that "
    "have a short name here, such as --learning_rate.",
}


def build_parser() -> Parser:
    parser = Parser(
        prog="infinity",
        description="Full fine-tuning of models larger than memory: states on NVMe, moved just in time.",
    )
    parser.add_argument("--version", action="version", version=f"infinity {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    tune = commands.add_parser("finetune", help="fine-tune a causal language model on text or chats", **_OF_TRAINER)
    _add_finetune_options(tune)
    _add_plan(commands)
    _add_generate(commands)
    _add_run(commands)
    _add_checkpoint(commands)
    _add_doctor(commands)
    _add_convert(commands)
    return parser


def build_finetune_parser() -> Parser:
    """`infinity finetune` alone, whose arguments begin with its options."""
    parser = Parser(prog="infinity finetune", **_OF_TRAINER)
    _add_finetune_options(parser)
    return parser


def _add_finetune_options(tune: argparse.ArgumentParser) -> None:
    where = tune.add_argument_group("what and where")
    where.add_argument(
        "--options",
        type=path,
        metavar="FILE",
        help="take options from a YAML file, such as `lr: 1e-5`; what the command line says goes before it",
    )
    _add_model(where)
    _add_data(where)
    where.add_argument("--config", type=path, help="swap config: where states live (YAML or JSON)")
    where.add_argument("--output", type=path, help="directory for the trained model and the report")
    past = where.add_mutually_exclusive_group()
    past.add_argument(
        "--from-checkpoint",
        type=path,
        metavar="EXPORT_DIR",
        help="go on with a run from the copy that `infinity checkpoint export` wrote to EXPORT_DIR, on any disks "
        "and with any swap config; the run's options need not be given again",
    )
    past.add_argument(
        "--resume",
        nargs="?",
        type=name,
        const=False,  # an empty name is refused
        metavar="SWAP_DIR",
        help="go on with the run whose generations are in SWAP_DIR (default: the config's nvme.paths), and end in the "
        "bits of a run that never stopped; the run's options need not be given again",
    )
    where.add_argument(
        "--keep-store",
        action="store_true",
        default=None,
        help="keep the generations of a run that has ended, so that it can go on later (--resume with more --steps); "
        "by default they are removed once the output is complete on disk",
    )
    _add_training(tune)
    _add_what_trains(tune)
    _add_meanwhile(tune)
    watch = tune.add_argument_group("what is said of the run")
    _add_logging(watch)
    watch.add_argument("--verbose", action="store_true", help="log the plan, the engine and why it was chosen")
    watch.add_argument(
        "--trace",
        type=path,
        metavar="FILE",
        help="write a timeline for Perfetto (ui.perfetto.dev) or chrome://tracing: compute, stalls by cause, fetches, "
        "gradients, updates, reads and writes of every unit",
    )
    watch.add_argument(
        "--trace-steps",
        type=steps,
        metavar="A:B",
        help="trace steps A to B (default: the second to the sixth); each step of a large model takes megabytes",
    )


def _add_model(where: Any) -> None:
    where.add_argument("--model", type=name, help="directory of a Hugging Face checkpoint, or a hub id")
    where.add_argument("--revision", type=word, help="of the hub's model: a branch, a tag or a commit")
    where.add_argument(
        "--trust-remote-code",
        action="store_true",
        default=None,
        help="run the Python files that come with the model, where it needs them; by default they are not run",
    )


def _add_data(where: Any) -> None:
    where.add_argument(
        "--data",
        nargs="+",
        type=path,
        help=DATA_HELP,
    )
    where.add_argument(
        "--columns",
        nargs="+",
        type=column,
        metavar="NAME=COLUMN",
        help="columns of the rows to read, and as what, such as instruction=title output=body; no others are read",
    )
    apart = where.add_mutually_exclusive_group()
    apart.add_argument(
        "--eval-data", nargs="+", type=path, help="data as --data, for the loss on what is not trained on"
    )
    apart.add_argument(
        "--eval-split",
        type=number(1e-6, 0.9),
        metavar="SHARE",
        help="hold a share of the sequences of --data out for that, such as 0.05",
    )
    where.add_argument(
        "--eval-steps", type=whole(1, STEPS_MAX), metavar="N", help="every N steps; by default after the last step only"
    )


def _add_sizes(job: argparse._ArgumentGroup) -> None:
    """How long the run is, and how many tokens a step has."""
    length = job.add_mutually_exclusive_group()
    length.add_argument("--steps", type=whole(1, STEPS_MAX), help="optimizer steps; default: one pass over the data")
    length.add_argument("--epochs", type=whole(1, STEPS_MAX), help="passes over the data, in place of --steps")
    job.add_argument("--batch-size", type=whole(1, TOKENS_MAX), help="sequences per micro-batch (default 1)")
    job.add_argument(
        "--micro-batches",
        type=whole(1, TOKENS_MAX),
        metavar="N",
        help="micro-batches that go through one layer of the model before the next one, so that its weights are "
        "fetched once for all (default 1); with --gradient-accumulation all of a step do",
    )
    job.add_argument("--gradient-accumulation", type=whole(1, TOKENS_MAX), help="backward passes per step (default 1)")
    job.add_argument("--sequence-length", type=whole(1, TOKENS_MAX), help="tokens per sequence (default 1024)")


def _add_optimizer(job: argparse._ArgumentGroup) -> None:
    job.add_argument(
        "--optimizer",
        type=word,
        choices=OPTIMIZERS,
        help=f"default adamw; sgd has momentum {SGD_MOMENTUM}. Lion wants a third to a tenth of AdamW's --lr",
    )
    job.add_argument(
        "--lr",
        type=number(1e-12, 1e6),
        help="peak learning rate (default 1e-5, with --method dpo 1e-6; with --lora ten times that)",
    )
    job.add_argument(
        "--min-lr", type=number(0, 1e6), help="rate that the schedules linear and cosine fall to (default 0)"
    )
    job.add_argument("--beta1", type=number(0, 1 - 1e-9), help="of Adam, AdamW and Lion (default 0.9)")
    job.add_argument("--beta2", type=number(0, 1 - 1e-9), help="of the same (default 0.999; Lion: 0.99)")
    job.add_argument("--eps", type=number(1e-30, 1), help="of Adam and AdamW (default 1e-8), and Adagrad (1e-10)")
    job.add_argument(
        "--schedule",
        type=word,
        choices=("constant", "linear", "cosine"),
        help="schedule of the learning rate (default cosine)",
    )
    job.add_argument("--warmup-steps", type=whole(0, STEPS_MAX), help="steps in which the rate rises (default 0)")
    job.add_argument("--weight-decay", type=number(0, 1e3), help="default 0.01")
    job.add_argument(
        "--max-grad-norm", type=number(1e-12, 1e12, or_zero=True), help="norm to clip to; 0: no clipping (default 1.0)"
    )


def _add_training(tune: argparse.ArgumentParser) -> None:
    job = tune.add_argument_group("training")
    job.add_argument(
        "--method",
        type=word,
        choices=tuple(trainer_options.CONFIGS),
        help="learn text and answers (sft, the default), or of two answers which is better: as a model that gives it "
        "(dpo), or as a model that says how good an answer is (reward)",
    )
    _add_sizes(job)
    job.add_argument(
        "--loss-on",
        type=word,
        choices=("answers", "all"),
        help="of rows with a prompt or messages: learn the completion, or what the assistant says (answers, the "
        "default), or everything (all)",
    )
    job.add_argument(
        "--no-packing",
        action="store_true",
        default=None,
        help="one row with a prompt or messages per sequence; by default as many as fit, which do not see each other",
    )
    job.add_argument(
        "--dtype",
        type=word,
        choices=DTYPE_NAMES,
        help=f"of the weights, whatever the checkpoint has ({DEFAULT_DTYPE}); with fp16 the loss is scaled",
    )
    _add_optimizer(job)
    job.add_argument(
        "--no-loss-scale",
        action="store_true",
        default=None,
        help="do not scale the loss with --dtype fp16 (by default torch.amp.GradScaler does)",
    )
    job.add_argument("--seed", type=whole(0, SEED_MAX), help="default 0")
    job.add_argument("--threads", type=whole(1, THREADS_MAX), help="torch's compute threads; default: torch's choice")
    job.add_argument(
        "--verify-output",
        action="store_true",
        default=None,
        help="reload the result with plain transformers and compare logits",
    )


def _add_what_trains(tune: argparse.ArgumentParser) -> None:
    part = tune.add_argument_group("a part of the model", "By default all parameters are trained.")
    part.add_argument(
        "--lora",
        type=whole(1, LORA_MAX),
        metavar="R",
        help="train adapters of rank R beside the model's linear layers, and nothing else (LoRA, by PEFT); the output "
        "is the adapters, or with --merge one model",
    )
    part.add_argument(
        "--lora-alpha", type=number(1e-6, 1e6), metavar="A", help="the adapters count A / R times (default 2 R)"
    )
    part.add_argument("--lora-dropout", type=number(0, 0.99), metavar="P", help="of what adapters see (default 0)")
    part.add_argument(
        "--lora-targets",
        nargs="+",
        type=text,
        metavar="NAME",
        help="layers that have adapters, such as q_proj v_proj (default: all linear ones but the head)",
    )
    part.add_argument(
        "--merge",
        action="store_true",
        default=None,
        help="write one model in place of the adapters: that which they are of, with them merged into it",
    )
    part.add_argument(
        "--freeze",
        nargs="+",
        type=text,
        metavar="PATTERN",
        help="parameters that are not trained, such as 'model.embed_tokens.*' 'model.layers.[0-3].*'",
    )
    part.add_argument(
        "--frozen",
        type=word,
        choices=FROZEN_NAMES,
        help="how weights of blocks rest that are not trained: in 4 bits (nf4), in 8 (int8), or as they are (bf16); "
        "default: `frozen` of the swap config",
    )


def _add_meanwhile(tune: argparse.ArgumentParser) -> None:
    job = tune.add_argument_group("while it trains")
    job.add_argument(
        "--save-every",
        type=whole(1, STEPS_MAX),
        metavar="N",
        help="save the model after every N steps, as OUTPUT-steps/checkpoint-N, for use (a run goes on with --resume)",
    )
    job.add_argument(
        "--save-limit", type=whole(1, STEPS_MAX), metavar="K", help="keep the newest K of these (default: all)"
    )
    job.add_argument(
        "--save-best",
        action="store_true",
        default=None,
        help="keep the model with the lowest loss on held-out data, too; the run's last lines say which it is",
    )
    job.add_argument(
        "--sample", nargs="+", type=text, metavar="PROMPT", help="after each evaluation, let the model go on from these"
    )
    job.add_argument(
        "--sample-tokens", type=whole(1, TOKENS_MAX), metavar="N", help="for at most N tokens each (default 64)"
    )


def _add_logging(watch: Any) -> None:
    watch.add_argument(
        "--log-every",
        type=whole(1, STEPS_MAX),
        metavar="N",
        help="a line, and an entry of each --logger, every N steps",
    )
    watch.add_argument(
        "--logger",
        nargs="+",
        type=word,
        choices=LOGGERS,
        help=f"where the figures of the steps go while it trains: any of {', '.join(LOGGERS)}",
    )


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="say whether, where and how fast a model will train, before a byte moves",
        description="Needs no weights. Exit code 1 where the model does not fit; then a change of the swap config is "
        "named with which it does.",
    )
    add_arguments(parser, What)
    add_arguments(parser.add_argument_group("the machine", "By default this one, measured now."), Where)
    add_arguments(parser.add_argument_group("the training"), Training)


@dataclass(frozen=True)
class _Generating:
    """The options of `infinity generate` beside the model's."""

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
    top_p: float | None = argument("draw from the likeliest, P in sum", number(1e-6, 1), metavar="P")
    top_k: int | None = argument("draw from the K likeliest", whole(1, TOKENS_MAX), metavar="K")
    seed: int | None = argument("default 0", whole(0, SEED_MAX))
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
    _add_model(parser)
    add_arguments(parser, _Generating)


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
