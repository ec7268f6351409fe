"""The house's rooms, opened over imitations of what lies below them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from infinity.coordinator.progress import Progress
from infinity.coordinator.speculator import Speculator
from infinity.plan.plan import Plan
from infinity.state.request import GroupUpdate, SegmentRequest
from infinity.state.unit import Unit
from infinity.tiers.accelerator import CpuDevice
from infinity.tiers.slots import HostSlots
from infinity.units import room as room_module
from infinity.units import update as update_module
from infinity.units.arrivals import Arrivals, Passes
from infinity.units.health import Health
from infinity.units.room import Room
from infinity.units.shadows import Shadows
from infinity.units.speculation import Speculation
from infinity.units.unit import OffloadedUnit
from infinity.units.updates import Updates
from infinity.units.weights import Weights
from simulation.clock import Clock
from simulation.disk import Disk
from simulation.fluid import Fluid
from simulation.gpu import Gpu, GpuRoom, GpuSlots, GpuUnit, GpuWeights
from simulation.machine import Machine
from simulation.memory import FILE, Memory, Space, Store, Stream, Views, homes_of, spare_copy
from simulation.pipeline import Pipeline


class Timeline:
    """As base.timeline.Timeline, in simulated time. Attributes: stalled: seconds, by cause."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._depth = 0
        self.stalled: dict[str, float] = {}

    @contextmanager
    def stall(self, cause: str, unit: str = "") -> Iterator[None]:
        """Of stalls within stalls the innermost counts: the time is given to one cause."""
        began, inner = self._clock.now, sum(self.stalled.values())
        yield
        within = sum(self.stalled.values()) - inner
        self.stalled[cause] = self.stalled.get(cause, 0.0) + self._clock.now - began - within

    def begin(self, kind: str, unit: str) -> None:
        return

    def end(self, kind: str, unit: str) -> None:
        return


class Gradients:
    """As units.gradients.UnitGradients.

    Attributes: in_ram: they do not spill. groups: whose streams an update asks for.
    """

    finite = True

    def __init__(self, unit: Unit, *, in_ram: bool) -> None:
        self.in_ram = in_ram
        self.arrivals = Arrivals([spec.name for group in unit.trainable_groups for spec in group.specs])
        stream = Stream(memory=Memory("host", 0)) if in_ram else Stream(file=FILE)
        self.groups = {
            index: SimpleNamespace(dtype=group.dtype, stream=lambda: stream) for index, group in enumerate(unit.groups)
        }


class Optimizer:
    """As units.speculation.Predictable: AdamW, whose gradients a step multiplies by `scale`."""

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


class Rooms:
    """Attributes: as coordinator.parts.Parts."""

    def __init__(self, machine: Machine, plan: Plan, units: list[Unit]) -> None:
        self.clock = Clock()
        self.fluid = Fluid(self.clock, machine.capacity())
        self.disk = Disk(self.clock, self.fluid, machine)
        self.pipeline = Pipeline(self.clock, self.fluid, self.disk, machine, plan.budgets.staging)
        self.timeline = Timeline(self.clock)
        self.gpu = Gpu(self.clock, self.fluid, machine) if machine.is_gpu else None
        budgets, placement = plan.budgets, plan.placement
        store = Store(self.disk)
        native: Any = self.pipeline
        self.resources: Any = SimpleNamespace(
            plan=plan,
            device=CpuDevice() if self.gpu is None else self.gpu,
            pipeline=self.pipeline,
            arena=Space(budgets.slot_bytes),
            store=store,
            require_store=lambda: store,
            generations=None,
            destination=lambda extent: extent.copy,
            spare_copy=spare_copy,
        )
        space: Any = Space(plan.layout.arena.weights_and_shadows)
        sizes = [units[index].weight_bytes for index in sorted(placement.weights.in_ram)]
        self.shadows = Shadows(space, native, budgets.shadow_bytes, sizes)
        self.health = Health()
        self.units = [self._unit(unit, plan, space) for unit in units]
        self.passes = Passes([unit.gradients.arrivals for unit in self.units])
        self.updates = Updates(self.resources, self.shadows)
        self.speculation = Speculation(placement.updates.overlap)
        commits: Any = SimpleNamespace(under_way=False, frozen=False, due=lambda step: False, step_begins=lambda: None)
        timeline: Any = self.timeline
        self.progress = Progress(self.resources, self.updates, commits, self.health, timeline)
        self.speculator = Speculator(self.speculation, self.updates, self.passes, commits, self.progress)
        with mock.patch.object(room_module, "open_slots", self._open_slots):
            kind = Room if self.gpu is None else GpuRoom
            self.room = kind(self.units, self.resources, self.updates, timeline)

    def _unit(self, unit: Unit, plan: Plan, weights_ram: Space) -> OffloadedUnit:
        released: Any = None
        timeline: Any = self.timeline
        views: Any = Views()
        layout = plan.layout.units[unit.index]
        gradients: Any = Gradients(unit, in_ram=unit.index in plan.placement.gradients.in_ram)
        unit_kind, weights_kind = (OffloadedUnit, Weights) if self.gpu is None else (GpuUnit, GpuWeights)
        made = unit_kind(
            unit, {}, homes_of(layout, weights_ram), gradients, released, timeline, self.health, self.shadows
        )
        made.views = views
        made.weights = weights_kind(unit, views, timeline)
        return made

    def _open_slots(self, resources: Any) -> Any:
        if self.gpu is None:
            return HostSlots(resources)
        budgets = resources.plan.budgets
        return GpuSlots(self.clock, self.gpu, self.disk, budgets.slot_bytes, budgets.upload_bytes)


@contextmanager
def streams_of_no_content() -> Iterator[None]:
    """In this context the rooms describe jobs with simulated streams."""
    with mock.patch.object(update_module, "_native", SimpleNamespace(StateStream=Stream)):
        yield
