"""Parameters of a random loop that are frozen and trained in turn.

The loop sets requires_grad between steps, or adds a param group later, as gradual unfreezing does.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Freezing:
    """Schedule of frozen parameters.

    Attributes:
        share: share of the parameters that is frozen in each iteration.
        late: iteration that adds a param group of parameters that were frozen before this iteration; None: no group is
            added.
    """

    seed: int
    share: float
    late: int | None

    def is_late(self, number: int) -> bool:
        """Return whether the parameter with this number belongs to the late param group."""
        return self.late is not None and number % 3 == self.seed % 3

    def trains(self, number: int, iteration: int) -> bool:
        if self.late is not None and self.is_late(number):
            return iteration >= self.late
        return random.Random(f"{self.seed} {iteration} {number}").random() >= self.share


def unfreezing(seed: int, loop: Any) -> Any:
    """For some seeds, return a loop that freezes and unfreezes parameters. For the other seeds, return the unchanged
    loop.
    """
    rng = random.Random(f"freezing {seed}")
    if rng.random() < 0.6:
        return loop
    late = rng.randrange(1, len(loop.iterations)) if rng.random() < 0.6 else None
    freezing = Freezing(seed, rng.choice([0.0, 0.3, 0.7]), late)
    if late is None:
        return replace(loop, freezing=freezing)
    # Schedulers and resumed runs know only the groups that existed when they were created.
    iterations = tuple(replace(each, restart=None) for each in loop.iterations)
    return replace(loop, freezing=freezing, scheduler=None, iterations=iterations)


def trained(model: Any) -> list[nn.Parameter]:
    """Return the parameters that may be frozen; the head is excluded, since a loss must keep its graph."""
    head = set(map(id, model.head.parameters()))
    return [each for each in map(model.get_parameter, model.trained) if id(each) not in head]


def late_ones(loop: Any, model: Any) -> list[nn.Parameter]:
    """Return the parameters of the param group that is added later."""
    if loop.freezing is None:
        return []
    return [parameter for number, parameter in enumerate(trained(model)) if loop.freezing.is_late(number)]


def freeze(world: Any, loop: Any, index: int) -> None:
    """Apply the schedule at the start of an iteration."""
    if loop.freezing is None:
        return
    for number, parameter in enumerate(trained(world.model)):
        parameter.requires_grad_(loop.freezing.trains(number, index))
    late = late_ones(loop, world.model)
    if index == loop.freezing.late and late:
        world.optimizer.add_param_group({"params": late, "lr": 3e-3})
