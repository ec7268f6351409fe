"""Random choice of recomputation: checkpoints around several blocks, and inside these checkpoints further checkpoints
around single blocks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

Visit = Callable[[torch.Tensor, int, int], torch.Tensor]
"""Function that runs the visits [begin, end) of blocks."""


@dataclass(frozen=True)
class Around:
    """Checkpoints around several blocks.

    Attributes:
        spans: visits [begin, end), and whether a checkpoint is around them.
        segments: number of segments of torch's checkpoint_sequential around all visits; 0: checkpoint_sequential is not
            used.
        within: visits that have their own checkpoint, with the kind of this checkpoint.
    """

    spans: list[tuple[int, int, bool]]
    reentrant: bool
    segments: int = 0
    within: dict[int, bool] = field(default_factory=dict)

    def run(self, visit: Visit, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return visit(x, 0, self.spans[-1][1])
        alone = partial(self._alone, visit)
        if self.segments:
            steps = [partial(alone, begin=begin, end=end) for begin, end, _ in self.spans]
            return checkpoint_sequential(steps, self.segments, x, use_reentrant=self.reentrant)
        for begin, end, recomputed in self.spans:
            x = checkpoint(alone, x, begin, end, use_reentrant=self.reentrant) if recomputed else alone(x, begin, end)
        return x

    @property
    def in_pieces(self) -> bool:
        """Whether a weight that several visits read may get its gradient in several pieces."""
        return (self.reentrant and any(span[2] for span in self.spans)) or any(self.within.values())

    def _alone(self, visit: Visit, x: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Run visits with their own checkpoints.

        The forward of a reentrant checkpoint has no graph, so checkpoints inside it are skipped.
        """
        for at in range(begin, end):
            own = at in self.within and torch.is_grad_enabled()
            x = checkpoint(visit, x, at, at + 1, use_reentrant=self.within[at]) if own else visit(x, at, at + 1)
        return x

    def __str__(self) -> str:
        what = f"checkpoint_sequential({self.segments})" if self.segments else str([s[:2] for s in self.spans if s[2]])
        return f"recomputed {what} reentrant={self.reentrant}, within {self.within}"


def draw_around(rng: random.Random, visits: int) -> Around | None:
    """Return checkpoints that mostly contain more than one block; None if other kinds are used."""
    if rng.random() < 0.6:
        return None
    reentrant = rng.random() < 0.5
    singles = [(at, at + 1, True) for at in range(visits)]
    cut = rng.randint(0, visits - 1)
    spans = {
        "body": [(0, visits, True)],
        "halves": [(0, cut, True), (cut, visits, True)] if cut else [(0, visits, True)],
        "rest": [(0, cut, False), (cut, visits, True)] if cut else [(0, visits, True)],
        "every second": [(begin, end, begin % 2 == 0) for begin, end, _ in singles],
        "sequential": singles,
    }
    way = rng.choice(["body", "body", *spans])
    within = {at: rng.random() < 0.5 for at in range(visits) if rng.random() < 0.5} if rng.random() < 0.4 else {}
    segments = rng.randint(1, visits) if way == "sequential" else 0
    return Around(spans[way], reentrant, segments, within)
