"""The loss on data that the model is not trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from infinity.cli.data import Sequences
from infinity.cli.world import World, told


class Evaluated(NamedTuple):
    """The loss after a step: the mean over the tokens that are learned; nan where it is not finite."""

    step: int
    loss: float


def best_of(evaluations: Sequence[Evaluated]) -> Evaluated | None:
    """The first with the lowest loss; None where none is finite."""
    finite = [each for each in evaluations if math.isfinite(each.loss)]
    return min(finite, key=lambda each: each.loss, default=None)


class Evaluation:
    """Args:
    data: held out.
    every: steps between evaluations; None: after the last step only.
    last: step of the run.
    """

    def __init__(self, data: Sequences, batch_size: int, every: int | None, last: int, world: World) -> None:
        self._data = data
        self._batch_size = batch_size
        self._every = every
        self._last = last
        self._world = world

    def due(self, step: int) -> bool:
        """Whether the model is evaluated after this step."""
        return step == self._last or (self._every is not None and step > 0 and step % self._every == 0)

    def loss_of(self, model: Any) -> float:
        """All ranks call, and share the sequences; the mode of the model stays."""
        total, learned, training = 0.0, 0, model.training
        batches = -(-self._data.sequences // self._batch_size)
        model.eval()
        with torch.no_grad():
            for turn in range(-(-batches // self._world.count)):
                at = turn * self._world.count + self._world.rank
                begin = at % batches * self._batch_size
                batch = self._data.rows(range(begin, min(begin + self._batch_size, self._data.sequences)))
                loss = batch.loss_of(model).double().item()
                if at < batches:  # else a rank computes with the others, whose weights it has a part of
                    total, learned = total + loss * batch.learned, learned + batch.learned
        model.train(training)
        sums = told(model, "the evaluation", [total if math.isfinite(total) else None, learned])
        if any(part is None for part, _ in sums):
            return math.nan
        return float(sum(part for part, _ in sums) / sum(count for _, count in sums))
