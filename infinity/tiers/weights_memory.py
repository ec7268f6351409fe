"""Memory of the weights that rest in RAM: this process's own, or memory that several processes share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from infinity.base.accelerator import Accelerator
from infinity.io.arena import ArenaRegion
from infinity.io.store import Extent
from infinity.plan.layout import UnitLayout
from infinity.ranks.world import World
from infinity.tiers.home import StateHome, WeightsHome


class WeightsMemory(Protocol):
    """Memory of weights, in which the homes of units are opened."""

    def open(self, layout: UnitLayout, extents: Sequence[Extent | None], resting: ArenaRegion) -> WeightsHome:
        """Open the home of a unit's weights.

        Args:
            layout: layout of the unit.
            extents: place of each group in the store; None for a group without a place there.
            resting: memory of this process for homes.
        """

    def transfers(self, arena: ArenaRegion) -> ArenaRegion:
        """Return the memory in which weights are fetched on the CPU, or that they pass on their way to a device.

        Until the first fetch, the code that fills the store may use this memory.

        Args:
            arena: the arena, whose free memory is used unless the memory is elsewhere.
        """

    def pin(self, accelerator: Accelerator) -> str:
        """Pin memory that is not in the arena (PinnedArena.pin). Return why this was refused, or ''."""

    def close(self) -> None:
        """Stop the threads, after all updates have ended. A second call does nothing."""

    def give_back(self) -> None:
        """Free memory that is not in the arena, even while references to it exist."""


class OwnWeightsMemory:
    """Memory of this process: the arena (WeightsMemory)."""

    def open(self, layout: UnitLayout, extents: Sequence[Extent | None], resting: ArenaRegion) -> WeightsHome:
        unit, nbytes = layout.local, layout.weight_lease_bytes
        lease = resting.lease(nbytes, f"the weights of '{unit.name}'") if nbytes else None
        groups, begin = [], 0
        for group, extent in zip(layout.groups, extents, strict=True):
            groups.append(StateHome(lease, begin, group.weight.nbytes, extent, dirty=lease is not None))
            begin += group.weight.nbytes
        return WeightsHome(tuple(groups), unit.home_bytes, unit)

    def transfers(self, arena: ArenaRegion) -> ArenaRegion:
        return arena

    def pin(self, accelerator: Accelerator) -> str:
        return ""

    def close(self) -> None:
        return

    def give_back(self) -> None:
        return


@dataclass(frozen=True)
class RankResources:
    """Resources that a model gets from the ranks that train it.

    Attributes:
        world: the ranks.
        run: id for a new run, the same on all ranks; "" for a process without other ranks.
        weights: memory of the weights in RAM.
    """

    world: World
    run: str = ""
    weights: WeightsMemory = field(default_factory=OwnWeightsMemory)
