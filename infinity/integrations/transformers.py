"""transformers' Trainer, and with it TRL's: what it must do otherwise for an offloaded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from infinity.integrations.patches import Patches
from infinity.integrations.run import Run


def replace_training(run: Run, patches: Patches) -> None:
    """From now on every Trainer offloads its model when it makes its optimizer."""
    from transformers import Trainer

    patches.wrap(Trainer, "__init__", _init(run))
    patches.wrap(Trainer, "create_optimizer", _create_optimizer(run))


def _init(run: Run) -> Callable[..., None]:
    def init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        run.trained.add(self.model)
        run.wishes.accumulation_steps = self.args.gradient_accumulation_steps
        self.args._n_gpu = min(self.args._n_gpu, 1)

    return init


def _create_optimizer(run: Run) -> Callable[..., Any]:
    def create(original: Callable[..., Any], self: Any, model: nn.Module | None = None) -> torch.optim.Optimizer:
        run.ensure_offloaded(self.model if model is None else model)
        optimizer: torch.optim.Optimizer = original(self, model)
        return optimizer

    return create
