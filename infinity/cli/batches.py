"""Batches of sequences, and the inputs of a model for a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from infinity.base import accelerator


@dataclass(frozen=True)
class TokenBatch:
    """The sequences of one forward and backward pass, in host memory.

    Attributes:
        ids: tokens, int64 [sequences, tokens].
        labels: `ids`, with NOTHING in place of each token that does not contribute to the loss. None means that all
            tokens contribute.
        positions: positions of the tokens, int64 [sequences, tokens], counted from 0 in each example. None means that
            they are counted from 0 in each sequence.
    """

    NOTHING: ClassVar[int] = -100
    """Label that torch's cross entropy ignores."""

    ids: torch.Tensor
    labels: torch.Tensor | None = None
    positions: torch.Tensor | None = None

    @property
    def learned(self) -> int:
        """Number of tokens that contribute to the loss."""
        if self.labels is None:
            return self.ids.shape[0] * (self.ids.shape[1] - 1)
        return int(learned_in(self.labels))

    def inputs_of(self, model: Any) -> dict[str, Any]:
        """Return the arguments for a call of a transformers model that computes logits, on the model's device.

        The arguments have no attention mask. If there is neither a mask nor a cache, the model separates the examples
        of a sequence by their positions.
        """
        given = {"input_ids": self.ids} | ({} if self.positions is None else {"position_ids": self.positions})
        return {name: accelerator.bring(tensor, model.device) for name, tensor in given.items()}

    def of_trainer(self) -> dict[str, torch.Tensor]:
        """Return the batch as the arguments that a Trainer expects, in host memory.

        The result has no attention mask, because transformers would make the host wait for the device in order to check
        a mask of ones. If the batch has no positions, the model computes the positions.
        """
        apart = {} if self.positions is None else {"position_ids": self.positions}
        return {"input_ids": self.ids, "labels": self.ids if self.labels is None else self.labels, **apart}


def learned_in(labels: torch.Tensor) -> torch.Tensor:
    """Return the number of tokens that contribute to the loss, as a tensor on the device of the labels.

    The first token of a sequence does not contribute, because no token before it predicts it.
    """
    return (labels[:, 1:] != TokenBatch.NOTHING).sum()
