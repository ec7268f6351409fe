"""The order of the sequences of a run, which a seed determines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from infinity.errors import ConfigError


class Order(Sampler[int]):
    """The index of every sequence of a run. Pass 0, 1, … over the data follow each other, each in an order of its own
    that (seed, pass) determines. A batch may have the end of one pass and the beginning of the next, so that every step
    has as many sequences.

    Args:
        sequences: of one pass.
        numel: sequences of the whole run.
    """

    def __init__(self, sequences: int, numel: int, seed: int) -> None:
        self._sequences = sequences
        self._numel = numel
        self._seed = seed

    def __len__(self) -> int:
        return self._numel

    def __iter__(self) -> Iterator[int]:
        for first in range(0, self._numel, self._sequences):
            number = first // self._sequences
            order = np.random.default_rng((self._seed, number)).permutation(self._sequences)
            yield from map(int, order[: self._numel - first])


class DataIdentity:
    """The data and the batches of a run, as generations keep them: a run goes on with the same ones only. It is asked
    for the next step's batches first, so that what a generation keeps is of the moment before the step."""

    def __init__(self, digest: str, batch_size: int, seed: int) -> None:
        self._values = {"batch_size": batch_size, "seed": seed, "tokens": digest}

    def __iter__(self) -> DataIdentity:
        return self

    def __next__(self) -> None:
        """A step begins."""

    def state_dict(self) -> dict[str, Any]:
        return self._values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ConfigError for the state of other data or batches."""
        if state != self._values:
            raise ConfigError("the text, the tokenizer or the batches are not those of the run: give the same --data")
