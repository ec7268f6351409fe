"""Batches of sequences, and the inputs that a model is given for one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from infinity.base import accelerator


@dataclass(frozen=True)
class Batch:
    """Sequences that a model is trained on at once, in host memory until a model takes them.

    Attributes:
        ids: int64 [sequences, tokens].
        labels: as `ids`, NOTHING where a token is not learned; None: all are.
        positions: int64 [sequences, tokens], from 0 for each example; None: from 0 for each sequence.
    """

    NOTHING: ClassVar[int] = -100
    """What torch's cross entropy ignores."""

    ids: torch.Tensor
    labels: torch.Tensor | None = None
    positions: torch.Tensor | None = None

    @property
    def learned(self) -> int:
        """Tokens that have a part in the loss."""
        if self.labels is None:
            return self.ids.shape[0] * (self.ids.shape[1] - 1)
        return int(learned_in(self.labels))

    def inputs_of(self, model: Any) -> dict[str, Any]:
        """What a model of transformers is called with to compute logits, on its device. Without a mask, and without a
        cache, it tells the examples of a sequence apart by their positions."""
        given = {"input_ids": self.ids} | ({} if self.positions is None else {"position_ids": self.positions})
        return {name: accelerator.bring(tensor, model.device) for name, tensor in given.items()}

    def of_trainer(self) -> dict[str, torch.Tensor]:
        """The batch as a Trainer takes it, in host memory: where no positions are said, those of the model. A mask of
        ones would let the host wait for the device, to see that nothing is masked."""
        apart = {} if self.positions is None else {"position_ids": self.positions}
        return {"input_ids": self.ids, "labels": self.ids if self.labels is None else self.labels, **apart}


def learned_in(labels: torch.Tensor) -> torch.Tensor:
    """How many tokens have a part in the loss, on the device of the labels. The first of a sequence follows nothing."""
    return (labels[:, 1:] != Batch.NOTHING).sum()
