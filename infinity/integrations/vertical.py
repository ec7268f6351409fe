"""`vertical: true` for a Trainer: the micro-batches of a step go through one unit of the model after the other.

A Trainer calls `training_step` for each micro-batch, which runs it forward and backward. Here all calls but the last of
a step keep their inputs and return zero. The last one runs them all with infinity.backward, and returns the sum: what
the Trainer adds up is the same.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

        def loss_of(index: int) -> torch.Tensor:
            with withheld.of_this_thread() as found:
                args, options = waiting[index]
                losses[index] = original(trainer, model, *args, **options)
            if len(found) != 1:
                raise ModelError(
                    f"{type(trainer).__name__}.training_step ran {len(found)} backward passes for a micro-batch; with "
                    "vertical: true it must run one. Set vertical: false."
                )
            return found[0]

        withheld = _Withheld()
        with patched(torch.Tensor, "backward", withheld):
            backward(model, loss_of, range(len(waiting)))
        return torch.stack([losses[index] for index in range(len(waiting))]).sum()


class _Withheld:
    """Losses whose `backward()` was called, and did nothing yet."""

    def __init__(self) -> None:
        self._here = threading.local()

    def __call__(self, original: Callable[..., None], loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """In place of `loss.backward(...)`."""
        found: list[torch.Tensor] | None = getattr(self._here, "found", None)
        if found is None:
            original(loss, *args, **kwargs)
        else:
            found.append(loss)

    @contextmanager
    def of_this_thread(self) -> Iterator[list[torch.Tensor]]:
        """In this context they are withheld, and enter the list."""
        self._here.found = []
        try:
            yield self._here.found
        finally:
            del self._here.found
