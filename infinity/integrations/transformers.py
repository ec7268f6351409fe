"""transformers' Trainer, and with it TRL's: what it must do otherwise for an offloaded model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.coordinator import registry
from infinity.errors import ModelError
from infinity.integrations.folders import Saving, letting_go
from infinity.integrations.names import class_and_options, wish_for
from infinity.integrations.patches import Patches
from infinity.integrations.run import Run

_UNBOUNDED_PINS = 2
"""Checkpoint folders with a generation of their own where a script keeps all of them: older ones hold a copy."""


def replace_training(run: Run, patches: Patches) -> None:
    """From now on every Trainer offloads its model when it makes its optimizer, and its checkpoint folders pin
    generations."""
    from transformers import Trainer, trainer

    of = _OfTrainer(run)
    patches.wrap(Trainer, "__init__", of.init)
    patches.wrap(Trainer, "create_optimizer", of.create_optimizer)
    patches.wrap(Trainer, "get_optimizer_cls_and_kwargs", of.get_optimizer)
    patches.wrap(Trainer, "_load_from_checkpoint", of.load_from_checkpoint)
    patches.wrap(Trainer, "_save_checkpoint", of.save_checkpoint)
    patches.wrap(Trainer, "_finalize_training", of.finalize_training)
    patches.wrap(trainer, "rotate_checkpoints", of.rotate_checkpoints)


class _OfTrainer:
    """What Trainer's methods do under infinity. Each is given what it replaces first."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._saving: Saving | None = None
        self._model: nn.Module | None = None

    def init(self, original: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
        original(trainer, *args, **kwargs)
        self._run.trained.add(trainer.model)
        wish_for(trainer.args, self._run)
        self._run.wish(
            accumulation_steps=trainer.args.gradient_accumulation_steps, pins=_pins_of(trainer.args, self._run)
        )
        trainer.args._n_gpu = min(trainer.args._n_gpu, 1)

    def create_optimizer(self, original: Callable[..., Any], trainer: Any, model: nn.Module | None = None) -> Any:
        self._run.ensure_offloaded(trainer.model if model is None else model)
        optimizer: torch.optim.Optimizer = original(trainer, model)
        return optimizer

    def get_optimizer(self, original: Callable[..., Any], args: Any, *others: Any, **options: Any) -> Any:
        return class_and_options(args) or original(args, *others, **options)

    def load_from_checkpoint(
        self, original: Callable[..., None], trainer: Any, folder: str, model: nn.Module | None = None
    ) -> None:
        """Nothing is loaded here: the model is offloaded from the folder's generation, when its optimizer is made."""
        if registry.is_offloaded(trainer.model if model is None else model):
            raise ModelError(
                f"resume_from_checkpoint={folder}: the model was used already in this process, so it is offloaded and "
                "cannot become the one of a checkpoint. Resume in a new process, before anything else."
            )
        self._run.wish(folder=Path(folder).expanduser().absolute())

    def save_checkpoint(self, original: Callable[..., None], trainer: Any, model: nn.Module, *args: Any) -> None:
        if trainer.args.save_only_model or not registry.is_offloaded(trainer.model):
            original(trainer, model, *args)
            return
        run_dir = trainer._get_output_dir(*args[:1], **({} if args else {"trial": None}))
        self._model = trainer.model
        self._saving = Saving(trainer.model, Path(run_dir, f"checkpoint-{trainer.state.global_step}"))
        try:
            original(trainer, model, *args)
            self._saving.finish()
        finally:
            self._saving = self._model = None

    def rotate_checkpoints(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """The last thing that saving does: what is older goes when what is newer is whole."""
        if self._saving is None or self._model is None:
            original(*args, **kwargs)
            return
        self._saving.finish()
        with letting_go(self._model):
            original(*args, **kwargs)

    def finalize_training(self, original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        with letting_go(trainer.model):
            return original(trainer, *args, **kwargs)


def _pins_of(args: Any, run: Run) -> int:
    """How many checkpoint folders with states there are at a time."""
    if str(getattr(args.save_strategy, "value", args.save_strategy)) == "no" or args.save_only_model:
        return run.wishes.pins
    limit = args.save_total_limit
    if not limit or limit <= 0:
        return _UNBOUNDED_PINS
    return max(int(limit), 1 + bool(args.load_best_model_at_end)) + 1  # the new one, before an old one goes
