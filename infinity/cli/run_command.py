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

from infinity.cli.rank_errors import is_told_by_rank_0
from infinity.cli.streams import INTERRUPTED, interruptible_imports
from infinity.cli.suggested_command import command
from infinity.config import load_config
from infinity.errors import (
    ConfigError,
    InfinityError,
    PeerError,
    ResumeError,
    StoreLockedError,
    StoreNotEmptyError,
    cause_of,
)
from infinity.integrations.deepspeed_errors import refuse_argument
from infinity.quoting import one_line, with_ways

_NEEDS_NO_TRACEBACK = (ConfigError, ResumeError, StoreLockedError, StoreNotEmptyError)
"""Errors whose message says what to change outside the script, or which command to run."""
_NAME = "infinity: "


def run(options: argparse.Namespace) -> int:
    """Run the script in this process, like `python SCRIPT ARGS`. Exceptions of the script are raised.

    Returns:
        The exit code. 2: the swap config, its directories, the script or the checkpoint folder cannot be used, or the
            script needs a feature that infinity does not have. 130: Ctrl-C, which prints one message. 0: success.
    """
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    who = f"rank {os.environ.get('RANK', '?')}: " if several else ""
    with _speaking(logging.INFO if options.verbose else logging.WARNING, who):
        return _run(options, who, several=several)


class _NamedLines(logging.Formatter):
    """A formatter whose records begin with infinity's name, because they stand among the output of a script.

    Args:
        who: text before each record.
    """

    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return self._who + (text if text.lstrip().startswith(_NAME) else _NAME + text)


@contextmanager
def _speaking(level: int, who: str) -> Iterator[None]:
    """Print infinity's log records to stderr until the end of the `with` block.

    The handler is added to infinity's own logger, because the root logger belongs to the script.

    Args:
        level: lowest level of the records that are printed.
        who: beginning of each record: the rank, or "" for a single process.
    """
    ours, handler = logging.getLogger("infinity"), logging.StreamHandler()
    handler.setFormatter(_NamedLines(who))
    # The message about a script that ended early says which steps are repeated, and how to go on.
    handler.addFilter(lambda record: not hasattr(record, "step_to_repeat"))
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
        refuse_argument(options.arguments)
        config = load_config(options.config)
        if not options.script.is_file():
            raise ConfigError(f"the script {options.script} does not exist: infinity run CONFIG SCRIPT [ARGS...]")
        with interruptible_imports():  # these import torch
            from infinity.cli.config_checks import require_ready, require_whole_store
            from infinity.integrations.launcher import launch
            from infinity.runtime.pins import generation_of
        if options.resume is not None and not several:  # if there are several ranks, they are not connected yet
            marker = generation_of(options.resume, config)
            if marker.portable is None:
                require_whole_store(config)
        require_ready(config)
    except InfinityError as error:
        return _refuse(error, who)
    before = command("run", "--resume")  # the script changes sys.argv
    after = shlex.join(map(str, (options.config, options.script, *options.arguments)))

    def resuming(folder: str) -> str:
        return f"`{before} {shlex.quote(folder)} {after}`"

    try:
        launch(config, options.script, options.arguments, options.resume, resuming)
    except KeyboardInterrupt:  # a message that names the durable generation was already printed
        if os.environ.get("INFINITY_DEBUG"):
            raise
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, _NEEDS_NO_TRACEBACK) and not os.environ.get("INFINITY_DEBUG"):
            return _refuse(error, who)
        other = _of_another_rank(error)
        if other is not None and not os.environ.get("INFINITY_DEBUG"):
            return 2 if is_told_by_rank_0(other) else _refuse(other, who)
        _say_it_last(error, who)
        raise
    return 0


def _refuse(error: InfinityError, who: str) -> int:
    print(f"{who}error: {with_ways(error)}", file=sys.stderr)
    return 2


def _of_another_rank(error: BaseException) -> PeerError | None:
    """Return the error of another rank that ended this one; None if there is none. The traceback of this rank would
    hide that of the other rank."""
    cause, rank = cause_of(error), int(os.environ.get("RANK", "0"))
    return cause if isinstance(cause, PeerError) and cause.ranks and rank not in cause.ranks else None


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
