"""Batches of sequences, in an order that a seed determines; and what a model computes of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from infinity.base import accelerator
from infinity.cli.world import ALONE, World
from infinity.errors import ConfigError

if TYPE_CHECKING:
    from infinity.cli.data import Sequences


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
        return int((self.labels[:, 1:] != self.NOTHING).sum())

    def inputs_of(self, model: Any) -> dict[str, Any]:
        """What a model of transformers is called with to compute logits, on its device. Without a mask, and without a
        cache, it tells the examples of a sequence apart by their positions."""
        given = {"input_ids": self.ids} | ({} if self.positions is None else {"position_ids": self.positions})
        return {name: accelerator.bring(tensor, model.device) for name, tensor in given.items()}

    def loss_of(self, model: Any) -> torch.Tensor:
        """The mean over the tokens that are learned, on the model's device."""
        given = self.inputs_of(model)
        given["labels"] = given["input_ids"] if self.labels is None else accelerator.bring(self.labels, model.device)
        loss: torch.Tensor = model(**given).loss
        return loss


class Batches:
    """An endless iterator over batches, with a state_dict to continue from. The sequences are shuffled anew for each
    pass over the data.

    The sequences of pass 0, 1, … follow each other, each pass in an order of its own that (seed, pass) determines.
    Batch k is the k-th group of `batch_size` sequences. Of N ranks each has every Nth batch, so that they have together
    what one process would have.
    """

    def __init__(self, data: Sequences, batch_size: int, seed: int, world: World = ALONE) -> None:
        self._data = data
        self._world = world
        self._batch_size = batch_size
        self._seed = seed
        self._given = 0
        self._pass = -1
        self._order = np.empty(0, dtype=np.int64)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Batch:
        first = (self._given + self._world.rank) * self._batch_size
        chosen = [self._sequence(first + position) for position in range(self._batch_size)]
        self._given += self._world.count
        return self._data.rows(chosen)

    def _sequence(self, position: int) -> int:
        number, within = divmod(position, self._data.sequences)
        if number != self._pass:
            self._pass = number
            self._order = np.random.default_rng((self._seed, number)).permutation(self._data.sequences)
        return int(self._order[within])

    def _identity(self) -> dict[str, Any]:
        return {"batch_size": self._batch_size, "seed": self._seed, "tokens": self._data.digest}

    def state_dict(self) -> dict[str, Any]:
        return {"given": self._given, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batches of `state`. Raises ConfigError for the state of other data or batches."""
        if {key: state.get(key) for key in self._identity()} != self._identity():
            raise ConfigError("the text, the tokenizer or the batches are not those of the run: give the same --data")
        self._given = int(state["given"])
