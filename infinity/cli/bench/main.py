"""`infinity-bench`: the entry point. Exit code 0 when all is well, 1 when a disk failed or returned wrong data, 2 for
bad input, 130 after Ctrl-C, 141 when nobody reads the output any more; whatever happens, no file is left behind."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from infinity import __version__
from infinity.cli.options import Parser, number, path, require_alone, require_file_place, size, word
from infinity.cli.streams import INTERRUPTED, PIPE_CLOSED, ReaderGoneError, interruptible_imports, outlets
from infinity.echo import one_line
from infinity.errors import ConfigError, InfinityError, printable

_SIZE_MIN = 16 << 20
_LIMIT_S = 3600.0
_DESCRIPTION = """\
Measures what the disks under --path can do for infinity and prints the settings to use.

  infinity-bench [--path DIR ...]         the survey: under three minutes per disk
  infinity-bench --sustained              writes until the rate settles (wears the drive: it says how much)
"""


def build_parser() -> Parser:
    parser = Parser(
        prog="infinity-bench", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"infinity-bench {__version__}")
    parser.add_argument(
        "--path", type=path, nargs="+", default=[Path(".")], help="directories, one per disk (default .)"
    )
    parser.add_argument(
        "--size", type=size(_SIZE_MIN), default=2 << 30, help="of the file that is measured on (default 2GiB)"
    )
    parser.add_argument("--engine", type=word, choices=("auto", "io_uring", "threads"), default="auto")
    parser.add_argument("--json", type=path, metavar="FILE", help="write everything found as JSON")
    mode = parser.add_argument_group("instead of the sweep")
    mode.add_argument("--sustained", action="store_true", help="overwrite until the rate settles")
    mode.add_argument("--limit-s", type=number(1, 7 * 86400), help="of --sustained, in seconds (default 3600)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        with outlets(go_on=False) as out:
            try:
                _survey(arguments)
            except (InfinityError, OSError, MemoryError) as error:
                return _fail(error)
            except KeyboardInterrupt:
                print("interrupted; nothing is left behind", file=sys.stderr)
                return INTERRUPTED
            out.flush()
        return int(out.failure is not None)
    except ReaderGoneError:
        return PIPE_CLOSED
    finally:
        signal.signal(signal.SIGTERM, previous)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _survey(arguments: Sequence[str] | None) -> None:
    options = build_parser().parse_args(arguments)
    require_file_place("--json", options.json)  # before anything is measured
    require_alone("--limit-s", options.limit_s, "--sustained", options.sustained)
    options.limit_s = options.limit_s or _LIMIT_S
    with interruptible_imports():
        from infinity.cli.bench.survey import conclude, require_directories, run_survey

    options.path = require_directories(options.path)
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
