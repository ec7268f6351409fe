"""`infinity-bench`: the entry point.

Exit codes: 0 for success; 1 if a disk failed or returned wrong data; 2 for bad input; 130 after Ctrl-C; 141 if the
reader of the output has closed it. The program always removes its files.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from infinity import __version__
from infinity.cli import options as types
from infinity.cli.bench.options import BenchOptions
from infinity.cli.streams import INTERRUPTED, PIPE_CLOSED, ClosedOutputError, interruptible_imports, output_streams
from infinity.errors import ConfigError, InfinityError, printable
from infinity.quoting import one_line

_DESCRIPTION = """\
Measures the disks under --path for infinity and prints the settings to use.

  infinity-bench [--path DIR ...]         the survey: under three minutes per disk
  infinity-bench --sustained              writes until the rate settles (wears the drive: it says how much)
"""


def build_parser() -> types.StrictArgumentParser:
    parser = types.StrictArgumentParser(
        prog="infinity-bench", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"infinity-bench {__version__}")
    types.add_arguments(parser, BenchOptions)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        with output_streams(go_on=False) as out:
            try:
                _survey(arguments)
            except (InfinityError, OSError, MemoryError) as error:
                return _fail(error)
            except KeyboardInterrupt:
                print("interrupted; all test files are removed", file=sys.stderr)
                return INTERRUPTED
            out.flush()
        return int(out.failure is not None)
    except ClosedOutputError:
        return PIPE_CLOSED
    finally:
        signal.signal(signal.SIGTERM, previous)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _survey(arguments: Sequence[str] | None) -> None:
    options = types.options_of(BenchOptions, build_parser().parse_args(arguments))
    # a file that cannot be written is an error before anything is measured
    types.require_file_place("--json", options.json)
    with interruptible_imports():
        from infinity.cli.bench.survey import conclude, run_survey

    survey = run_survey(options)
    if options.json is not None:
        options.json.expanduser().write_text(json.dumps(survey.to_json(), indent=2) + "\n")
        print(f"JSON: {printable(options.json)}")
    conclude(survey)


def _fail(error: Exception) -> int:
    if os.environ.get("INFINITY_DEBUG"):
        raise error
    what = "out of memory" if isinstance(error, MemoryError) else str(error)
    print(f"error: {one_line(what)}", file=sys.stderr)
    return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    sys.exit(main())
