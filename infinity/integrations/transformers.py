"""Changes of the Trainers of transformers and TRL, so that they train offloaded models.

`infinity run` replaces methods of every Trainer. A script that uses infinity directly imports `Trainer` from this
module, or puts TrainerMixin before another Trainer in the bases of a class:

    from infinity.integrations.transformers import Trainer, TrainerMixin

    trainer = Trainer(model=model, args=args, train_dataset=rows, swap_config="swap.yaml")

    class OffloadedSFTTrainer(TrainerMixin, trl.SFTTrainer): ...
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import trainer as trainer_module
from transformers.trainer_utils import get_last_checkpoint

from infinity.config import SwapConfig, load_config
from infinity.coordinator import registry
from infinity.coordinator.peer_errors import peer_errors
from infinity.errors import ConfigError, ModelError, NotAvailableError
from infinity.integrations.checkpoint_folders import (
    CheckpointFolderSave,
    is_at,
    pins_for,
    require_pins,
    unpinning_removed_folders,
)
from infinity.integrations.distributed_data_parallel import ranks_of
from infinity.integrations.optimizer_names import class_and_options, facts_for
from infinity.integrations.optimizers import ours_for
from infinity.integrations.patches import Patches, patched
from infinity.integrations.saving import give_saving
from infinity.integrations.script_run import ScriptRun
from infinity.integrations.vertical import TrainingSteps
from infinity.io.generation_pins import require_marker
from infinity.state.training_step import BatchShape, StepFacts


def replace_training(run: ScriptRun, patches: Patches) -> None:
    """Make every Trainer offload its model, and pin generations.

    A Trainer offloads its model when it makes its optimizer. Each of its checkpoint folders pins a generation.
    """
    of, kind = _TrainerPatches(run), transformers.Trainer
    patches.wrap(kind, "__init__", of.init)
    patches.wrap(kind, "create_optimizer", of.create_optimizer)
    patches.wrap(kind, "get_optimizer_cls_and_kwargs", of.get_optimizer)
    patches.wrap(kind, "training_step", of.training_step)
    patches.wrap(kind, "train", of.train)
    patches.wrap(kind, "_load_from_checkpoint", of.load_from_checkpoint)
    patches.wrap(kind, "_save_checkpoint", of.save_checkpoint)
    patches.wrap(kind, "_save", of.save)


class _TrainerPatches:
    """The replacements of Trainer's methods. The first argument of each replacement is the replaced method."""

    def __init__(self, run: ScriptRun) -> None:
        self._run = run
        self._told = run.facts.folder  # the folder of `infinity run --resume`
        self._resumes_from: Path | None = None
        self._steps = TrainingSteps()

    def init(self, original: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
        original(trainer, *args, **kwargs)
        self._run.trained.add(trainer.model)
        self._tell(trainer)
        if trainer.args.push_to_hub and trainer.args.world_size > 1:
            raise NotAvailableError(
                "push_to_hub with several ranks is not available yet: leave it out, and upload the folder of "
                "save_model or of a checkpoint after the run"
            )
        trainer.args._n_gpu = min(trainer.args._n_gpu, 1)

    def _tell(self, trainer: Any) -> None:
        """Record this Trainer's facts about the training. A script may have several Trainers."""
        tell(trainer.args, self._run, trainer.accelerator.mixed_precision)

    def create_optimizer(self, original: Callable[..., Any], trainer: Any, model: nn.Module | None = None) -> Any:
        self._tell(trainer)
        offloaded = trainer.model if model is None else model
        self._require_one_beginning(offloaded)
        self._run.ensure_offloaded(offloaded)
        if saves_states(trainer.args):
            require_pins(offloaded)  # this is checked now, and not after hours of training
        given = () if model is None else (model,)  # in some subclasses create_optimizer has no parameter
        optimizer: torch.optim.Optimizer = original(trainer, *given)
        return optimizer

    def _require_one_beginning(self, model: nn.Module) -> None:
        """Raise ConfigError if the model would be resumed, but the Trainer would start at step 0."""
        folder = self._run.began_from(model)
        if folder is not None and folder != self._resumes_from:
            raise ConfigError(
                f"--resume {folder}: the first trainer.train() resumes from there, but this Trainer makes its "
                "optimizer earlier, for a loop that would start at step 0. Let trainer.train() make the optimizer."
            )

    def get_optimizer(self, original: Callable[..., Any], args: Any, *others: Any, **options: Any) -> Any:
        return class_and_options(args) or original(args, *others, **options)

    def training_step(
        self, original: Callable[..., torch.Tensor], trainer: Any, model: nn.Module, *given: Any, **named: Any
    ) -> torch.Tensor:
        if not self._run.config.vertical or trainer.args.gradient_accumulation_steps == 1:
            return original(trainer, model, *given, **named)
        if type(trainer)._prepare_inputs is not transformers.Trainer._prepare_inputs:
            self._steps.warn_of(trainer)
            return original(trainer, model, *given, **named)
        return self._steps(original, trainer, model, *given, **named)

    def train(self, original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        self._steps.forget(trainer)
        told, self._told = self._told, None
        if told is not None and self._run.began_from(trainer.model) == told:
            named = kwargs.pop("resume_from_checkpoint", args[0] if args else None)
            args = (_agreed(told, named, trainer.args.output_dir), *args[1:])
        return original(trainer, *args, **kwargs)

    def load_from_checkpoint(
        self, original: Callable[..., None], trainer: Any, folder: str, model: nn.Module | None = None
    ) -> None:
        """Load nothing, but record the folder.

        When the optimizer is made, the model is offloaded from the folder's generation.
        """
        given, place = trainer.model if model is None else model, Path(folder).expanduser().absolute()
        self._run.undo_evaluation(given)
        used = registry.is_offloaded(given)
        if used and self._run.began_from(given) == place and is_at(given, require_marker(place)):
            self._resumes_from = place  # the model was already resumed for an evaluation
            return
        if used:
            raise ModelError(
                f"resume_from_checkpoint={folder}: the model was used already in this process, so it is offloaded and "
                "cannot get the states of a checkpoint. Resume in a new process, before any other use of the model."
            )
        self._resumes_from = place
        self._run.add_facts(folder=place)

    def save_checkpoint(self, original: Callable[..., None], trainer: Any, model: nn.Module, trial: Any = None) -> None:
        if trainer.args.save_only_model or not registry.is_offloaded(trainer.model):
            original(trainer, model, trial)
            return
        folder = Path(trainer._get_output_dir(trial=trial), f"checkpoint-{trainer.state.global_step}")
        saving = CheckpointFolderSave(trainer.model, folder)

        def rotate(rotate_checkpoints: Callable[..., None], *args: Any, **kwargs: Any) -> None:
            """Pin the generation before older folders are removed. A save removes older folders at its end."""
            saving.finish()
            with unpinning_removed_folders(trainer.model):
                rotate_checkpoints(*args, **kwargs)

        with saving, patched(trainer_module, "rotate_checkpoints", rotate):
            original(trainer, model, trial)
        saving.finish()

    def save(
        self, original: Callable[..., None], trainer: Any, output_dir: str | None = None, state_dict: Any = None
    ) -> None:
        """Save the model. Ranks that write no files help to gather the weights for rank 0."""
        if registry.is_offloaded(trainer.model):  # the script itself may have offloaded the model
            give_saving(trainer.model)
        if trainer.args.should_save or ranks_of(trainer.model) == 1:
            original(trainer, output_dir, state_dict)
        elif hasattr(trainer.model, "save_pretrained"):
            trainer.model.save_pretrained(output_dir or trainer.args.output_dir, is_main_process=False)
        elif state_dict is None:
            trainer.model.state_dict()

    def finalize_training(self, original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        with unpinning_removed_folders(trainer.model):
            return original(trainer, *args, **kwargs)


def tell(args: Any, run: ScriptRun, precision: str) -> None:
    """Record a Trainer's facts about the training, from its arguments and accelerate's mixed_precision."""
    facts_for(args, run)
    run.computes_in(precision)
    passes = 1 if run.config.vertical else args.gradient_accumulation_steps
    run.add_facts(accumulation_steps=passes, step=_step_of(args, passes), pins=_pins_of(args, run))


def _step_of(args: Any, passes: int) -> StepFacts | None:
    """Return the batch of a step, if the arguments of a Trainer say how long a sequence may be: TRL's SFTConfig."""
    length = getattr(args, "max_length", None) if hasattr(args, "packing") else None
    if not length:
        return None
    micro_batches = args.gradient_accumulation_steps // passes
    return StepFacts(BatchShape(args.per_device_train_batch_size, length, micro_batches, passes))


def _agreed(told: Path, named: str | bool | None, output: str) -> str:
    """Return the folder from which the first train() resumes. This is the folder that `infinity run --resume` names.

    Args:
        told: the folder that `infinity run --resume` names.
        named: the script's value of resume_from_checkpoint.
        output: the Trainer's output directory.

    Raises:
        ConfigError: the script names another folder.
    """
    folder = get_last_checkpoint(output) if named is True else named
    if folder and os.path.realpath(os.path.expanduser(folder)) != os.path.realpath(told):
        raise ConfigError(
            f"--resume {told}: the script resumes from {folder}, because of its resume_from_checkpoint={named!r}. "
            "Leave --resume out, or remove resume_from_checkpoint from the script's arguments."
        )
    return str(told)


def saves_states(args: Any) -> bool:
    """Return whether a Trainer's checkpoint folders contain optimizer states in addition to weights."""
    return str(getattr(args.save_strategy, "value", args.save_strategy)) != "no" and not args.save_only_model


def _pins_of(args: Any, run: ScriptRun) -> int:
    """Return the maximum number of checkpoint folders with optimizer states that exist at the same time."""
    if not saves_states(args):
        return run.facts.pins
    limit = args.save_total_limit
    if not limit or limit <= 0:
        return pins_for(None)
    return pins_for(max(int(limit), 1 + bool(args.load_best_model_at_end)))


class TrainerMixin:
    """A mixin for Trainers that offloads the model when the optimizer is made.

    Among the bases of a class, the mixin comes before a Trainer.

    Args (of the constructor, in addition to those of the Trainer):
        swap_config: swap config, as for infinity.offload. A model that infinity.load_pretrained has loaded needs no
            swap_config.
    """

    def __init__(self, *args: Any, swap_config: str | Path | dict[str, Any] | SwapConfig | None = None, **kwargs: Any):
        self._infinity = _TrainerPatches(ScriptRun(load_config(swap_config)))

        def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

        self._infinity.init(init, self, *args, **kwargs)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        theirs: Any = super()
        return self._infinity.create_optimizer(lambda _, *given: theirs.create_optimizer(*given), self, model)

    def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> tuple[Any, Any]:
        theirs: Any = super()
        kind, options = class_and_options(args) or theirs.get_optimizer_cls_and_kwargs(args, model)
        return ours_for(kind), options

    @peer_errors()
    def train(self, *args: Any, **kwargs: Any) -> Any:
        theirs: Any = super()
        return self._infinity.train(lambda _, *given, **named: theirs.train(*given, **named), self, *args, **kwargs)

    def training_step(self, model: nn.Module, *given: Any, **named: Any) -> torch.Tensor:
        theirs: Any = super()
        return self._infinity.training_step(
            lambda _, *args, **options: theirs.training_step(*args, **options), self, model, *given, **named
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._infinity.load_from_checkpoint(_never, self, resume_from_checkpoint, model)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        theirs: Any = super()
        self._infinity.save_checkpoint(lambda _, *args: theirs._save_checkpoint(*args), self, model, trial)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        theirs: Any = super()
        self._infinity.save(lambda _, *args: theirs._save(*args), self, output_dir, state_dict)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        theirs: Any = super()
        return self._infinity.finalize_training(
            lambda _, *a, **k: theirs._finalize_training(*a, **k), self, *args, **kwargs
        )


class Trainer(TrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """A transformers.Trainer whose model is offloaded: `Trainer(..., swap_config="swap.yaml")`."""


def _never(*args: Any) -> None:
    raise AssertionError("the weights of a checkpoint come from its generation")
