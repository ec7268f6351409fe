"""Command-line options that are the same in all scripts for large models."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peers.process import BENCH_DIR
from peers.report import write_result

from infinity.errors import InfinityError
from infinity.sizes import parse_bytes
from large_models.cgroup import NoLimitError
from large_models.training import Training, TrainingError

CHECKOUT = BENCH_DIR.parent


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a run of a large model, and the options for its result."""
    add = parser.add_argument
    add("--limit", type=parse_bytes, default="6GB", help="memory limit of the control group (default 6GB)")
    add("--steps", type=int, default=5)
    add("--batch", type=int, default=1, help="sequences per step")
    add("--tokens", type=int, default=256, help="tokens per sequence")
    add("--optimizer", choices=("nvme", "auto"), default="nvme", help="auto: RAM that has no other use caches states")
    add(
        "--gradients",
        choices=("auto", "host"),
        default="auto",
        help="auto: gradients for which memory.host has no room go to NVMe",
    )
    add("--overlap", choices=("auto", "during_backward", "before_forward", "off"), default="auto")
    add("--lora", type=int, default=0, help="train adapters of this rank; the model is frozen")
    add("--frozen", choices=("auto", "bf16", "int8", "nf4"), default="auto", help="form of the frozen weights")
    add("--experts", type=int, default=0, help="experts of each layer, of which a token uses four; 0: a Llama")
    add("--fp8", action="store_true", help="make the checkpoint in FP8; with --lora the frozen weights keep this form")
    add("--dtype", choices=("bf16", "fp32"), default="bf16", help="fp32 where the processor only emulates bf16")
    add(
        "--scratch",
        type=Path,
        default=CHECKOUT / "build" / "large-model",
        help="folder for checkpoint, swap files and output",
    )
    add("--keep", action="store_true", help="keep the checkpoint, and use a checkpoint that an earlier run kept")
    add("--json", type=Path, help="write all measurements to this file")


def training_of(options: argparse.Namespace, parameters: float, limit_bytes: int) -> Training:
    return Training(
        parameters,
        limit_bytes,
        options.steps,
        options.batch,
        options.tokens,
        options.optimizer,
        options.gradients,
        options.overlap,
        options.lora,
        options.frozen,
        options.experts,
        options.dtype,
        options.fp8,
    )


def write(result: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Write the result as JSON, if this was requested."""
    if options.json:
        write_result(options.json, result, {options.scratch.resolve(): "scratch", CHECKOUT: "."})


def run_main(main: Callable[[], None]) -> None:
    """Run `main`; print an error as one line, and clean up on Ctrl-C and SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except (InfinityError, NoLimitError, TrainingError, OSError, ValueError) as error:
        sys.exit(f"stopped: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
