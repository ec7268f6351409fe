"""The division of memory.device and memory.host among the models of a script.

[Note: who gets how much]
The plan of an offloaded model says how much memory the model has; this memory does not change. When another model is
offloaded, the remaining memory is divided among this model and all loaded models that are not offloaded yet, in
proportion to the bytes of their weights. In the division of memory.host, the bytes of a trained model count more,
because a trained model has optimizer states. Models that are loaded before any model is used therefore share the memory
by their sizes. A model that is loaded later gets the memory that is left.
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
from infinity.plan.plan_input import MemoryLimits
from infinity.plan.planner import limits_of
from infinity.runtime.memory_fit import nbytes_of
from infinity.sizes import format_bytes

_TRAINED_WEIGHT = 4
"""Factor for the bytes of a trained model in the division of memory.host.

A trained model also has optimizer states. The factor of a model that is only evaluated is 1.
"""


@dataclass(frozen=True)
class MemoryClaim:
    """A model that needs a share of the memory.

    Attributes:
        trained: whether the model has optimizer states.
    """

    model: nn.Module
    trained: bool

    @property
    def host(self) -> int:
        return nbytes_of(self.model) * (_TRAINED_WEIGHT if self.trained else 1)

    @property
    def device(self) -> int:
        return nbytes_of(self.model)


@dataclass
class MemoryShares:
    """The division of memory.device and memory.host among the models of one script.

    Attributes:
        config: the swap config whose memory is divided.
    """

    config: SwapConfig
    _limits: MemoryLimits | None = field(default=None, init=False)

    def of(
        self, mine: MemoryClaim, waiting: Sequence[MemoryClaim], offloaded: Sequence[nn.Module], at: torch.device
    ) -> MemoryConfig:
        """Return the memory that one model may use.

        Args:
            mine: the model that is offloaded now.
            waiting: models that are loaded but not offloaded.
            offloaded: models whose plans use memory.
            at: device on which the models compute.
        """
        # the memory is measured once, because a new model does not use all of its memory at once
        if self._limits is None:
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
def naming_the_shares(
    memory: MemoryConfig, waiting: Sequence[MemoryClaim], offloaded: Sequence[nn.Module]
) -> Iterator[None]:
    """If a model does not fit in its memory, add to the error which other models share the memory."""
    try:
        yield
    except PlanError as error:
        if not waiting and not offloaded:
            raise
        given = f"{format_bytes(memory.device or 0)} and {format_bytes(memory.host or 0)}"
        count = f"The script has {len(waiting) + len(offloaded) + 1} models; of memory.device and memory.host"
        if not offloaded:
            raise PlanError(f"{error} ({count} this model got {given}, by its share of the weights.)") from error
        taken = ", ".join(f"{_name(each)} has {_taken_by(_plan_of(each))}" for each in offloaded)
        raise PlanError(
            f"{error} ({count} {taken}, and {given} are left for this model. Load every model before the first model "
            "is used or gets its optimizer: the models then share the memory by their weights.)"
        ) from error


def _plan_of(model: nn.Module) -> Plan:
    return registry.coordinator_of(model).plan


def _name(model: nn.Module) -> str:
    return printable(type(model).__name__)


def _taken_by(plan: Plan) -> str:
    return f"{format_bytes(plan.device_bytes)} and {format_bytes(plan.host_bytes)}"
