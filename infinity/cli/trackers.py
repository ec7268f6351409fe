"""The trackers of --logger, such as TensorBoard, which show the figures of a run.

If a run is resumed, TensorBoard and wandb continue the earlier records of the run. A tracker that fails does not end
the run.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback, get_reporting_integration_callbacks

from infinity.cli.finetune_options import FinetuneOptions
from infinity.errors import InfinityError
from infinity.quoting import raised

_PROJECT = "infinity"
_TAKE_TEXTS = {"tensorboard", "trackio", "wandb"}


def take_texts(options: FinetuneOptions) -> bool:
    """Return whether any of the trackers shows texts."""
    return bool(_TAKE_TEXTS.intersection(options.logger or ()))


@contextmanager
def opened(options: FinetuneOptions, run: str, directory: Path, done: int) -> Iterator[list[Any]]:
    """Open the trackers, and yield their callbacks for a Trainer.

    Args:
        options: options of the run.
        run: run id.
        directory: directory for the files of the trackers.
        done: number of steps that the run has done.
    """
    with ExitStack() as held:
        yield [
            held.enter_context(_GuardedCallback(name, partial(_callback, name, options, run, directory, done)))
            for name in options.logger or ()
        ]


def _callback(
    name: str, options: FinetuneOptions, run: str, directory: Path, done: int, held: ExitStack
) -> TrainerCallback:
    """Return transformers' callback for a tracker. The exit stack `held` will close the tracker."""
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        return TensorBoardCallback(held.enter_context(SummaryWriter(str(directory), purge_step=done + 1)))
    if name == "wandb":
        wandb: Any = importlib.import_module("wandb")
        # The callback uses the wandb run that is already open.
        wandb_run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=(options.trainer or {}).get("run_name", [options.output.name])[0],
            dir=os.environ.get("WANDB_DIR", str(directory)),
            id=os.environ.get("WANDB_RUN_ID", run),
            resume="allow",
        )
        held.enter_context(wandb_run)
    (kind,) = get_reporting_integration_callbacks([name])
    return kind()


class _GuardedCallback:
    """A callback of a Trainer that turns errors of a tracker into warnings.

    An error occurs, for example, if a server does not respond.

    Only the first error is printed.

    Args:
        name: name of the tracker.
        make: function that opens the tracker and returns the tracker's callback; its argument is an exit stack that
            closes the tracker.
    """

    def __init__(self, name: str, make: Callable[[ExitStack], TrainerCallback]) -> None:
        self._tracker = name
        self._failed = False
        self._held = ExitStack()
        self._callback = self._call(make, self._held)

    def __getattr__(self, event: str) -> Callable[..., Any]:
        if not event.startswith("on_"):
            raise AttributeError(event)
        return partial(self._call, getattr(self._callback or TrainerCallback(), event))

    def __enter__(self) -> _GuardedCallback:
        return self

    def __exit__(self, *error: object) -> None:
        self._call(self._held.__exit__, *error)

    def _call(self, act: Callable[..., Any], *given: Any, **named: Any) -> Any:
        try:
            return act(*given, **named)
        except InfinityError:
            raise
        except Exception as error:
            if not self._failed:
                what = f"warning: the tracker {self._tracker} failed: {raised(error)}; the run continues"
                print(what, file=sys.stderr, flush=True)
            self._failed = True
            return None
