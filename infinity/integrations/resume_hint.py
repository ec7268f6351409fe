"""The messages for a failed, stopped or refused script: which states are on disk, and how the script continues.

[Note: the step that a script continues after]
A store may have a generation that is newer than the newest checkpoint folder. A script cannot continue from it, because
the state of its Trainer and its data is only in the folders. Therefore the messages name the step of the newest folder.
"""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from infinity.errors import ManifestError, printable
from infinity.io.directory import parts_text
from infinity.io.generation_pins import GenerationPin, read_pins
from infinity.ranks.paths import rank_path
from infinity.ranks.ranks import rank_and_world
from infinity.sharded.rank_stores import counts_in, steps_of

logger = logging.getLogger(__name__)

Resuming = Callable[[str], str]
"""Function that returns how a run resumes from a checkpoint folder: a command, or an argument for its trainer."""


def by_trainer(folder: str) -> str:
    return f"`trainer.train(resume_from_checkpoint={folder!r})`"


def log_leftovers(places: Mapping[Path, int], resuming: Resuming, *, stopped: bool) -> None:
    """Log which states a script left on disk. The script's models are closed already. Only rank 0 logs.

    The message begins with a line break, because the terminal may show `^C` or a progress bar.

    Args:
        places: the first directory of each model's store, with the number of steps that were done; 0: unknown.
        resuming: function that returns how the script resumes.
        stopped: whether Ctrl-C stopped the script; False: the script failed, and its error was reported.
    """
    rank, ranks = rank_and_world()
    found = {place: steps for place in places if (steps := _steps_in(place, ranks))}
    if rank != 0 or not (found or stopped):
        return
    how = "stopped" if stopped else "the script failed"
    if not found:
        logger.warning("\ninfinity: %s; no step of it is durable, so the script must start from the beginning", how)
    for place, steps in found.items():
        done, pin = places[place] or max(steps), _newest(rank_path(place, 0, ranks))
        if pin is None:
            state = f"no checkpoint folder was saved, and {printable(place)} has the states after step {max(steps)}"
        else:
            again = f"computes {_span(pin.step + 1, done)} again, to the same bits"
            state = (
                f"the newest checkpoint folder is of step {pin.step}, so the next start continues after step {pin.step}"
                f" and {again if done > pin.step else 'repeats no step'}"
            )
        ways = _ways_on(place, ranks, resuming, pin)
        logger.warning("\ninfinity: %s after step %d; %s%s", how, done, state, "".join(f"\n  {line}" for line in ways))


def _span(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def held_by_an_earlier_run(place: Path, resuming: Resuming) -> str:
    """Return why a script cannot begin in a directory, and in further lines how it continues.

    Args:
        place: the first directory of the store.
        resuming: function that returns how the script resumes.

    Returns:
        "" if the store in the directory is not one of this number of ranks, or has no complete generation.
    """
    _, ranks = rank_and_world()
    steps = _steps_in(place, ranks)
    if not steps:
        return ""
    pin = _newest(rank_path(place, 0, ranks))
    what, ways = f"the states of an earlier run after step {max(steps)}", _ways_on(place, ranks, resuming, pin)
    if pin is not None:
        what = f"the states of an earlier run, whose newest checkpoint folder is of step {pin.step}"
    if pin is not None and _is_finished(Path(pin.folder)):
        what = f"a run that finished after step {pin.step}"
        ways[0] = f"to continue it, give the script more steps and resume: {resuming(pin.folder)}"
    lines = [f"{printable(place)} holds {what}", *ways, "or give this run another directory in nvme.paths"]
    return "\n".join(lines)


def _is_finished(folder: Path) -> bool:
    """Return whether a Trainer wrote a checkpoint folder after all of its steps."""
    try:
        state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
        return bool(state["global_step"] >= state["max_steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return False  # no Trainer wrote the folder


def _steps_in(place: Path, ranks: int) -> Collection[int]:
    return steps_of(place, ranks) if place.is_dir() and ranks in counts_in(place) else ()


def _ways_on(first: Path, ranks: int, resuming: Resuming, pin: GenerationPin | None) -> list[str]:
    """Return lines that say what the user can do with a store.

    Args:
        first: the first directory of the store.
        ranks: number of ranks.
        resuming: function that returns how the script resumes.
        pin: the pin of the newest checkpoint folder; None if no folder was saved.
    """
    parts = parts_text(first)
    if pin is None:
        return [
            "the script cannot resume from them, because no checkpoint folder was saved; let the script save one",
            f"to keep them as a model with its optimizer states: `infinity checkpoint export {shlex.quote(str(first))} "
            "--output OUT`",
            f"to start from the beginning: `infinity checkpoint remove {parts}` removes the states in the store",
        ]
    return [
        f"to resume it after step {pin.step}: {resuming(pin.folder)}",
        f"to start from the beginning: `infinity checkpoint remove --pinned {parts}` removes the states in the store",
    ]


def _newest(directory: Path) -> GenerationPin | None:
    try:
        return next(reversed(read_pins(directory)), None)
    except ManifestError as error:
        logger.warning("%s", error)
        return None
