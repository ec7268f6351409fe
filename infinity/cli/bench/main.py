"""`infinity-bench`: the entry point. Exit code 0 when all is well, 1 when a disk failed or returned wrong data, 2 for
bad input, 130 after Ctrl-C; whatever happens, no file is left behind."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from infinity import __version__, _native
from infinity.cli.bench.compare import compare, load_survey, print_changes
from infinity.cli.bench.report import to_json
from infinity.cli.bench.survey import conclude, require_directory, run_survey
from infinity.cli.bench.versus import ROUNDS
from infinity.cli.optimizers import OPTIMIZERS
from infinity.errors import BenchError, ConfigError, InfinityError, ModelError, PlanError
from infinity.plan.machine import usable_cores
from infinity.sizes import parse_bytes

_INTERRUPTED = 130
_PLAIN_WIDTH = 120
_DESCRIPTION = """\
Measures what the disks under --path can do for infinity and prints the settings to use.

  infinity-bench [--path DIR ...]         the survey: under three minutes per disk
  infinity-bench --sustained              writes until the rate settles (wears the drive: it says how much)
  infinity-bench --vs-fio                 infinity's engines against fio, taking turns
  infinity-bench step --model M --config swap.yaml
                                          the I/O of one training step of a model, replayed
  infinity-bench adam                     the optimizer's pass in memory: formats, instruction sets, threads
  infinity-bench compare A.json B.json    two surveys, job by job
"""


def _size(text: str) -> int:
    try:
        return int(str(parse_bytes(text)))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def build_parser() -> argparse.ArgumentParser:
    """Of the survey."""
    parser = argparse.ArgumentParser(
        prog="infinity-bench", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"infinity-bench {__version__}")
    parser.add_argument(
        "--path", type=Path, nargs="+", default=[Path(".")], help="directories, one per disk (default .)"
    )
    parser.add_argument("--size", type=_size, default=2 << 30, help="of the file that is measured on (default 2GiB)")
    parser.add_argument("--engine", choices=("auto", "io_uring", "threads"), default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything found as JSON")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="write a picture of the sweep")
    mode = parser.add_argument_group("instead of the sweep")
    mode.add_argument("--sustained", action="store_true", help="overwrite until the rate settles")
    mode.add_argument("--limit-s", type=float, default=3600.0, help="of --sustained, in seconds (default 3600)")
    mode.add_argument("--vs-fio", action="store_true", help="compare with fio: read, overwrite, mixed")
    mode.add_argument("--rounds", type=int, default=ROUNDS, help=f"of --vs-fio (default {ROUNDS})")
    mode.add_argument("--fio-bytes", type=_size, default=512 << 20, help="moved per run of --vs-fio (default 512MiB)")
    mode.add_argument("--block", type=_size, default=1 << 20, help="of --sustained and --vs-fio (default 1MiB)")
    mode.add_argument("--depth", type=int, default=32, help="of --sustained and --vs-fio (default 32)")
    return parser


def build_step_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="infinity-bench step",
        description="Replays the reads and writes of one training step of a model, without its arithmetic.",
    )
    parser.add_argument("--model", required=True, help="directory of a checkpoint, its config.json, or a hub id")
    parser.add_argument("--config", required=True, type=Path, help="swap config (YAML or JSON)")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of the weights"
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="whose states to move")
    parser.add_argument("--steps", type=int, default=5, help="to replay after two to warm up (default 5)")
    parser.add_argument("--micro-batches", type=int, default=1, help="forward and backward passes per step (default 1)")
    parser.add_argument("--tflops", type=float, default=100.0, help="what the GPU reaches in training (default 100)")
    parser.add_argument("--rated-tb", type=float, help="terabytes the drives are rated for, all together (TBW)")
    parser.add_argument("--cpu", action="store_true", help="place the weights as on a machine without a GPU")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


def build_adam_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="infinity-bench adam",
        description="The optimizer's pass in memory, for each form of the states, against what this memory can do.",
    )
    isas = _native.supported_isas()
    parser.add_argument("--numel", type=int, default=64 << 20, help="parameters (default 64 Mi: 1.5 GiB of memory)")
    parser.add_argument("--threads", type=int, nargs="+", help="default: 1, 2, 4, … up to the cores")
    parser.add_argument("--isa", choices=isas, nargs="+", default=[isas[-1]], help=f"default {isas[-1]}")
    parser.add_argument("--rounds", type=int, default=7, help="of each, beside the bound (default 7)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


def build_compare_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="infinity-bench compare", description="Two surveys, job by job.")
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    commands: dict[str, Callable[[list[str], Console], None]] = {"step": _step, "adam": _adam, "compare": _compare}
    command, rest = (given[0], given[1:]) if given and given[0] in commands else ("", given)
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        commands.get(command, _survey)(rest, _console())
    except (BenchError, InfinityError, OSError) as error:
        return _fail(error)
    except KeyboardInterrupt:
        print("interrupted; nothing is left behind", file=sys.stderr)
        return _INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0


def _console() -> Console:
    """Tables keep their width where there is no terminal to fit."""
    console = Console()
    return console if console.is_terminal else Console(width=_PLAIN_WIDTH)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _survey(arguments: list[str], console: Console) -> None:
    options = build_parser().parse_args(arguments)
    options.faults = []
    options.path = [require_directory(path) for path in options.path]
    if options.rounds < 1 or options.depth < 1 or options.block % 4096:
        raise ConfigError("--rounds and --depth must be at least 1, --block a multiple of 4 KiB")
    survey = run_survey(options, console)
    if options.json:
        _write_json(options.json, to_json(survey, __version__))
    if options.plot and any(report.points for report in survey.paths):
        from infinity.cli.bench.plot import plot

        plot(survey.paths, options.plot)
        console.print(f"plot: {options.plot}")
    conclude(survey, console)


def _step(arguments: list[str], console: Console) -> None:
    options = build_step_parser().parse_args(arguments)
    if options.steps < 1 or options.micro_batches < 1 or not options.tflops > 0:
        raise ConfigError("--steps, --micro-batches and --tflops must be positive")
    from infinity.cli.bench.step import run_step

    report = run_step(options, console)
    console.print(report.text(), markup=False, highlight=False)
    if options.json:
        _write_json(options.json, report.to_json())


def _adam(arguments: list[str], console: Console) -> None:
    options = build_adam_parser().parse_args(arguments)
    cores = usable_cores()
    threads = options.threads or sorted({*(1 << power for power in range(cores.bit_length())), cores})
    if options.numel < 1 or options.rounds < 1 or min(threads) < 1:
        raise ConfigError("--numel, --rounds and --threads must be at least 1")
    from infinity.cli.bench.adam import print_report, run_adam

    report = run_adam(options.numel, threads, options.isa, options.rounds)
    print_report(console, report)
    if options.json:
        _write_json(options.json, report.to_json())


def _compare(arguments: list[str], console: Console) -> None:
    options = build_compare_parser().parse_args(arguments)
    print_changes(console, compare(load_survey(options.before), load_survey(options.after)))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
    print(f"JSON: {path}")


def _fail(error: Exception) -> int:
    if os.environ.get("INFINITY_DEBUG"):
        raise error
    print(f"error: {error}", file=sys.stderr)
    return 2 if isinstance(error, ConfigError | ModelError | PlanError) else 1


if __name__ == "__main__":
    sys.exit(main())
