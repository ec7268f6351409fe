"""`vertical: true` for a Trainer: the micro-batches of a step go through one unit of the model after the other.

A Trainer calls `training_step` for each micro-batch, which runs it forward and backward. Here all calls but the last of
a step keep their inputs and return zero. The last one runs them all with infinity.backward, and returns the sum: what
the Trainer adds up is the same.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from infinity.errors import ModelError
from infinity.integrations.patches import patched
from infinity.runtime.micro_batches import backward

logger = logging.getLogger(__name__)


class TrainingSteps:
    """The training steps of all Trainers."""

    def __init__(self) -> None:
        self._waiting: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        self._warned: weakref.WeakSet[Any] = weakref.WeakSet()

    def forget(self, trainer: Any) -> None:
        """Micro-batches of a step that something ended."""
        self._waiting.pop(trainer, None)

    def warn_of(self, trainer: Any) -> None:
        """Say once that a Trainer's micro-batches go one after the other: when it prepares inputs matters to it."""
        if trainer not in self._warned:
            self._warned.add(trainer)
            logger.warning(
                "vertical: true does nothing for %s, which prepares its inputs step by step: its micro-batches go one "
                "after the other",
                type(trainer).__name__,
            )

    def __call__(
        self, original: Callable[..., torch.Tensor], trainer: Any, model: Any, *given: Any, **named: Any
    ) -> torch.Tensor:
        """A micro-batch. Args: given, named: its inputs, and what else `training_step` takes."""
        waiting = self._waiting.setdefault(trainer, [])
        waiting.append((given, named))
        if not trainer.accelerator.gradient_state.sync_gradients:
            return torch.zeros((), device=trainer.args.device)
        del self._waiting[trainer]
        losses = dict[int, torch.Tensor]()
        here = threading.local()  # each micro-batch's call is in a thread of its own

        def withhold(original: Callable[..., None], loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            """In place of `loss.backward(...)`."""
            if hasattr(here, "withheld"):
                here.withheld.append(loss)
            else:
                original(loss, *args, **kwargs)

        def loss_of(index: int) -> torch.Tensor:
            here.withheld = found = list[torch.Tensor]()
            try:
                args, options = waiting[index]
                losses[index] = original(trainer, model, *args, **options)
            finally:
                del here.withheld
            if len(found) != 1:
                raise ModelError(
                    f"{type(trainer).__name__}.training_step ran {len(found)} backward passes for a micro-batch; with "
                    "vertical: true it must run one. Set vertical: false."
                )
            return found[0]

        with patched(torch.Tensor, "backward", withhold):
            backward(model, loss_of, range(len(waiting)))
        return torch.stack([losses[index] for index in range(len(waiting))]).sum()
