"""Objects of infinity's classes, opened with simulated lower layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from infinity.plan.plan import Plan
from infinity.ranks.world import SingleProcessWorld
from infinity.sharded.rank_dependent_parts import open_landing_queue
from infinity.state.unit import Unit
from infinity.state.update_request import GroupUpdate, SegmentRequest
from infinity.tiers.slots import open_slots
from infinity.units.arrivals import BackwardPasses
from infinity.units.fetch_rules import SingleProcessFetchRules
from infinity.units.fetcher import Fetcher
from infinity.units.gradients import SingleProcessGradients, UnitGradients, groups_of
from infinity.units.health import ModelHealth
from infinity.units.pump import UpdatePump
from infinity.units.resident_gradients import ResidentSums
from infinity.units.speculation_choice import SpeculationChoice
from infinity.units.speculative_update_buffers import SpeculativeUpdateBuffers
from infinity.units.speculative_updates import SpeculativeUpdates
from infinity.units.unit import OffloadedUnit
from infinity.units.update_queue import UpdateQueue
from simulation.clock import Clock
from simulation.disk import Disk
from simulation.fluid import Fluid
from simulation.gpu import Gpu
from simulation.machine import SimulatedMachine
from simulation.native import Pool
from simulation.pipeline import Pipeline
from simulation.resources import open_resources


class Timeline:
    """Counterpart of base.timeline.Timeline, in simulated time. Attributes: stalled: stalled seconds, by cause."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.stalled: dict[str, float] = {}

    @contextmanager
    def stall(self, cause: str, unit: str = "") -> Iterator[None]:
        """Count the time within the context as a stall.

        If stalls are nested, the time counts for the innermost stall.
        """
        began, inner = self._clock.now, sum(self.stalled.values())
        yield
        within = sum(self.stalled.values()) - inner
        self.stalled[cause] = self.stalled.get(cause, 0.0) + self._clock.now - began - within

    def begin(self, kind: str, unit: str) -> None:
        return

    def end(self, kind: str, unit: str) -> None:
        return


class Views:
    """Counterpart of units.parameters.ParameterViews, for parameters that are never read."""

    open = False

    def show(self, slot: Any) -> None:
        return

    def hide(self) -> None:
        return

    def open_up(self) -> None:
        return

    def close(self) -> None:
        return

    def require_untouched(self) -> None:
        return

    def saved_by_autograd(self) -> bool:
        return False


class Optimizer:
    """Counterpart of units.speculation_choice.Predictable: AdamW, whose gradients a step multiplies by `scale`."""

    accumulation_steps = None
    expected_scale = 1.0

    def __init__(self, units: list[Unit]) -> None:
        self._units = units

    def expected_update(self, index: int) -> dict[int, GroupUpdate]:
        return self.update(index, 1.0)

    def update(self, index: int, scale: float) -> dict[int, GroupUpdate]:
        return {
            number: GroupUpdate((SegmentRequest(0, group.numel, 1, 0, False, scale, (("lr", 1e-5),)),), None)
            for number, group in enumerate(self._units[index].groups)
        }

    def requests(self, scale: float) -> Mapping[int, dict[int, GroupUpdate]]:
        return {index: self.update(index, scale) for index in range(len(self._units))}


class Commits:
    """Counterpart of coordinator.commits.Commits, for steps that are not committed."""

    under_way = False
    frozen = False

    def due(self, step: int) -> bool:
        return False

    def step_begins(self) -> None:
        return

    def retire_early(self) -> None:
        return


class Rooms:
    """The objects of coordinator.coordinator.Coordinator, with the same attributes, and the machine below them."""

    def __init__(self, machine: SimulatedMachine, plan: Plan, units: list[Unit]) -> None:
        self.clock = Clock()
        self.fluid = Fluid(self.clock, machine.capacity())
        self.disk = Disk(self.clock, self.fluid, machine)
        self.pipeline = Pipeline(self.clock, self.fluid, self.disk, machine, plan.budgets.staging)
        self.timeline = Timeline(self.clock)
        self.gpu = Gpu(self.clock, self.fluid, machine) if machine.is_gpu else None
        pool = Pool(self.clock, self.fluid, machine)
        self.resources = open_resources(plan, self.disk, pool, self.pipeline, self.gpu)
        sizes = [units[index].weight_bytes for index in sorted(plan.placement.weights.in_ram)]
        native: Any = self.pipeline
        self.shadows = SpeculativeUpdateBuffers(self.resources.resting, native, plan.budgets.shadow_bytes, sizes)
        self.health = ModelHealth(SingleProcessWorld())
        sums = ResidentSums(None)  # without memory: the sums are imitated (resident.py)
        gradients = [
            UnitGradients(unit, groups_of(unit, self.resources, sums, open_landing_queue(self.resources)))
            for unit in units
        ]
        self.units = [self._unit(unit, of_unit) for unit, of_unit in zip(units, gradients, strict=True)]
        self.passes = BackwardPasses([each.arrivals for each in gradients])
        self.update_queue = UpdateQueue(self.resources, self.shadows)
        self.speculation_choice = SpeculationChoice(plan.placement.updates.overlap)
        commits: Any = Commits()
        shards = [plan.peers.cut.of(unit) for unit in units]
        timeline: Any = self.timeline
        self.pump = UpdatePump(self.resources, self.update_queue, commits, self.health, timeline)
        self.speculative_updates = SpeculativeUpdates(
            self.speculation_choice, self.update_queue, self.passes, commits, self.pump, self.units, shards
        )
        self.gradients = SingleProcessGradients(
            gradients, self.resources.landing_window, self.speculative_updates.before_landing
        )
        self.fetcher = Fetcher(
            self.units,
            self.resources,
            self.update_queue,
            timeline,
            open_slots(self.resources, [homes.weights for homes in self.resources.units]),
            SingleProcessFetchRules(),
        )

    def _unit(self, unit: Unit, gradients: UnitGradients) -> OffloadedUnit:
        timeline: Any = self.timeline
        views: Any = Views()
        homes = self.resources.units[unit.index]
        shard = self.resources.plan.peers.cut.of(unit)
        return OffloadedUnit(shard, views, homes, gradients, timeline, self.health, self.shadows)
