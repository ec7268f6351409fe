"""The changes of a TRL trainer that all methods of `infinity finetune` share."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import PrinterCallback

from infinity.cli.data import SequenceDataset
from infinity.cli.order import DataFingerprint, SequenceSampler
from infinity.cli.run_directory import TRAINER_STATE_NAME, folder_of
from infinity.cli.run_ranks import gather_values
from infinity.config import SwapConfig
from infinity.coordinator.peer_errors import peer_errors
from infinity.durable import rng
from infinity.errors import InfinityError, ModelError, PeerError, SwapIOError
from infinity.integrations.patch_table import FINETUNE, POINTS
from infinity.integrations.patches import require_there
from infinity.integrations.transformers import TrainerMixin
from infinity.quoting import raised
from infinity.ranks.collective_queue import is_peer_error

_TRACKED = (
    *("epoch", "global_step", "train_batch_size", "num_input_tokens_seen", "total_flos"),
    *("best_metric", "best_global_step"),
)
"""Fields of a TrainerState that a resumed run continues with.

The other fields follow from the arguments, or belong to one process.
"""
_TRAINED, _HELD_OUT = "trained", "held_out"
"""Columns of the two datasets that the trainer gets. Each row contains only the index of a sequence."""
_TheirTrainer: Any = object
"""Placeholder for TRL's trainer, for type checking.

TRL's trainer comes after these classes in the method resolution order.
"""


class _BatchShareRecorder(_TheirTrainer):  # type: ignore[misc]
    """Recorder of the share that each batch has in a step's loss.

    TrainerMixin comes before this class in the bases, because TrainerMixin may collect the batches of a step and
    compute a batch twice. If a batch is computed twice, the loss of the second computation is recorded.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        # the keys are ids of batches, which are unique because all batches of a step are alive
        self._losses: dict[int, torch.Tensor] = {}
        super().__init__(*given, **named)

    def training_step(self, model: Any, inputs: dict[str, torch.Tensor], *given: Any, **named: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(model, inputs, *given, **named)
        self._losses[id(inputs)] = loss
        return loss

    def take_losses(self) -> list[torch.Tensor]:
        """Return the loss shares of the batches since the last call."""
        losses, self._losses = self._losses, {}
        return list(losses.values())


class FinetuneTrainerMixin(TrainerMixin, _BatchShareRecorder):
    """The base of a trainer, listed before a trainer of TRL among the bases of a class.

    The batches come in the order of the run. A resumed run continues from the trainer's state in a generation, and its
    model already has its weights and optimizer states. Functions of infinity save the models.

    Args:
        trained: sequences to train on.
        held_out: sequences for evaluation; None: there is no evaluation.
        order: order of the sequences to train on.
        fingerprint: fingerprint of the data. The trainer advances it before each step.
        save: function that writes the model to a directory; all ranks call it.
        figures: function that returns figures of the steps since its last call. Trackers show these figures in addition
            to the loss.
        scaler: scaler of the loss, enabled or not.
        swap_config: swap config of the run.
        others: arguments for TRL's trainer.

    Attributes:
        held_out: sequences for evaluation; None: there is no evaluation.
        tokenizer: tokenizer that is saved with models.
        failed: reasons why models could not be saved, by step.
    """

    state: Any

    def __init__(
        self,
        model: Any,
        args: Any,
        *,
        trained: SequenceDataset,
        held_out: SequenceDataset | None,
        order: SequenceSampler,
        fingerprint: DataFingerprint,
        save: Callable[[Any, str], None],
        figures: Callable[[], dict[str, float]],
        scaler: torch.amp.GradScaler,
        swap_config: SwapConfig,
        **others: Any,
    ) -> None:
        self._order = order
        self._fingerprint = fingerprint
        self._save_model = save
        self._figures = figures
        self.failed: dict[int, str] = {}
        args._n_gpu = min(args.n_gpu, 1)  # the other GPUs belong to other ranks
        require_points()
        self.held_out, evaluated = held_out, 0
        if held_out is not None:
            turns = -(-held_out.sequences // (args.eval_batch_size * args.world_size))
            evaluated = turns * args.world_size * args.eval_batch_size  # this many rows fill the batches of all ranks
            self._weight_each = self._weight_of(held_out, args.eval_batch_size) / (turns * args.world_size)
        self.tokenizer = others["processing_class"]
        drawn = rng.snapshot()
        super().__init__(
            model=model,
            args=args,
            data_collator=_IndexCollator(trained, held_out, self._collated),
            train_dataset=_dataset(_TRAINED, trained.sequences),
            eval_dataset=_dataset(_HELD_OUT, evaluated) if evaluated else None,
            swap_config=swap_config,
            **others,
        )
        rng.restore(drawn)  # a Trainer gives all ranks one seed, but each rank needs its own numbers
        self.remove_callback(PrinterCallback)
        # otherwise train() would write the tokenizer's special tokens into the model's configs
        self.processing_class = None
        if scaler.is_enabled():
            self.accelerator.scaler = scaler

    # -- data ---------------------------------------------------------------------------------------------------------

    def _weight_of(self, held_out: SequenceDataset, at_once: int) -> int:
        """Return the sum of the weights of all held-out sequences in an evaluation.

        Args:
            held_out: the sequences.
            at_once: number of sequences to read at a time.
        """
        raise NotImplementedError

    def _collated(self, data: SequenceDataset, indices: list[int]) -> dict[str, torch.Tensor]:
        """Return the batch of the sequences with these indices."""
        raise NotImplementedError

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the loader of the run's batches. The loader draws no numbers from the training's random generators."""
        loader = DataLoader(
            self.train_dataset,
            batch_size=self._train_batch_size,
            sampler=self._order,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            generator=torch.Generator(),
        )
        prepared: DataLoader[Any] = self.accelerator.prepare(loader)
        return prepared

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, *given: Any) -> tuple[list[Any], Any]:
        """Return the batches of a step, and the number of items (tokens or pairs) that all ranks learn in the step."""
        next(self._fingerprint)
        batches = list(islice(epoch_iterator, num_batches))
        return batches, self._items_in(batches)

    def _items_in(self, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor | None:
        """Return the number of items (tokens or pairs) that all ranks learn in a step.

        The result is None if the loss of a step is the mean over the batches.
        """
        return None

    @peer_errors()
    def train(self, *given: Any, **named: Any) -> Any:
        return super().train(*given, **named)

    # -- steps --------------------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: dict[str, torch.Tensor], *given: Any, **named: Any) -> torch.Tensor:
        shape = inputs["input_ids"].shape
        try:
            loss: torch.Tensor = super().training_step(model, inputs, *given, **named)
        except InfinityError:
            raise
        except (IndexError, RuntimeError) as error:
            if is_peer_error(error):
                raise
            raise _refusal(shape, error) from error
        return loss

    def _get_grad_norm(self, *given: Any, **named: Any) -> None:
        """Return None, because the optimizer's update computes the norm.

        The original method would read all gradients.
        """

    def log(self, logs: dict[str, Any], *given: Any, **named: Any) -> None:
        """Send the figures to the trackers, and do not keep them.

        A Trainer would keep the figures of all steps in memory.
        """
        figures = self._figures() if "loss" in logs else {}
        # A Trainer adds up the losses. After a loss that is not finite, the sum would be nan until the end.
        finite = {name: value for name, value in logs.items() if name != "train_loss" or math.isfinite(value)}
        super().log(finite | figures, *given, **named)
        self.state.log_history.clear()

    def end_trackers(self) -> None:
        """End the trackers of a run that has no steps left."""
        self.callback_handler.on_train_end(self.args, self.state, self.control)

    def evaluate(self, *given: Any, **named: Any) -> dict[str, float]:
        """Evaluate the model, and restore the training's RNG state afterwards.

        The loader draws random numbers, and trackers may draw some.
        """
        drawn = rng.snapshot()
        try:
            metrics: dict[str, float] = super().evaluate(*given, **named)
            return metrics
        finally:
            rng.restore(drawn)

    def prediction_step(self, model: Any, inputs: dict[str, Any], *given: Any, **named: Any) -> Any:
        """Return the loss of a batch.

        It is scaled so that a Trainer's mean over batches weights each batch by its number of items.

        The loss of a batch with only filler rows is 0.

        The result is in fp64, so that the mean does not depend on how the rows are divided among ranks.
        """
        with torch.no_grad():
            weight, loss = self._weighed_loss(model, self._prepare_inputs(inputs))
        return torch.where(weight > 0, loss.double() * weight / self._weight_each, 0.0), None, None

    def _weighed_loss(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weight of a batch in an evaluation, and the loss of the batch."""
        raise NotImplementedError

    # -- going on -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the trainer for a generation."""
        return {"state": json.dumps({name: getattr(self.state, name) for name in _TRACKED})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = replace(self.state, max_steps=self.args.max_steps, **json.loads(state["state"]))
        # the user may have changed the intervals of logging and saving
        self.state.compute_steps(self.args, self.args.max_steps)

    @peer_errors()
    def go_on(self, directory: Path, *, evaluate: bool, save: bool) -> None:
        """Write the RNG state and the trainer's state to the folder for `train(resume_from_checkpoint=directory)`.

        Args:
            directory: the folder.
            evaluate: whether to evaluate first, because the run was interrupted before the evaluation after its last
                step.
            save: whether to save the model first, because the run was interrupted before it could save the model of its
                last step.
        """
        self._save_rng_state(str(directory))
        self.control.should_evaluate, self.control.should_save = evaluate, save
        self._maybe_log_save_evaluate(torch.zeros(()), None, self.model, None, 0, None, 0.0)
        self.state.save_to_json(str(directory / TRAINER_STATE_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Do nothing, because the model was already loaded from its generation when it was offloaded."""

    # -- saving -------------------------------------------------------------------------------------------------------

    def folder_of(self, step: int) -> Path:
        return folder_of(Path(self.args.output_dir), step)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model and the tokenizer. The ranks agree on the result.

        Raises:
            InfinityError: the model could not be saved. All ranks raise this error.
        """
        directory, problem = output_dir or self.args.output_dir, None
        try:
            self._save_model(self.model, directory)
            if self.args.should_save:
                self.tokenizer.save_pretrained(directory)
        except (PeerError, SwapIOError):
            raise
        except (InfinityError, OSError) as error:
            problem = raised(error)
        if said := [
            each for each in gather_values(self.model, "whether the model is saved", problem) if each is not None
        ]:
            raise InfinityError(said[0])

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save the model of a step. If saving fails, add the reason to `failed`, and continue the run."""
        try:
            super()._save_checkpoint(model, trial)
        except (PeerError, SwapIOError):
            raise
        except (InfinityError, OSError) as error:
            step = self.state.global_step
            self.failed[step] = f"step {step}: the model is not saved in {self.folder_of(step)}: {raised(error)}"

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Do nothing. TRL's model card names pages of trackers but no data, and would be written before the model."""


def require_points() -> None:
    """Check that TRL and transformers have all private methods that the trainers use.

    Raises:
        NotAvailableError: a method is missing. The error names the method.
    """
    for point in (each for each in POINTS if each.who == FINETUNE):
        for place in point.where:
            module, kind, name = place.rsplit(".", 2)
            require_there(getattr(importlib.import_module(module), kind), name, place, point)


class _IndexCollator:
    """Collator for rows that contain indices of sequences.

    Args:
        trained: sequences to train on.
        held_out: sequences for evaluation.
        collated: function that makes a batch of sequences.
    """

    def __init__(
        self,
        trained: SequenceDataset,
        held_out: SequenceDataset | None,
        collated: Callable[[SequenceDataset, list[int]], dict[str, torch.Tensor]],
    ) -> None:
        self._of = {_TRAINED: trained, _HELD_OUT: held_out}
        self._collated = collated

    def __call__(self, rows: list[dict[str, int]]) -> dict[str, torch.Tensor]:
        (column,) = rows[0]
        data = self._of[column]
        assert data is not None
        return self._collated(data, [row[column] for row in rows])


def _dataset(column: str, sequences: int) -> Dataset:
    return Dataset.from_dict({column: range(sequences)})


def _refusal(shape: torch.Size, error: Exception) -> ModelError:
    """Return the error for an exception in a model's forward.

    If the type of the exception shows the cause, the error says what the user can do. For example, an index out of
    range shows that a sequence is too long for the model.
    """
    asked = f"sequences of {shape[1]} tokens, {shape[0]} at a time"
    if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
        return ModelError(
            f"there is too little memory for {asked} ({raised(error)}): give a smaller --sequence-length or "
            "--batch-size, or a smaller memory.device, which leaves more for activations"
        )
    if isinstance(error, IndexError) or any(word in str(error) for word in ("size", "shape")):
        return ModelError(
            f"the model cannot compute {asked} ({raised(error)}): give a smaller --sequence-length or --batch-size"
        )
    return ModelError(f"the model's forward failed with {asked}: {raised(error)}")
