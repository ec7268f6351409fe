"""The order of the sequences of a run, which a seed determines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from infinity.errors import ConfigError


class SequenceSampler(Sampler[int]):
    """Sampler of the sequences of a run. It yields the indices of the sequences for all passes over the data.

    The passes are numbered from 0. The seed and the number of a pass determine the order of the pass. Every step has
    the same number of sequences, so a batch may contain the end of one pass and the beginning of the next pass.

    Args:
        sequences: number of sequences of one pass.
        numel: number of sequences in the whole run.
        seed: seed of the run.
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


class DataFingerprint:
    """Fingerprint of the data and the batches of a run.

    Each generation contains the fingerprint, so that a run can only be resumed with the same data and batches. This
    object is an iterator, because generations contain the state that an iterator has before a step. The run advances
    this iterator before the batches of each step.
    """

    def __init__(self, digest: str, batch_size: int, seed: int) -> None:
        self._values = {"batch_size": batch_size, "seed": seed, "tokens": digest}

    def __iter__(self) -> DataFingerprint:
        return self

    def __next__(self) -> None:
        """Begin a step."""

    def state_dict(self) -> dict[str, Any]:
        return self._values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that the state belongs to the same data and batches.

        Raises:
            ConfigError: the state belongs to other data or other batches.
        """
        if state != self._values:
            raise ConfigError(
                "the text, the tokenizer or the batches differ from those of the run: give the same --data"
            )
