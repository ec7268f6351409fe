"""Functions that open those parts of an offloaded model that depend on the number of ranks.

Only the files in sharded/ test whether there are several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from infinity.durable.generation_maker import GenerationMaker, LocalGenerationMaker
from infinity.io.generations import Generations
from infinity.ranks.world import MultiRankWorld, World
from infinity.sharded.agreed_fetch_rules import AgreedFetchRules
from infinity.sharded.gathered_slots import GatheredSlotPool
from infinity.sharded.initial_values import BroadcastFromFirst, InitialValuesBroadcast, NoBroadcast
from infinity.sharded.outbox import GradientOutbox
from infinity.sharded.shared_generation_maker import SharedGenerationMaker
from infinity.sharded.shared_gradients import SharedGradients
from infinity.state.shard import Shard
from infinity.tiers.resources import ModelResources
from infinity.tiers.slots import SlotPool, open_slots
from infinity.units.fetch_rules import FetchRules, LocalFetchRules
from infinity.units.gradients import LocalGradients, ModelGradients, UnitGradients


def open_pool(resources: ModelResources, shards: Sequence[Shard]) -> SlotPool:
    """Return the slot pool that suits the device and the number of ranks."""
    world = resources.world
    return (
        GatheredSlotPool(resources, world.exchange, shards)
        if isinstance(world, MultiRankWorld)
        else open_slots(resources)
    )


def open_fetch_rules(resources: ModelResources) -> FetchRules:
    """Return the rules for fetches and evictions that suit the number of ranks."""
    several = isinstance(resources.world, MultiRankWorld)
    return AgreedFetchRules(resources.plan.budgets.slot_bytes) if several else LocalFetchRules()


def open_gradients(
    resources: ModelResources,
    shards: Sequence[Shard],
    local: Sequence[UnitGradients],
    before_landing: Callable[[int], None],
) -> ModelGradients:
    """Return the gradients of the model.

    Args:
        resources: resources of the model.
        shards: this rank's shards, by unit.
        local: gradients of this rank's slices, by unit.
        before_landing: function to call before gradients of a unit land; see LocalGradients and GradientOutbox.
    """
    world = resources.world
    if isinstance(world, MultiRankWorld):
        outbox = GradientOutbox(shards, local, world.exchange, resources.between_ranks, before_landing)
        return SharedGradients(shards, local, world.exchange, outbox)
    return LocalGradients(local, resources.landing_window, before_landing)


def open_maker(world: World, generations: Generations | None) -> GenerationMaker:
    return SharedGenerationMaker(world, generations) if isinstance(world, MultiRankWorld) else LocalGenerationMaker()


def open_broadcast(world: World) -> InitialValuesBroadcast:
    return BroadcastFromFirst(world) if isinstance(world, MultiRankWorld) else NoBroadcast()
