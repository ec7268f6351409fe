"""`infinity run`: runs an unchanged script of Trainer, TRL, PEFT, Accelerate or Lightning with its models offloaded."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from infinity.cli.command import command
from infinity.cli.config_checks import require_ready
from infinity.cli.streams import INTERRUPTED, interruptible_imports
from infinity.config import load_config
from infinity.errors import ConfigError, InfinityError, ResumeError, StoreLockedError, StoreNotEmptyError, cause_of
from infinity.quoting import one_line
from infinity.runtime.pins import generation_of

_NEEDS_NO_TRACEBACK = (ConfigError, ResumeError, StoreLockedError, StoreNotEmptyError)
"""Errors whose message says what to change outside the script, or which command to run."""


def run(options: argparse.Namespace) -> int:
    """Run the script in this process, like `python SCRIPT ARGS`. Exceptions of the script are raised.

    Returns:
        The exit code. 2: the swap config, its directories, the script or the checkpoint folder cannot be used, or the
            script needs a feature that infinity does not have. 130: Ctrl-C, which prints one line. 0: success.
    """
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    who = f"rank {os.environ.get('RANK', '?')}: " if several else ""
    with _speaking(logging.INFO if options.verbose else logging.WARNING, f"{who}%(message)s"):
        return _run(options, who, several=several)


@contextmanager
def _speaking(level: int, line: str) -> Iterator[None]:
    """Print infinity's log records to stderr until the end of the `with` block.

    The handler is added to infinity's own logger, because the root logger belongs to the script.

    Args:
        level: lowest level of the records that are printed.
        line: format of a line.
    """
    ours, handler = logging.getLogger("infinity"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter(line))
    before = ours.level, ours.propagate
    ours.addHandler(handler)
    ours.setLevel(level)
    ours.propagate = False
    try:
        yield
    finally:
        ours.removeHandler(handler)
        ours.setLevel(before[0])
        ours.propagate = before[1]


def _run(options: argparse.Namespace, who: str, *, several: bool) -> int:
    try:
        if options.config.suffix == ".py":
            raise ConfigError(f"{options.config} is a script: give the swap config first, infinity run CONFIG SCRIPT")
        config = load_config(options.config)
        if options.resume is not None and not several:  # if there are several ranks, they are not connected yet
            generation_of(options.resume, config)
        if not options.script.is_file():
            raise ConfigError(f"the script {options.script} does not exist: infinity run CONFIG SCRIPT [ARGS...]")
        require_ready(config)
    except InfinityError as error:
        return _refuse(error, who)
    with interruptible_imports():
        from infinity.integrations.launcher import launch
    before = command("run", "--resume")  # the script changes sys.argv
    after = shlex.join(map(str, (options.config, options.script, *options.arguments)))

    try:
        launch(config, options.script, options.arguments, options.resume, lambda it: f"`{before} {it} {after}`")
    except KeyboardInterrupt:  # a line that names the durable generation was already printed
        if os.environ.get("INFINITY_DEBUG"):
            raise
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, _NEEDS_NO_TRACEBACK) and not os.environ.get("INFINITY_DEBUG"):
            return _refuse(error, who)
        _say_it_last(error, who)
        raise
    return 0


def _refuse(error: InfinityError, who: str) -> int:
    print(f"{who}error: {one_line(str(error))}", file=sys.stderr)
    return 2


def _say_it_last(error: BaseException, who: str) -> None:
    """Install an exception hook.

    If an error of infinity caused the exception, the hook prints the message of infinity's error after the traceback.
    This message says what the user can do.
    """
    cause = cause_of(error)
    if cause is None:
        return
    theirs, message = sys.excepthook, one_line(str(cause))

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        theirs(kind, value, trace)
        print(f"{who}error: {message}", file=sys.stderr)

    sys.excepthook = hook
