"""The trainers of `infinity finetune`, by --method.

The bases of each class are FinetuneTrainerMixin and then a trainer of TRL.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from trl import DPOTrainer, RewardTrainer, SFTTrainer
from trl.trainer import dpo_trainer, reward_trainer

from infinity.cli.batches import TokenBatch, learned_in
from infinity.cli.data import SequenceDataset
from infinity.cli.trainer import FinetuneTrainerMixin
from infinity.errors import ModelError


class FinetuneSFTTrainer(FinetuneTrainerMixin, SFTTrainer):  # type: ignore[misc]
    """SFTTrainer with the model's own loss.

    Every token that contributes to the loss has the same weight, in training and in evaluations.
    """

    loss_is_scaled_for_ga = True  # compute_loss divides by the number of tokens of the whole step

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        # for other models, transformers before 5.20 would divide the loss once more
        self.model_accepts_loss_kwargs = True

    def _weight_of(self, held_out: SequenceDataset, at_once: int) -> int:
        """Return the number of tokens that contribute to the loss."""
        ends = range(at_once, held_out.sequences + at_once, at_once)
        return sum(held_out.rows(range(end - at_once, min(end, held_out.sequences))).learned for end in ends)

    def _collated(self, data: SequenceDataset, indices: list[int]) -> dict[str, torch.Tensor]:
        """Return the batch of the sequences with these indices.

        Filler rows, which fill the last batches of the ranks, do not contribute to the loss.
        """
        batch: dict[str, torch.Tensor] = data.rows(index % data.sequences for index in indices).of_trainer()
        filling = torch.tensor(indices) >= data.sequences
        return batch | {"labels": batch["labels"].masked_fill(filling[:, None], TokenBatch.NOTHING)}

    def _items_in(self, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """Return the number of tokens of all ranks that contribute to the loss of a step."""
        learned = torch.stack([learned_in(batch["labels"]) for batch in batches]).sum()
        reduced: torch.Tensor = self.accelerator.reduce(learned)
        return reduced

    def compute_loss(
        self, model: Any, inputs: dict[str, torch.Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Return a batch's share of a step's loss.

        Each token that contributes to the loss has the same weight, in all batches and on all ranks.

        The model computes the loss of a batch itself. Therefore the loss includes everything that the model defines,
        such as capped logits and the balance of experts. The host does not wait for the device.
        """
        share = learned_in(inputs["labels"]) * self.accelerator.num_processes / num_items_in_batch
        loss: torch.Tensor = model(**inputs).loss * share  # the gradients of the ranks are averaged
        return loss

    def _weighed_loss(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return learned_in(inputs["labels"]), model(**inputs).loss


class _PairTrainerMixin(FinetuneTrainerMixin):
    """Base class of trainers that learn to prefer the first of two answers.

    Attributes:
        collator: collator of TRL's trainer.
    """

    collator: Any

    def _weight_of(self, held_out: SequenceDataset, at_once: int) -> int:
        """Return the number of pairs."""
        return held_out.sequences

    def _collated(self, data: SequenceDataset, indices: list[int]) -> dict[str, torch.Tensor]:
        """Return the batch of the pairs with these indices, without filler pairs.

        A batch of held-out pairs also has `pairs`. For each place in the batch, `pairs` says whether there is a pair or
        a filler.
        """
        if self.tokenizer.pad_token_id is None:
            raise ModelError("the tokenizer has neither a padding token nor an end-of-text token: give it a pad_token")
        there = [index for index in indices if index < data.sequences] or [0]
        batch: dict[str, torch.Tensor] = self.collator(pad_token_id=self.tokenizer.pad_token_id)(data.rows(there).rows)
        return {"pairs": torch.tensor(indices) < data.sequences, **batch} if data is self.held_out else batch

    def _weighed_loss(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return inputs.pop("pairs").sum(), self.compute_loss(model, inputs)

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        """Return the dataset unchanged, because infinity has already made the tokens."""
        return dataset


class FinetuneDPOTrainer(_PairTrainerMixin, DPOTrainer):  # type: ignore[misc]
    """DPOTrainer for pairs of answers.

    Args:
        reference: offloaded reference model. None means that the reference is the trained model without its adapters.
    """

    collator = dpo_trainer.DataCollatorForPreference

    def __init__(self, model: Any, args: Any, *, reference: Any, **others: Any) -> None:
        # If TRL gets no reference model, it adds a copy of the adapters to the model, which is already offloaded.
        super().__init__(
            model, args, ref_model=_ReferencePlaceholder(model) if reference is None else reference, **others
        )
        if reference is None:
            self.ref_model = None


class _ReferencePlaceholder(nn.Module):
    """Placeholder for the module of a reference model, because TRL requires a module."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.config = model.config


class FinetuneRewardTrainer(_PairTrainerMixin, RewardTrainer):  # type: ignore[misc]
    """RewardTrainer for pairs of answers."""

    collator = reward_trainer.DataCollatorForPreference


TRAINERS = {"sft": FinetuneSFTTrainer, "dpo": FinetuneDPOTrainer, "reward": FinetuneRewardTrainer}
