"""A trainer of TRL for a model that is offloaded already, with the batches of a run in their order."""

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
from transformers.trainer import TRAINER_STATE_NAME

from infinity.cli.data import Sequences
from infinity.cli.order import DataIdentity, Order
from infinity.cli.run_directory import folder_of
from infinity.cli.world import told
from infinity.config import SwapConfig
from infinity.durable import rng
from infinity.echo import raised
from infinity.errors import InfinityError, ModelError, PeerError, SwapIOError
from infinity.integrations.patches import require_there
from infinity.integrations.points import FINETUNE, POINTS
from infinity.integrations.transformers import TrainerMixin
from infinity.ranks.exchange import is_peer_error, peer_errors

_TRACKED = (
    *("epoch", "global_step", "train_batch_size", "num_input_tokens_seen", "total_flos"),
    *("best_metric", "best_global_step"),
)
"""What a run goes on with of a Trainer's state: the rest is of its arguments, or of this process."""
_TRAINED, _HELD_OUT = "trained", "held_out"
"""The columns of the two datasets: each row has the index of a sequence."""
_TheirTrainer: Any = object
"""The trainer of TRL that comes behind these classes."""


class _Recording(_TheirTrainer):  # type: ignore[misc]
    """Keeps the part that each batch of a step has in the loss. It is beneath TrainerMixin, which may keep the batches
    of a step, and run one of them twice: the last time counts."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self._losses: dict[int, torch.Tensor] = {}  # by the identities of batches, all of which a step keeps alive
        super().__init__(*given, **named)

    def training_step(self, model: Any, inputs: dict[str, torch.Tensor], *given: Any, **named: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(model, inputs, *given, **named)
        self._losses[id(inputs)] = loss
        return loss

    def take_losses(self) -> list[torch.Tensor]:
        """The parts that the batches since the last call have in the loss."""
        losses, self._losses = self._losses, {}
        return list(losses.values())


class Running(TrainerMixin, _Recording):
    """Before a trainer of TRL among the bases of a class: its batches come in the order of the run; it goes on from
    what a generation has tracked, with a model that has its weights and states already; and its models are saved as
    infinity saves them.

    Args:
        order: of the sequences that are trained on.
        identity: of the data; it is told of each step before it begins.
        held_out: None: nothing is evaluated.
        save: writes the model to a directory; all ranks call.
        figures: what trackers are told beside the loss, of the steps since the last time.
        scaler: of the loss, enabled or not.
        others: of TRL's trainer.

    Attributes:
        tokenizer: is saved with models.
        failed: why models could not be saved, by their steps.
    """

    state: Any

    def __init__(
        self,
        model: Any,
        args: Any,
        *,
        trained: Sequences,
        held_out: Sequences | None,
        order: Order,
        identity: DataIdentity,
        save: Callable[[Any, str], None],
        figures: Callable[[], dict[str, float]],
        scaler: torch.amp.GradScaler,
        swap_config: SwapConfig,
        **others: Any,
    ) -> None:
        self._order = order
        self._identity = identity
        self._save_model = save
        self._figures = figures
        self.failed: dict[int, str] = {}
        args._n_gpu = min(args.n_gpu, 1)  # others are for other ranks
        require_points()
        self.held_out, evaluated = held_out, 0
        if held_out is not None:
            turns = -(-held_out.sequences // (args.eval_batch_size * args.world_size))
            evaluated = turns * args.world_size * args.eval_batch_size  # as many as fill the batches of all ranks
            self._weight_each = self._weight_of(held_out, args.eval_batch_size) / (turns * args.world_size)
        self.tokenizer = others["processing_class"]
        drawn = rng.snapshot()
        super().__init__(
            model=model,
            args=args,
            data_collator=_Collator(trained, held_out, self._collated),
            train_dataset=_dataset(_TRAINED, trained.sequences),
            eval_dataset=_dataset(_HELD_OUT, evaluated) if evaluated else None,
            swap_config=swap_config,
            **others,
        )
        rng.restore(drawn)  # a Trainer seeds all ranks alike, and each has random numbers of its own
        self.remove_callback(PrinterCallback)
        self.processing_class = None  # else train() writes the special tokens of a tokenizer into the model's configs
        if scaler.is_enabled():
            self.accelerator.scaler = scaler

    # -- data ---------------------------------------------------------------------------------------------------------

    def _weight_of(self, held_out: Sequences, at_once: int) -> int:
        """For how much all held-out sequences count. Args: at_once: sequences that are read."""
        raise NotImplementedError

    def _collated(self, data: Sequences, indices: list[int]) -> dict[str, torch.Tensor]:
        """The batch of some sequences."""
        raise NotImplementedError

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Draws no random numbers that the training has."""
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
        """Return the batches of a step, and the number of items that all ranks learn in the step."""
        next(self._identity)
        batches = list(islice(epoch_iterator, num_batches))
        return batches, self._items_in(batches)

    def _items_in(self, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor | None:
        """Return the number of items that all ranks learn in a step; None if its loss is the mean over the batches."""
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
        """The optimizer's update finds the norm. transformers would read all gradients for it."""

    def log(self, logs: dict[str, Any], *given: Any, **named: Any) -> None:
        """Give the trackers the figures. A Trainer would keep all of them; this one keeps none."""
        figures = self._figures() if "loss" in logs else {}
        # A Trainer's own sums stay nan after a step that was skipped for its loss.
        finite = {name: value for name, value in logs.items() if name != "train_loss" or math.isfinite(value)}
        super().log(finite | figures, *given, **named)
        self.state.log_history.clear()

    def end_trackers(self) -> None:
        """Of a run that has nothing left to train."""
        self.callback_handler.on_train_end(self.args, self.state, self.control)

    def evaluate(self, *given: Any, **named: Any) -> dict[str, float]:
        """Draws no random numbers that the training has: a loader does, and trackers may."""
        drawn = rng.snapshot()
        try:
            metrics: dict[str, float] = super().evaluate(*given, **named)
            return metrics
        finally:
            rng.restore(drawn)

    def prediction_step(self, model: Any, inputs: dict[str, Any], *given: Any, **named: Any) -> Any:
        """The loss counts for as much as there is in the batch: the Trainer takes the mean over the batches. One that
        has rows that fill up only has no part in it. In fp64, so that the number of batches, which differs with that of
        ranks, has no part in the sum."""
        with torch.no_grad():
            weight, loss = self._weighed_loss(model, self._prepare_inputs(inputs))
        return torch.where(weight > 0, loss.double() * weight / self._weight_each, 0.0), None, None

    def _weighed_loss(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """For how much a batch counts in an evaluation, and its loss."""
        raise NotImplementedError

    # -- going on -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a run goes on with, beside the states of its model: a generation keeps it."""
        return {"state": json.dumps({name: getattr(self.state, name) for name in _TRACKED})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = replace(self.state, max_steps=self.args.max_steps, **json.loads(state["state"]))
        self.state.compute_steps(self.args, self.args.max_steps)  # how often it logs and saves may have changed

    @peer_errors()
    def go_on(self, directory: Path, *, evaluate: bool, save: bool) -> None:
        """Write the folder for `train(resume_from_checkpoint=directory)`: the random numbers as they are now, and the
        state. Args: evaluate, save: an interruption has prevented it, so that it is done now."""
        self._save_rng_state(str(directory))
        self.control.should_evaluate, self.control.should_save = evaluate, save
        self._maybe_log_save_evaluate(torch.zeros(()), None, self.model, None, 0, None, 0.0)
        self.state.save_to_json(str(directory / TRAINER_STATE_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """The model was offloaded from its generation."""

    # -- saving -------------------------------------------------------------------------------------------------------

    def folder_of(self, step: int) -> Path:
        return folder_of(Path(self.args.output_dir), step)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Raises InfinityError on all ranks where it cannot be saved: they meet after it."""
        directory, problem = output_dir or self.args.output_dir, None
        try:
            self._save_model(self.model, directory)
            if self.args.should_save:
                self.tokenizer.save_pretrained(directory)
        except (PeerError, SwapIOError):
            raise
        except (InfinityError, OSError) as error:
            problem = raised(error)
        if said := [each for each in told(self.model, "whether the model is saved", problem) if each is not None]:
            raise InfinityError(said[0])

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """A model that cannot be saved does not end the run."""
        try:
            super()._save_checkpoint(model, trial)
        except (PeerError, SwapIOError):
            raise
        except (InfinityError, OSError) as error:
            step = self.state.global_step
            self.failed[step] = f"step {step}: the model is not saved in {self.folder_of(step)}: {raised(error)}"

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """None is written: TRL's names other trackers' pages and no data, and would come before the model."""


def require_points() -> None:
    """Check that the libraries have all private methods that a trainer uses.

    Raises:
        NotAvailableError: a method is missing; names it.
    """
    for point in (each for each in POINTS if each.who == FINETUNE):
        for place in point.where:
            module, kind, name = place.rsplit(".", 2)
            require_there(getattr(importlib.import_module(module), kind), name, place, point)


class _Collator:
    """Batches of rows that name sequences. Args: collated: makes one of them."""

    def __init__(
        self,
        trained: Sequences,
        held_out: Sequences | None,
        collated: Callable[[Sequences, list[int]], dict[str, torch.Tensor]],
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
    """What a model's forward raised, and what can be done about it, where its kind tells: an index or a size that does
    not fit is of a sequence that is too long."""
    asked = f"sequences of {shape[1]} tokens, {shape[0]} at a time"
    if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
        return ModelError(
            f"there is no memory for {asked} ({raised(error)}): give a smaller --sequence-length or --batch-size, or "
            "a smaller memory.device, which leaves more for activations"
        )
    if isinstance(error, IndexError) or any(word in str(error) for word in ("size", "shape")):
        return ModelError(
            f"the model cannot take {asked} ({raised(error)}): give a smaller --sequence-length or --batch-size"
        )
    return ModelError(f"the model's forward failed with {asked}: {raised(error)}")
