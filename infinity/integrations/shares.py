"""How the models of a script share memory.device and memory.host.

[Note: who gets how much]
What a model that is offloaded takes is decided: its plan says how much. The rest is divided among the model that is
offloaded now and those that are loaded and wait, by their weights; of memory.host a model that is trained gets more, as
it has states. So models that are loaded before the first of them is used share by their sizes, and one that is loaded
later gets what is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from infinity.config import MemoryConfig, SwapConfig
from infinity.coordinator import registry
from infinity.errors import PlanError, printable
from infinity.plan.plan import Plan
from infinity.plan.planner import limits_of
from infinity.plan.problem import Limits
from infinity.runtime.whole import nbytes_of
from infinity.sizes import format_bytes

_TRAINED_WEIGHT = 4
"""How much of memory.host a byte of trained weights counts beside one of frozen weights: it has states, too."""


@dataclass(frozen=True)
class Claim:
    """A model that is to get a share. Args: trained: it has states."""

    model: nn.Module
    trained: bool

    @property
    def host(self) -> int:
        return nbytes_of(self.model) * (_TRAINED_WEIGHT if self.trained else 1)

    @property
    def device(self) -> int:
        return nbytes_of(self.model)


@dataclass
class Shares:
    """Of one script.

    Attributes:
        config: whose memory it is.
    """

    config: SwapConfig
    _limits: Limits | None = field(default=None, init=False)

    def of(
        self, mine: Claim, waiting: Sequence[Claim], offloaded: Sequence[nn.Module], at: torch.device
    ) -> MemoryConfig:
        """What one model may take.

        Args:
            waiting: models that are loaded and not offloaded.
            offloaded: models whose plans take memory.
            at: where models compute.
        """
        if self._limits is None:  # what a plan takes is not all in use when it is made, so it is measured once
            self._limits = limits_of(self.config, at)
        if not waiting and not offloaded:
            return self.config.memory
        plans = [_plan_of(each) for each in offloaded]
        host = self._limits.host - sum(plan.host_bytes for plan in plans)
        device = self._limits.device - sum(plan.device_bytes for plan in plans)
        host = host * mine.host // (mine.host + sum(each.host for each in waiting))
        device = device * mine.device // (mine.device + sum(each.device for each in waiting))
        return self.config.memory.model_copy(update={"host": max(host, 1), "device": max(device, 1)})


@contextmanager
def naming_the_shares(memory: MemoryConfig, waiting: Sequence[Claim], offloaded: Sequence[nn.Module]) -> Iterator[None]:
    """A plan that does not fit says what the memory is shared with."""
    try:
        yield
    except PlanError as error:
        if not waiting and not offloaded:
            raise
        given = f"{format_bytes(memory.device or 0)} and {format_bytes(memory.host or 0)}"
        count = f"The script has {len(waiting) + len(offloaded) + 1} models; of memory.device and memory.host"
        if not offloaded:
            raise PlanError(f"{error} ({count} this one was given {given}, by its share of the weights.)") from error
        taken = ", ".join(f"{_name(each)} has {_taken_by(_plan_of(each))}" for each in offloaded)
        raise PlanError(
            f"{error} ({count} {taken}, and {given} are left for this one. Load every model before the first of them "
            "is used or gets its optimizer: then they share the memory by their weights.)"
        ) from error


def _plan_of(model: nn.Module) -> Plan:
    return registry.coordinator_of(model).plan


def _name(model: nn.Module) -> str:
    return printable(type(model).__name__)


def _taken_by(plan: Plan) -> str:
    return f"{format_bytes(plan.device_bytes)} and {format_bytes(plan.host_bytes)}"
