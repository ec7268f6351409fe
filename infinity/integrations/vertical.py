"""`vertical: true` for a Trainer.

All micro-batches of a step go through one unit of the model before the next unit is computed.

A Trainer calls `training_step` for each micro-batch. Without `vertical: true`, each call runs the forward and backward
of its micro-batch. With `vertical: true`, every call except the last one of a step only keeps its inputs, and returns
zero. The last call runs all micro-batches with infinity.backward, and returns the sum of their losses. Therefore the
Trainer computes the same total loss.
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
    """The replacement of `training_step` for all Trainers.

    It has the micro-batches of the current step that wait for the last one.
    """

    def __init__(self) -> None:
        self._waiting: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        self._warned: weakref.WeakSet[Any] = weakref.WeakSet()

    def forget(self, trainer: Any) -> None:
        """Discard the micro-batches of a step that was interrupted."""
        self._waiting.pop(trainer, None)

    def warn_of(self, trainer: Any) -> None:
        """Warn once that the micro-batches of a Trainer are computed one after the other.

        The inputs of this Trainer depend on when they are prepared.
        """
        if trainer not in self._warned:
            self._warned.add(trainer)
            logger.warning(
                "vertical: true does nothing for %s, which prepares its inputs step by step: micro-batches are "
                "computed one after the other",
                type(trainer).__name__,
            )

    def __call__(
        self, original: Callable[..., torch.Tensor], trainer: Any, model: Any, *given: Any, **named: Any
    ) -> torch.Tensor:
        """Keep a micro-batch. If it is the last micro-batch of the step, run all micro-batches of the step.

        `given` and `named` are the arguments of `training_step` after the model: the inputs of the micro-batch and
        other arguments.
        """
        waiting = self._waiting.setdefault(trainer, [])
        waiting.append((given, named))
        if not trainer.accelerator.gradient_state.sync_gradients:
            return torch.zeros((), device=trainer.args.device)
        del self._waiting[trainer]
        losses = dict[int, torch.Tensor]()
        here = threading.local()  # each micro-batch is computed in a thread of its own

        def withhold(original: Callable[..., None], loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            """Keep the loss for later, in place of `loss.backward(...)`."""
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
                    f"{type(trainer).__name__}.training_step ran {len(found)} backward passes for a micro-batch, but "
                    "with vertical: true it must run one. Set vertical: false."
                )
            return found[0]

        with patched(torch.Tensor, "backward", withhold):
            backward(model, loss_of, range(len(waiting)))
        return torch.stack([losses[index] for index in range(len(waiting))]).sum()
