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
    add("--limit", type=parse_bytes, default="6GB", help="of the control group (default 6GB)")
    add("--steps", type=int, default=5)
    add("--batch", type=int, default=1, help="sequences per step")
    add("--tokens", type=int, default=256, help="per sequence")
    add("--optimizer", choices=("nvme", "auto"), default="nvme", help="auto: states are cached in what memory is left")
    add(
        "--gradients", choices=("auto", "host"), default="auto", help="auto: to NVMe where memory.host cannot hold them"
    )
    add("--overlap", choices=("auto", "during_backward", "before_forward", "off"), default="auto")
    add("--lora", type=int, default=0, help="train adapters of this rank; the model is frozen")
    add("--frozen", choices=("auto", "bf16", "int8", "nf4"), default="auto", help="how frozen weights rest")
    add("--scratch", type=Path, default=CHECKOUT / "build" / "large-model", help="checkpoint, swap files and output")
    add("--keep", action="store_true", help="leave the checkpoint there, and use one that was left")
    add("--json", type=Path, help="write everything measured to this file")


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
