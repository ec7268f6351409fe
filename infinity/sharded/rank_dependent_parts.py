"""Functions that open those parts of an offloaded model that depend on the number of ranks.

Only the files in sharded/ test whether there are several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from infinity.durable.generation_maker import GenerationMaker, SingleProcessGenerationMaker
from infinity.io.generations import Generations
from infinity.ranks.world import MultiRankWorld, World
from infinity.sharded.device_gather_memory import DeviceMemories
from infinity.sharded.gather_memory import GatherMemories, HostMemories
from infinity.sharded.gathered_slots import GatheredSlotPool
from infinity.sharded.initial_values import BroadcastFromFirst, InitialValuesBroadcast, NoBroadcast
from infinity.sharded.multi_rank_fetch_rules import MultiRankFetchRules
from infinity.sharded.multi_rank_generation_maker import MultiRankGenerationMaker
from infinity.sharded.multi_rank_gradients import MultiRankGradients
from infinity.sharded.outbox import GradientOutbox
from infinity.sharded.shared_homes import SharedHomes
from infinity.sharded.shared_slots import SharedFetchRules, SharedSlotPool
from infinity.sharded.shared_window import SharedWindow
from infinity.sharded.slot_book import SlotBook
from infinity.state.shard import Shard
from infinity.tiers.downloads import GradientQueue
from infinity.tiers.resources import ModelResources
from infinity.tiers.slots import SlotPool, open_slots
from infinity.units.fetch_rules import FetchRules, SingleProcessFetchRules
from infinity.units.gradients import ModelGradients, SingleProcessGradients, UnitGradients


def open_pool(resources: ModelResources, shards: Sequence[Shard]) -> SlotPool:
    """Return the slot pool that suits the device and the number of ranks."""
    world, homes = resources.world, [unit.weights for unit in resources.units]
    if not isinstance(world, MultiRankWorld):
        return open_slots(resources, homes)
    weights = resources.weights
    if isinstance(weights, SharedHomes):
        return SharedSlotPool(open_slots(resources, weights.complete), weights, homes, world.collectives)
    mailboxes = weights.mailboxes if isinstance(weights, SharedWindow) else None
    memories: GatherMemories = HostMemories(resources, mailboxes)
    if resources.device is not None and mailboxes is not None:
        memories = DeviceMemories(resources, resources.device, [shard.full for shard in shards], mailboxes)
    return GatheredSlotPool(resources, world.collectives, shards, memories)


def open_fetch_rules(resources: ModelResources) -> FetchRules:
    """Return the rules for fetches and evictions that suit the number of ranks."""
    if isinstance(resources.weights, SharedHomes):
        return SharedFetchRules(resources.weights)
    if not isinstance(resources.world, MultiRankWorld):
        return SingleProcessFetchRules()
    nbytes, units = resources.plan.budgets.slot_bytes, [unit.full for unit in resources.plan.layout.units]
    return MultiRankFetchRules(nbytes, None if resources.device is None else SlotBook(nbytes, units))


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
        before_landing: function to call before gradients of a unit land; see SingleProcessGradients and GradientOutbox.
    """
    world = resources.world
    if isinstance(world, MultiRankWorld):
        weights, queue = resources.weights, _gradient_queue(resources)
        mailboxes, space = None, resources.between_ranks
        if isinstance(weights, SharedHomes | SharedWindow):
            mailboxes, space = weights.mailboxes, weights.gradients
        outbox = GradientOutbox(shards, local, world.collectives, space, before_landing, queue, mailboxes)
        return MultiRankGradients(shards, local, world.collectives, outbox)
    return SingleProcessGradients(local, resources.landing_window, before_landing)


def open_landing_queue(resources: ModelResources) -> GradientQueue | None:
    """Return the queue by which gradients land from the device; None if they land from host memory: on the CPU, or
    after they have passed the ranks."""
    return None if isinstance(resources.world, MultiRankWorld) else _gradient_queue(resources)


def _gradient_queue(resources: ModelResources) -> GradientQueue | None:
    return None if resources.device is None else resources.device.gradients


def open_maker(world: World, generations: Generations | None) -> GenerationMaker:
    return (
        MultiRankGenerationMaker(world, generations)
        if isinstance(world, MultiRankWorld)
        else SingleProcessGenerationMaker()
    )


def open_broadcast(world: World) -> InitialValuesBroadcast:
    return BroadcastFromFirst(world) if isinstance(world, MultiRankWorld) else NoBroadcast()
