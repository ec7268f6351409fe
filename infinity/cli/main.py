"""`infinity`: the entry point. Errors are one line on stderr; exit code 2 for bad input, 1 for a failed run, 130
after Ctrl-C."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infinity import __version__
from infinity.cli.optimizers import OPTIMIZERS, SGD_MOMENTUM
from infinity.cli.scaling import DTYPES
from infinity.cli.tracing import parse_steps
from infinity.errors import (
    ConfigError,
    InfinityError,
    ModelError,
    PlanError,
    ResumeError,
    StoreLockedError,
    StoreNotEmptyError,
)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="infinity",
        description="Full fine-tuning of models larger than memory: states on NVMe, moved just in time.",
    )
    parser.add_argument("--version", action="version", version=f"infinity {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    tune = commands.add_parser("finetune", help="fine-tune a causal language model on text")
    where = tune.add_argument_group("what and where")
    where.add_argument("--model", help="directory of a Hugging Face checkpoint, or a hub id")
    where.add_argument(
        "--data", nargs="+", type=Path, help="text files, .jsonl files (text or messages), directories of text"
    )
    where.add_argument("--config", type=Path, help="swap config: where states live (YAML or JSON)")
    where.add_argument("--output", type=Path, help="directory for the trained model and the report")
    past = where.add_mutually_exclusive_group()
    past.add_argument(
        "--from-checkpoint",
        type=Path,
        metavar="EXPORT_DIR",
        help="go on with the run that `infinity checkpoint export` wrote there, on any disks and with any swap config; "
        "its other options need not be given again",
    )
    past.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="SWAP_DIR",
        help="go on with the run whose generations are in SWAP_DIR (default: the config's nvme.paths), to the bits of "
        "a run that never stopped; its other options need not be given again",
    )
    _add_training(tune)
    tune.add_argument("--verbose", action="store_true", help="log the plan, the engine and why it was chosen")
    tune.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write a timeline for Perfetto (ui.perfetto.dev) or chrome://tracing: compute, stalls by cause, fetches, "
        "gradients, updates, reads and writes, each with its unit",
    )
    tune.add_argument(
        "--trace-steps",
        type=parse_steps,
        metavar="A:B",
        help="trace steps A to B (default: the second to the sixth; a step of a large model takes megabytes)",
    )
    _add_checkpoint(commands)
    return parser


def _add_training(tune: argparse.ArgumentParser) -> None:
    job = tune.add_argument_group("training")
    job.add_argument("--steps", type=int, help="optimizer steps; default: one pass over the data")
    job.add_argument("--batch-size", type=int, help="sequences per backward pass (default 1)")
    job.add_argument("--gradient-accumulation", type=int, help="backward passes per step (default 1)")
    job.add_argument("--sequence-length", type=int, help="tokens per sequence (default 1024)")
    job.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of the weights, whatever the checkpoint's (default bf16); with fp16 the loss is scaled",
    )
    job.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        help=f"default adamw; sgd has momentum {SGD_MOMENTUM}. Lion wants a third to a tenth of AdamW's --lr",
    )
    job.add_argument("--lr", type=float, help="peak learning rate (default 1e-5)")
    job.add_argument("--schedule", choices=("constant", "linear", "cosine"), help="of the learning rate (cosine)")
    job.add_argument("--warmup-steps", type=int, help="default 0")
    job.add_argument("--weight-decay", type=float, help="default 0.01")
    job.add_argument("--max-grad-norm", type=float, help="0 switches clipping off (default 1.0)")
    job.add_argument(
        "--no-loss-scale",
        action="store_true",
        default=None,
        help="do not scale the loss with --dtype fp16 (by default torch.amp.GradScaler does)",
    )
    job.add_argument("--seed", type=int, help="default 0")
    job.add_argument("--threads", type=int, help="torch's compute threads; default: torch's choice")
    job.add_argument(
        "--verify-output",
        action="store_true",
        default=None,
        help="reload the result with plain transformers and compare logits",
    )


def _add_checkpoint(commands: Any) -> None:
    parser = commands.add_parser(
        "checkpoint", help="look at, check, copy or remove the generations in a swap directory"
    )
    acts = parser.add_subparsers(dest="act", required=True)
    about = {
        "list": "the generations there are: step, time, size",
        "verify": "read all of them and name what is damaged",
        "export": "write a portable copy: weights and optimizer states as safetensors",
        "remove": "delete them and free their space",
    }
    for name, text in about.items():
        act = acts.add_parser(name, help=text, description=text)
        act.add_argument("directory", type=Path, nargs="+", help="the run's nvme.paths, in their order")
        act.add_argument("--verbose", action="store_true", help="log what is done")
        if name in ("verify", "export"):
            act.add_argument("--step", type=int, help="this generation only (export: default the newest that is whole)")
        if name == "export":
            act.add_argument("--output", type=Path, required=True, help="directory for the copy; must not exist")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    options = build_parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(message)s")
    try:
        if options.command == "checkpoint":
            from infinity.cli.checkpoint import checkpoint

            return checkpoint(options)
        from infinity.cli.finetune import finetune

        return finetune(options)
    except (ConfigError, ModelError, PlanError, ResumeError, StoreLockedError, StoreNotEmptyError) as error:
        return _fail(error, 2)
    except (InfinityError, OSError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _fail(error: Exception, code: int) -> int:
    if os.environ.get("INFINITY_DEBUG"):
        raise error
    print(f"error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
