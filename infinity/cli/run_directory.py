"""OUTPUT-steps, the directory beside an output: the models of --save-every and --save-best, as TRL's trainer saves
them, and the files of trackers. A run goes on from its store and not from these."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from infinity.cli.history import Evaluated, best_of
from infinity.cli.marked import Owner
from infinity.cli.options import require_alone
from infinity.errors import ConfigError, printable
from infinity.sizes import format_bytes

_NAME_CHARS = 48


def directory_of(output: Path) -> Path:
    return output.with_name(f"{output.name}-steps")


def check(options: argparse.Namespace) -> None:
    """Raises ConfigError for options that do nothing without another one, or need a library that is not there."""
    held_out = options.eval_data or options.eval_split
    require_alone("--save-limit", options.save_limit, "--save-every", options.save_every)
    require_alone("--save-best", options.save_best or None, "--eval-data or --eval-split", held_out)
    if options.save_best and options.eval_steps is None:
        raise ConfigError("--save-best needs --eval-steps: else the last step is the only one that is evaluated")
    for name in options.logger or ():
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"--logger {name} needs its library: pip install {name.replace('_', '-')}")


def _is_needed(options: argparse.Namespace) -> bool:
    return bool(options.save_every or options.save_best or options.logger)


def prepare(options: argparse.Namespace, owner: Owner) -> None:
    """Raises ConfigError where the directory cannot be made, or is another run's."""
    if not _is_needed(options):
        return
    directory = directory_of(options.output)
    owner.require(directory, "the models of --save-every and --save-best and the files of --logger", "--output")
    try:
        os.rmdir(tempfile.mkdtemp(prefix=f".{directory.name[:_NAME_CHARS]}-", dir=directory.parent))
    except OSError as error:
        raise ConfigError(
            f"{printable(directory)}, for the models of --save-every and --save-best and the files of --logger, cannot "
            f"be made: {error.strerror}. Choose an --output in a directory that can be written."
        ) from error


def require_room(options: argparse.Namespace, last: int, done: int, model_bytes: int) -> None:
    """Raises ConfigError if the disk has no room for the models that will be saved, and for the output beside them.

    Args:
        last, done: steps of the run, and those that it has done.
    """
    most = int(bool(options.save_best))
    if options.save_every is not None:
        more = (last - 1) // options.save_every - max(done - 1, 0) // options.save_every
        most += more if options.save_limit is None else min(more, options.save_limit + 1)
    needed, free = (most + 1) * model_bytes, shutil.disk_usage(options.output.parent).free
    if most and needed > free:
        option, fewer = "--save-every", "Save less often, keep fewer (--save-limit)"
        if options.save_every is None:
            option, fewer = "--save-best", "Leave --save-best out"
        raise ConfigError(
            f"{option}: {most} models of {format_bytes(model_bytes)} and the output take {format_bytes(needed)}, and "
            f"the disk of {printable(options.output.parent)} has {format_bytes(free)} free. {fewer}, or choose an "
            "--output on another disk."
        )


def made(options: argparse.Namespace, owner: Owner | None, held: ExitStack) -> Path:
    """The directory; one that `held` removes where nothing is kept in it. Args: owner: None on other ranks than the
    first. Raises OSError, InfinityError."""
    if not _is_needed(options):
        return Path(held.enter_context(tempfile.TemporaryDirectory()))
    directory = directory_of(options.output)
    if owner is not None:
        owner.make(directory)
    return directory


def said(options: argparse.Namespace, evaluations: Sequence[Evaluated], failed: Sequence[str]) -> list[str]:
    """Lines that say where models of steps are, once the output is there. Args: failed: why some are not."""
    directory, lines = directory_of(options.output), list(failed)
    there = sorted(directory.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    if there:
        lines.append(f"models of steps: {directory}: {', '.join(path.name for path in there)}")
    best = best_of(evaluations) if options.save_best else None
    if best is not None:
        places = {each.name: each for each in there} | {f"checkpoint-{evaluations[-1].step}": options.output}
        where = places.get(f"checkpoint-{best.step}", "its model could not be saved")
        lines.append(f"lowest held-out loss: {best.loss:.4f}, of step {best.step}: {where}")
    return lines
