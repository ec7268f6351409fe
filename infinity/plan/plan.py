"""The plan: where each state of the model lives and what that costs. Made once, before anything is moved."""

from __future__ import annotations

from dataclasses import dataclass

from infinity.plan.budgets import Budgets
from infinity.plan.describe import describe
from infinity.plan.forecast import Forecast
from infinity.plan.layout import Layout
from infinity.plan.placement import Placement


@dataclass(frozen=True)
class Plan:
    """What was decided.

    Attributes:
        device: where the model computes.
        placement: where states rest, in which form, and when they change.
        budgets: the memory they may take, and what of it is for moving them.
        layout: every extent of the swap file and every lease of the arena.
        forecast: what a step moves.
    """

    device: str
    placement: Placement
    budgets: Budgets
    layout: Layout
    forecast: Forecast

    @property
    def device_bytes(self) -> int:
        """What the plan takes of the device's budget. Where the device shares host memory, weights in RAM are used
        where they are."""
        used_in_place = self.budgets.limits.shares_memory and self.placement.weights.tier == "host"
        return 0 if used_in_place else self.budgets.slot_bytes

    @property
    def host_bytes(self) -> int:
        """What the plan takes of the host's budget: the arena, but for what is of the device's budget, and the
        checksums of the swap file."""
        of_device = self.device_bytes if self.budgets.limits.shares_memory else 0
        return self.layout.arena.nbytes - of_device + self.layout.checksum_bytes

    def describe(self) -> str:
        """A few lines for the log: every tier, every budget, and what is predicted."""
        return describe(self)
