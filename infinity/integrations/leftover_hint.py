"""The messages for a failed, stopped or refused script: which states are on disk, and how the script continues."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from infinity.errors import ManifestError
from infinity.io.directory import parts_text
from infinity.io.pins import GenerationPin, read_pins
from infinity.ranks.paths import rank_path
from infinity.ranks.ranks import rank_and_world
from infinity.sharded.stores import counts_in, steps_of

logger = logging.getLogger(__name__)

Resuming = Callable[[str], str]
"""Function that returns the command that resumes the script from a checkpoint folder; "" if no command does."""


def no_command(folder: str) -> str:
    """Return "": a script that was not started by the launcher has no such command."""
    return ""


def log_leftovers(places: Sequence[Path], resuming: Resuming, *, stopped: bool) -> None:
    """Log which states a script left on disk. The script's models are closed already. Only rank 0 logs.

    Args:
        places: the first directory of each model's store.
        resuming: function that returns the command that resumes the script.
        stopped: whether Ctrl-C stopped the script; False: the script failed, and its error was reported.
    """
    rank, ranks = rank_and_world()
    found = {place: steps for place in places if (steps := _steps_in(place, ranks))}
    if rank != 0 or not (found or stopped):
        return
    how = "stopped" if stopped else "the script failed"
    if not found:
        logger.warning("infinity: %s; no step of it is durable, so the script must start from the beginning", how)
    for place, steps in found.items():
        logger.warning(
            "infinity: %s; its states after step %d are durable in %s. %s",
            how,
            max(steps),
            place,
            _ways_on(place, ranks, resuming),
        )


def held_by_an_earlier_run(place: Path, resuming: Resuming) -> str:
    """Return why a script cannot begin in a directory, and how it continues.

    Args:
        place: the first directory of the store.
        resuming: function that returns the command that resumes the script.

    Returns:
        "" if the store in the directory is not one of this number of ranks, or has no complete generation.
    """
    _, ranks = rank_and_world()
    steps = _steps_in(place, ranks)
    if not steps:
        return ""
    return (
        f"{place} holds the states of an earlier run after step {max(steps)}. {_ways_on(place, ranks, resuming)}. Or "
        "give this run another directory in nvme.paths"
    )


def _steps_in(place: Path, ranks: int) -> Collection[int]:
    return steps_of(place, ranks) if place.is_dir() and ranks in counts_in(place) else ()


def _ways_on(first: Path, ranks: int, resuming: Resuming) -> str:
    place = shlex.quote(str(first))
    out = (
        f"`infinity checkpoint export {place} --output OUT` writes them as a model (adapters under PEFT's names, "
        "which from_pretrained does not read) and its optimizer states"
    )
    pin = _newest(rank_path(first, 0, ranks))
    if pin is not None:
        folder = shlex.quote(pin.folder)
        way = f"{folder} as resume_from_checkpoint= of a Trainer, ckpt_path= of Lightning or resume= of InfinityConfig"
        ways = ", or with ".join(filter(None, (resuming(folder), way)))
        return f"Resume from step {pin.step} with {ways}. {out}; {_removal('--pinned ', first)}"
    return (
        "No checkpoint folder names them, so no script can resume from them (with a smaller save_steps, a Trainer "
        f"saves the first folder earlier). {out}; {_removal('', first)}"
    )


def _removal(options: str, first: Path) -> str:
    return (
        f"`infinity checkpoint remove {options}{parts_text(first)}` removes them, so that the script can start from "
        "the beginning"
    )


def _newest(directory: Path) -> GenerationPin | None:
    try:
        return next(reversed(read_pins(directory)), None)
    except ManifestError as error:
        logger.warning("%s", error)
        return None
