"""`infinity`: the entry point. Errors are one line on stderr. The exit code is 2 for bad input, 1 for a failed run, 130
after Ctrl-C. The modules that a command needs are imported after its options were checked."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from infinity import __version__
from infinity.cli.options import (
    DTYPE_NAMES,
    OPTIMIZERS,
    SEED_MAX,
    SGD_MOMENTUM,
    STEPS_MAX,
    TOKENS_MAX,
    Parser,
    name,
    number,
    path,
    steps,
    whole,
    word,
)
from infinity.cli.streams import INTERRUPTED, Outlet, interruptible_imports, outlets
from infinity.echo import one_line
from infinity.errors import (
    ConfigError,
    InfinityError,
    ModelError,
    PlanError,
    ResumeError,
    StoreLockedError,
    StoreNotEmptyError,
)
from infinity.sizes import THREADS_MAX


def build_parser() -> Parser:
    parser = Parser(
        prog="infinity",
        description="Full fine-tuning of models larger than memory: states on NVMe, moved just in time.",
    )
    parser.add_argument("--version", action="version", version=f"infinity {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_finetune(commands)
    _add_run(commands)
    _add_checkpoint(commands)
    return parser


def _add_finetune(commands: Any) -> None:
    tune = commands.add_parser("finetune", help="fine-tune a causal language model on text")
    where = tune.add_argument_group("what and where")
    where.add_argument("--model", type=name, help="directory of a Hugging Face checkpoint, or a hub id")
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
    tune.add_argument("--verbose", action="store_true", help="log the plan, the engine and why it was chosen")
    tune.add_argument(
        "--trace",
        type=path,
        metavar="FILE",
        help="write a timeline for Perfetto (ui.perfetto.dev) or chrome://tracing: compute, stalls by cause, fetches, "
        "gradients, updates, reads and writes of every unit",
    )
    tune.add_argument(
        "--trace-steps",
        type=steps,
        metavar="A:B",
        help="trace steps A to B (default: the second to the sixth); each step of a large model takes megabytes",
    )


def _add_data(where: Any) -> None:
    where.add_argument(
        "--data",
        nargs="+",
        type=path,
        help="text files; .jsonl, .parquet and .csv files whose rows have text, messages, conversations, or prompt and "
        "completion; directories of such files, or those that `datasets` saved",
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


def _add_training(tune: argparse.ArgumentParser) -> None:
    job = tune.add_argument_group("training")
    length = job.add_mutually_exclusive_group()
    length.add_argument("--steps", type=whole(1, STEPS_MAX), help="optimizer steps; default: one pass over the data")
    length.add_argument("--epochs", type=whole(1, STEPS_MAX), help="passes over the data, in place of --steps")
    job.add_argument("--batch-size", type=whole(1, TOKENS_MAX), help="sequences per backward pass (default 1)")
    job.add_argument("--gradient-accumulation", type=whole(1, TOKENS_MAX), help="backward passes per step (default 1)")
    job.add_argument("--sequence-length", type=whole(1, TOKENS_MAX), help="tokens per sequence (default 1024)")
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
        help="dtype of the weights, whatever the checkpoint has (default bf16); with fp16 the loss is scaled, and fp32 "
        "needs no master",
    )
    job.add_argument(
        "--optimizer",
        type=word,
        choices=OPTIMIZERS,
        help=f"default adamw; sgd has momentum {SGD_MOMENTUM}. Lion wants a third to a tenth of AdamW's --lr",
    )
    job.add_argument("--lr", type=number(1e-12, 1e6), help="peak learning rate (default 1e-5)")
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
        help="for an Accelerate loop, whose script calls accelerator.load_state(FOLDER): go on from the generation "
        "that this folder pins. Scripts of Trainer and Lightning say themselves where they go on",
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
    for verb, text in about.items():
        act = acts.add_parser(verb, help=text, description=text)
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


_SWAP_CONFIG_FIRST = ". The swap config comes first, then the script: infinity run swap.yaml train.py"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["run"]:  # what a script prints and raises is its own
        with interruptible_imports():
            from infinity.cli.run import run

        try:
            options = build_parser().parse_args(given)
        except ConfigError as error:
            hint = "" if any(each.endswith((".yaml", ".yml", ".json")) for each in given) else _SWAP_CONFIG_FIRST
            return _fail(ConfigError(f"{error}{hint}"), 2)
        return run(options)
    with outlets(go_on=True) as out:
        try:
            return _run(arguments, out)
        except (ConfigError, ModelError, PlanError, ResumeError, StoreLockedError, StoreNotEmptyError) as error:
            return _fail(error, 2)
        except (InfinityError, OSError, MemoryError) as error:
            return _fail(error, 1)
        except RuntimeError as error:
            if "allocate" not in str(error):
                raise
            return _fail(error, 1)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return INTERRUPTED


def _run(arguments: Sequence[str] | None, out: Outlet) -> int:
    options = build_parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(message)s")
    if options.command == "checkpoint":
        with interruptible_imports():
            from infinity.cli.checkpoint import checkpoint

        code = checkpoint(options)
        out.flush()
        lost = out.failure is not None and not isinstance(out.failure, BrokenPipeError)
        return code or int(lost)
    _require_possible_pass(options)
    _without_bars()
    out.begin_run()
    with interruptible_imports():
        from infinity.cli.finetune import finetune

    return finetune(options)


def _require_possible_pass(options: argparse.Namespace) -> None:
    """Raises ConfigError."""
    tokens = (options.batch_size or 1) * (options.sequence_length or 1)
    if tokens > TOKENS_MAX:
        raise ConfigError(
            f"--batch-size times --sequence-length is {tokens} tokens in one backward pass; at most {TOKENS_MAX} are "
            "possible. Use a smaller --batch-size and more --gradient-accumulation."
        )


def _without_bars() -> None:
    """Libraries draw progress bars with carriage returns: not into a file or a pipe."""
    if not sys.stderr.isatty():
        for variable in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(variable, "1")


def _fail(error: Exception, code: int) -> int:
    if os.environ.get("INFINITY_DEBUG"):
        raise error
    memory = isinstance(error, MemoryError | RuntimeError) and not isinstance(error, InfinityError)
    what = f"out of memory: {error}. Use a smaller --batch-size or --sequence-length." if memory else str(error)
    who = f"rank {os.environ.get('RANK')}: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""
    print(f"{who}error: {one_line(what)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
