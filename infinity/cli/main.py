"""The entry point of `infinity`. An error is one line on stderr. The exit code is 2 for bad input, 1 for a failed run,
and 130 after Ctrl-C. The modules of a command are imported after its options were checked."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from importlib import metadata

from packaging.requirements import Requirement

from infinity.cli.options import TOKENS_MAX
from infinity.cli.options_file import with_file
from infinity.cli.rank_errors import INPUT_ERRORS, is_told_by_rank_0
from infinity.cli.streams import INTERRUPTED, OutputStream, interruptible_imports, output_streams
from infinity.cli.subcommands import build_parser
from infinity.cli.trainer_options import require_of_method
from infinity.errors import ConfigError, InfinityError
from infinity.quoting import one_line, with_ways

_OF_FINETUNE = ("trl", "datasets")
_SWAP_CONFIG_FIRST = ". Give the swap config first, then the script: infinity run swap.yaml train.py"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["run"]:  # the script's output and exceptions must be the same as without infinity
        with interruptible_imports():
            from infinity.cli.run_command import run

        try:
            options = build_parser().parse_args(given)
        except ConfigError as error:
            hint = "" if any(each.endswith((".yaml", ".yml", ".json")) for each in given) else _SWAP_CONFIG_FIRST
            return _fail(ConfigError(f"{error}{hint}"), 2)
        return run(options)
    with output_streams(go_on=True) as out:
        try:
            return _run(arguments, out)
        except INPUT_ERRORS as error:
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


def _run(arguments: Sequence[str] | None, out: OutputStream) -> int:
    options = build_parser().parse_args(arguments)
    if options.command == "convert":
        with interruptible_imports():
            from infinity.cli.convert import convert

        convert(options)
        return _finished(0, out)
    if options.command == "finetune":
        options = with_file(options)
    if options.command == "doctor":
        with interruptible_imports():
            from infinity.cli.doctor.command import doctor

        return _finished(doctor(options), out)
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(message)s")
    if options.command == "checkpoint":
        with interruptible_imports():
            from infinity.cli.checkpoint import checkpoint

        return _finished(checkpoint(options), out)
    if options.command == "plan":
        with interruptible_imports():
            from infinity.cli.planning.main import plan

        return _finished(plan(options), out)
    _quiet_libraries()
    # the hub's library logs each attempt several times, and the final error already says why the attempts failed
    if not options.verbose:
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if options.command == "generate":
        with interruptible_imports():
            from infinity.cli.generate import generate

        return generate(options, out)
    _require_possible(options)
    _require_libraries()
    out.begin_run()
    if os.environ.get("RANK", "0") == "0":  # the other ranks print nothing (run_ranks.py: joined)
        print("loading libraries, which may take a minute", flush=True)
    with interruptible_imports():
        from infinity.cli.finetune import finetune

    return finetune(options)


def _finished(code: int, out: OutputStream) -> int:
    """Flush the output of a command that only prints, and return the exit code.

    Returns:
        `code`, or 1 in place of 0 if the output could not be written, except if the reader has closed the pipe.
    """
    out.flush()
    lost = out.failure is not None and not isinstance(out.failure, BrokenPipeError)
    return code or int(lost)


def _require_possible(options: argparse.Namespace) -> None:
    """Check that one backward pass does not have more tokens than infinity supports.

    Raises:
        ConfigError: a backward pass would have too many tokens.
    """
    tokens = (options.batch_size or 1) * (options.sequence_length or 1)
    if tokens > TOKENS_MAX:
        raise ConfigError(
            f"--batch-size times --sequence-length is {tokens} tokens in one backward pass; at most {TOKENS_MAX} are "
            "possible. Use a smaller --batch-size and more --gradient-accumulation."
        )
    if options.resume is None and options.from_checkpoint is None:
        require_of_method(options.trainer or {}, options.method or "sft")


def _require_libraries() -> None:
    """Check that the libraries for training are installed, in versions that the extra `hf` accepts.

    Raises:
        ConfigError: a library is missing or too old; the error names the library.
    """
    install = 'pip install "infinity-offload[hf]"'
    missing = [name for name in _OF_FINETUNE if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"infinity finetune trains with TRL, and {' and '.join(missing)} cannot be imported: {install}"
        )
    for each in map(Requirement, metadata.requires("infinity-offload") or ()):
        version = metadata.version(each.name) if each.name in _OF_FINETUNE else ""
        if version and not each.specifier.contains(version, prereleases=True):
            raise ConfigError(
                f"infinity finetune needs {each.name}{each.specifier}, but {version} is installed: {install}"
            )


def _quiet_libraries() -> None:
    """Switch off progress bars if stderr is not a terminal, because libraries draw them with carriage returns.

    Also switch off the hub's telemetry, with which TRL would report the training to TRL's authors. A user's own setting
    of telemetry is kept.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if not sys.stderr.isatty():
        for variable in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(variable, "1")


def _fail(error: Exception, code: int) -> int:
    if os.environ.get("INFINITY_DEBUG"):
        raise error
    if is_told_by_rank_0(error):
        return 2
    memory = isinstance(error, MemoryError | RuntimeError) and not isinstance(error, InfinityError)
    exhausted = f"out of memory: {error}. Use a smaller --batch-size or --sequence-length."
    what = one_line(exhausted) if memory else with_ways(error)
    who = f"rank {os.environ.get('RANK')}: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""
    print(f"{who}error: {what}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
