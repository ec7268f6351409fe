"""The directory OUTPUT-steps beside an output.

It contains the models of --save-every and --save-best, as TRL's trainer writes them, and the files of trackers. A run
is resumed from its store, not from these models.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from infinity.cli.finetune_options import FinetuneOptions
from infinity.cli.history import EvaluationLoss, best_of
from infinity.cli.ownership_mark import DirectoryOwner
from infinity.errors import ConfigError, printable
from infinity.sizes import format_bytes

TRAINER_STATE_NAME, PREFIX_CHECKPOINT_DIR = "trainer_state.json", "checkpoint"
"""Names of transformers.trainer and transformers.trainer_utils, whose imports take many seconds."""
_NAME_CHARS = 48


def directory_of(output: Path) -> Path:
    return output.with_name(f"{output.name}-steps")


def check(options: FinetuneOptions) -> None:
    """Check the options about saving and trackers.

    Raises:
        ConfigError: an option has no effect without another option, or needs a library that is not installed.
    """
    if options.save_best and options.eval_steps is None:
        raise ConfigError("--save-best needs --eval-steps: without it only the last step is evaluated")
    for name in options.logger or ():
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"--logger {name} needs its library: pip install {name.replace('_', '-')}")


def _is_needed(options: FinetuneOptions) -> bool:
    return bool(options.save_every or options.save_best or options.logger)


def prepare(options: FinetuneOptions, owner: DirectoryOwner) -> None:
    """Check that the directory can be created, or already belongs to this run.

    Raises:
        ConfigError: the directory cannot be created, or belongs to another run.
    """
    if not _is_needed(options):
        return
    directory = directory_of(options.output)
    owner.require(directory, "the models of --save-every and --save-best and the files of --logger", "--output")
    try:
        os.rmdir(tempfile.mkdtemp(prefix=f".{directory.name[:_NAME_CHARS]}-", dir=directory.parent))
    except OSError as error:
        raise ConfigError(
            f"{printable(directory)}, for the models of --save-every and --save-best and the files of --logger, cannot "
            f"be made: {error.strerror}. Choose an --output in a writable directory."
        ) from error


def folder_of(directory: Path, step: int) -> Path:
    """Return the path of the folder for the model that was saved after a step."""
    return directory / f"{PREFIX_CHECKPOINT_DIR}-{step}"


def is_whole(folder: Path) -> bool:
    """Return whether a folder has a complete model.

    The folder is complete if it has the file of the trainer's state, which a trainer writes last.
    """
    return Path(folder, TRAINER_STATE_NAME).is_file()


def _folders_in(directory: Path) -> dict[int, Path]:
    """Return all folders of models, complete and incomplete, by step."""
    found = {}
    for path in directory.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        number = re.fullmatch(r"[1-9][0-9]*", path.name.rpartition("-")[2])
        if number is not None:
            found[int(number[0])] = path
    return dict(sorted(found.items()))


def models_in(directory: Path) -> dict[int, Path]:
    """Return the folders of complete models, by step."""
    return {step: folder for step, folder in _folders_in(directory).items() if is_whole(folder)}


def tidy(options: FinetuneOptions, done: int) -> None:
    """Remove incomplete models, which an interrupted run has left, and models of steps that this run will repeat.

    Args:
        options: options of the run.
        done: number of steps that the run has done.

    Raises:
        OSError: a model cannot be removed.
    """
    if not _is_needed(options):
        return
    directory = directory_of(options.output)
    for aside in directory.glob(f".{PREFIX_CHECKPOINT_DIR}-*"):
        shutil.rmtree(aside)
    for step, folder in _folders_in(directory).items():
        if step > done or not is_whole(folder):
            _remove(folder)


def rotate(options: FinetuneOptions, evaluations: Sequence[EvaluationLoss]) -> None:
    """Remove models that are not needed any more.

    Of the models of --save-every, the newest are kept; their number is --save-limit. With --save-best, the best model
    is kept, too. Incomplete models are removed.

    Raises:
        OSError: a model cannot be removed.
    """
    directory = directory_of(options.output)
    there = models_in(directory)
    of_every = [step for step, folder in there.items() if _is_of_every(step, folder, options)]
    kept = {*of_every[-(options.save_limit or len(of_every)) :]}
    if not options.save_best:
        kept |= there.keys() - set(of_every)
    elif (best := best_of([each for each in evaluations if each.step in there])) is not None:
        kept.add(best.step)
    for step, folder in _folders_in(directory).items():
        if step not in kept:
            _remove(folder)


def _is_of_every(step: int, folder: Path, options: FinetuneOptions) -> bool:
    """Return whether a model was saved because of --save-every. If not, the model was saved because it was the best."""
    if options.save_every is not None and step % options.save_every == 0:
        return True
    try:
        every: int = json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))["save_steps"]
        return step % every == 0  # the interval may have changed when the run was resumed
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return True


def _remove(folder: Path) -> None:
    # this file is removed first, so that after a kill the folder is incomplete
    (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
    shutil.rmtree(folder)


def require_room(options: FinetuneOptions, last: int, done: int, model_bytes: int) -> None:
    """Check that the disk has room for the models that will be saved, and for the output.

    Args:
        options: options of the run.
        last: number of steps of the run.
        done: number of steps that the run has done.
        model_bytes: bytes of a saved model.

    Raises:
        ConfigError: the disk has too little room.
    """
    # when a better model is saved, both models exist until the older model is removed
    most = 2 * bool(options.save_best)
    if options.save_every is not None:
        more = (last - 1) // options.save_every - max(done - 1, 0) // options.save_every
        if options.save_limit is not None:
            more = min(more, max(options.save_limit + 1 - len(models_in(directory_of(options.output))), 1))
        most += more
    needed, free = (most + 1) * model_bytes, shutil.disk_usage(options.output.parent).free
    if most and needed > free:
        option, fewer = "--save-every", "Save less often, keep fewer models (--save-limit)"
        if options.save_every is None:
            option, fewer = "--save-best", "Leave --save-best out"
        raise ConfigError(
            f"{option}: {most} models of {format_bytes(model_bytes)} and the output take {format_bytes(needed)}, and "
            f"the disk of {printable(options.output.parent)} has {format_bytes(free)} free. {fewer}, or choose an "
            "--output on another disk."
        )


def made(options: FinetuneOptions, owner: DirectoryOwner | None, held: ExitStack) -> Path:
    """Return the directory. Create it if it does not exist.

    Args:
        options: options of the run.
        owner: owner of the directory, which creates the directory; None on all ranks except the first.
        held: exit stack. If the options need no directory, the result is a temporary directory, which the exit stack
            removes.

    Raises:
        OSError, InfinityError: the directory cannot be created.
    """
    if not _is_needed(options):
        return Path(held.enter_context(tempfile.TemporaryDirectory()))
    directory = directory_of(options.output)
    if owner is not None:
        owner.make(directory)
    return directory


def said(options: FinetuneOptions, evaluations: Sequence[EvaluationLoss], failed: Sequence[str]) -> list[str]:
    """Return lines that name the models in the directory. The output must be complete before this call.

    Args:
        options: options of the run.
        evaluations: all evaluations of the run.
        failed: lines about models that could not be saved. The result begins with these lines.
    """
    directory, lines = directory_of(options.output), list(failed)
    there = models_in(directory)
    if there:
        lines.append(f"models of steps: {directory}: {', '.join(path.name for path in there.values())}")
    best = best_of(evaluations) if options.save_best else None
    if best is not None:
        places = there | {evaluations[-1].step: options.output}
        where = places.get(best.step, "its model could not be saved")
        lines.append(f"lowest held-out loss: {best.loss:.4f}, of step {best.step}: {where}")
    return lines
