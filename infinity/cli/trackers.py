"""The trackers of --logger. A Trainer gives them the figures of a run. If the run is resumed, TensorBoard and wandb
continue its records."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback

_PROJECT = "infinity"
_TAKE_TEXTS = {"tensorboard", "trackio", "wandb"}


def take_texts(options: argparse.Namespace) -> bool:
    """Return whether one of the trackers shows texts."""
    return bool(_TAKE_TEXTS.intersection(options.logger or ()))


@contextmanager
def opened(options: argparse.Namespace, run: str, directory: Path, done: int) -> Iterator[list[TrainerCallback]]:
    """Open trackers, and yield the callbacks that a Trainer needs in addition to those of its report_to.

    Args:
        options: options of the run.
        run: run id.
        directory: directory for the trackers' files.
        done: number of steps that the run has done.
    """
    callbacks: list[TrainerCallback] = []
    with ExitStack() as held:
        if "tensorboard" in (options.logger or ()):
            from torch.utils.tensorboard import SummaryWriter

            writer = held.enter_context(SummaryWriter(str(directory), purge_step=done + 1))
            callbacks.append(TensorBoardCallback(writer))
        if "wandb" in (options.logger or ()):
            wandb: Any = importlib.import_module("wandb")
            # The Trainer's callback uses a run that is already open.
            wandb_run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", _PROJECT),
                name=(options.trainer or {}).get("run_name", [options.output.name])[0],
                dir=os.environ.get("WANDB_DIR", str(directory)),
                id=os.environ.get("WANDB_RUN_ID", run),
                resume="allow",
            )
            held.enter_context(wandb_run)
        yield callbacks
