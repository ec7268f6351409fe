"""The log line after a failed or stopped script: which states remain on disk, and how to continue from these states."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from pathlib import Path

from infinity.errors import ManifestError
from infinity.io.directory import parts_text
from infinity.io.pins import Pin, read_pins
from infinity.ranks.paths import rank_path
from infinity.ranks.ranks import rank_and_world
from infinity.sharded.stores import counts_in, steps_of

logger = logging.getLogger(__name__)


def log_leftovers(places: Sequence[Path], *, stopped: bool) -> None:
    """Log which states a script left on disk. The script's models are closed already. Only rank 0 logs.

    Args:
        places: the first directory of each model's store.
        stopped: whether Ctrl-C stopped the script; False: the script failed, and its error was reported.
    """
    rank, ranks = rank_and_world()
    found = {place: steps_of(place, ranks) for place in places if place.is_dir() and ranks in counts_in(place)}
    found = {place: steps for place, steps in found.items() if steps}
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
            _ways_on(place, ranks),
        )


def _ways_on(first: Path, ranks: int) -> str:
    place = shlex.quote(str(first))
    out = (
        f"`infinity checkpoint export {place} --output OUT` writes them as a model (adapters under PEFT's names, "
        "which from_pretrained does not read) and its optimizer states"
    )
    gone = (
        f"`infinity checkpoint remove {parts_text(first)}` removes them, so that the script "
        "can start from the beginning"
    )
    pin = _newest(rank_path(first, 0, ranks))
    if pin is not None:
        folder = shlex.quote(pin.folder)
        return (
            f"Resume from the checkpoint folder {folder} (step {pin.step}): with resume_from_checkpoint= of a Trainer, "
            f"ckpt_path= of Lightning, or `infinity run --resume {folder} CONFIG SCRIPT`. {out}"
        )
    return (
        "No checkpoint folder names them, so no script can resume from them (with a smaller "
        "save_steps, a Trainer saves the "
        f"first folder earlier). {out}; {gone}"
    )


def _newest(directory: Path) -> Pin | None:
    try:
        return max(read_pins(directory), key=lambda pin: pin.step, default=None)
    except ManifestError as error:
        logger.warning("%s", error)
        return None
