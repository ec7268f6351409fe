"""`infinity run`: an unchanged script of Trainer, TRL, PEFT, Accelerate or Lightning, with its models offloaded."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from infinity.cli.ready import require_ready
from infinity.cli.streams import INTERRUPTED, interruptible_imports
from infinity.config import load_config
from infinity.echo import one_line
from infinity.errors import ConfigError, InfinityError, cause_of
from infinity.runtime.pins import generation_of


def run(options: argparse.Namespace) -> int:
    """Run the script in this process, as `python SCRIPT ARGS` would; what it raises goes through. The exit code is 2
    where the swap config, its directories, the script or the checkpoint folder cannot be used, or the script asks for
    what infinity cannot do; 130 after Ctrl-C, which ends in one line."""
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    who = f"rank {os.environ.get('RANK', '?')}: " if several else ""
    with _speaking(logging.INFO if options.verbose else logging.WARNING, f"{who}%(message)s"):
        return _run(options, who, several=several)


@contextmanager
def _speaking(level: int, line: str) -> Iterator[None]:
    """What infinity says goes to stderr, by a handler of its own logger: the root logger is the script's."""
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
            raise ConfigError(f"{options.config} is a script: the swap config comes first, infinity run CONFIG SCRIPT")
        config = load_config(options.config)
        if options.resume is not None and not several:  # the ranks have not met
            generation_of(options.resume, config)
        if not options.script.is_file():
            raise ConfigError(f"there is no script {options.script}: infinity run CONFIG SCRIPT [ARGS...]")
        require_ready(config)
    except InfinityError as error:
        return _refuse(error, who)
    with interruptible_imports():
        from infinity.integrations.launcher import launch

    try:
        launch(config, options.script, options.arguments, options.resume)
    except KeyboardInterrupt:  # a line said what is durable
        if os.environ.get("INFINITY_DEBUG"):
            raise
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, ConfigError) and not os.environ.get("INFINITY_DEBUG"):
            return _refuse(error, who)  # it says what to change, and where
        _say_it_last(error, who)
        raise
    return 0


def _refuse(error: InfinityError, who: str) -> int:
    print(f"{who}error: {one_line(str(error))}", file=sys.stderr)
    return 2


def _say_it_last(error: BaseException, who: str) -> None:
    """Let the line after the traceback be the message of infinity that is at its bottom, which names the fix."""
    cause = cause_of(error)
    if cause is None:
        return
    theirs, message = sys.excepthook, one_line(str(cause))

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        theirs(kind, value, trace)
        print(f"{who}error: {message}", file=sys.stderr)

    sys.excepthook = hook
