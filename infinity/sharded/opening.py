"""Opening of the parts of a model that differ between one process and several ranks.

Only files in sharded/ test whether there are several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from infinity.durable.generation_maker import LocalMaker, Maker
from infinity.io.generations import Generations
from infinity.ranks.world import Among, World
from infinity.sharded.fetch_rules import AgreedFetches
from infinity.sharded.generation_maker import SharedMaker
from infinity.sharded.gradients import SharedGradients
from infinity.sharded.outbox import Outbox
from infinity.sharded.rank_broadcast import Comparison, NoComparison, SameOnAllRanks
from infinity.sharded.slots import GatheredSlots
from infinity.state.shard import Shard
from infinity.tiers.resources import Resources
from infinity.tiers.slots import SlotPool, open_slots
from infinity.units.fetch_rules import FetchPolicy, LocalFetches
from infinity.units.gradients import Gradients, LocalGradients, UnitGradients


def open_pool(resources: Resources, shards: Sequence[Shard]) -> SlotPool:
    """Return the slot pool for the device and the ranks."""
    world = resources.world
    return GatheredSlots(resources, world.exchange, shards) if isinstance(world, Among) else open_slots(resources)


def open_fetches(resources: Resources) -> FetchPolicy:
    """Return the policy that decides which units may be brought and evicted."""
    several = isinstance(resources.world, Among)
    return AgreedFetches(resources.plan.budgets.slot_bytes) if several else LocalFetches()


def open_gradients(
    resources: Resources, shards: Sequence[Shard], local: Sequence[UnitGradients], before: Callable[[int], None]
) -> Gradients:
    """Return the gradients of the model.

    Args:
        resources: resources of the model.
        shards: this rank's shards, by unit.
        local: gradients of this rank's slices, by unit.
        before: function to call before gradients of a unit land, as for LocalGradients and Outbox.
    """
    world = resources.world
    if isinstance(world, Among):
        outbox = Outbox(shards, local, world.exchange, resources.between_ranks, before)
        return SharedGradients(shards, local, world.exchange, outbox)
    return LocalGradients(local, resources.landing, before)


def open_maker(world: World, generations: Generations | None) -> Maker:
    return SharedMaker(world, generations) if isinstance(world, Among) else LocalMaker()


def open_comparison(world: World) -> Comparison:
    return SameOnAllRanks(world) if isinstance(world, Among) else NoComparison()
