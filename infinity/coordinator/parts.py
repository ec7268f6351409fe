"""The parts of one offloaded model, which its coordinator asks, and how they are opened."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from infinity.base.interrupt import whole
from infinity.base.timeline import Timeline
from infinity.coordinator.gradient_handle import GradientHandle
from infinity.coordinator.put_back import Masters
from infinity.coordinator.readers import Readers
from infinity.durable.commits import Commits
from infinity.durable.optimizers import Checkpointed, Optimizers
from infinity.plan.plan import Plan
from infinity.sharded.opening import open_fetches, open_gradients, open_pool
from infinity.state.shard import Shard
from infinity.state.unit import Place, Unit
from infinity.tiers.resources import Resources
from infinity.units.arrivals import Passes
from infinity.units.gradients import UnitGradients, groups_of
from infinity.units.health import Health
from infinity.units.progress import Progress
from infinity.units.released import Lender, released_class
from infinity.units.room import Room
from infinity.units.shadows import Shadows
from infinity.units.speculation import Predictable, Speculation, Timed
from infinity.units.speculator import Speculator
from infinity.units.unit import OffloadedUnit
from infinity.units.updates import Updates


class Optimizer(Checkpointed, Predictable, Protocol):
    """An optimizer, as the coordinator sees it."""


class Parts(Lender):
    """The parts, opened in the order in which they know each other.

    Attributes:
        units: in the order of their indices.
        steps: optimizer steps that are done.
        rewritten: names of parameters that got other values since they were brought home, by no step.
        saved_wide: names of parameters that the script had in fp32, and whose masters are saved, not their weights.
        saved_from: of frozen ones that it had in fp32, what gives the values that are saved.
        masters: of weights that were written to since the last step.
        keeps_room: parameters that are frozen keep the room for their optimizer states, as they are unfrozen later.
        copied_from: the run and the step whose states this run began with, if it did not begin anew.
        readers: who may read parameters now.
        staying: the units that stay on the device while the model runs, by index.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        parameters: Sequence[dict[str, nn.Parameter]],
        resources: Resources,
        optimizers: Optimizers[Optimizer],
        commits: Commits,
    ) -> None:
        self.resources = resources
        self.timeline = Timeline()
        self.world = resources.world
        self.health = Health(self.world)
        self.readers = Readers()
        self.optimizers = optimizers
        self.commits = commits
        self.steps = 0
        self.keeps_room = False
        self.rewritten: set[str] = set()
        self.saved_wide: frozenset[str] = frozenset()
        self.saved_from: Mapping[str, Callable[[], torch.Tensor]] = {}
        self.masters = Masters()
        self.copied_from: tuple[str, int] | None = None
        self._lock = threading.RLock()
        self._owners = {
            id(parameter): (unit.index, name)
            for unit, named in zip(units, parameters, strict=True)
            for name, parameter in named.items()
        }
        self.staying = frozenset(unit.index for unit in units if unit.stays)
        shards = [resources.plan.peers.cut.of(unit) for unit in units]
        released, shadows = released_class(self), _open_shadows(shards, resources)
        gradients = [UnitGradients(each.unit, groups_of(each.local, resources)) for each in shards]
        self.units = [
            OffloadedUnit(each.unit, each.local, named, homes, of_unit, released, self.timeline, self.health, shadows)
            for each, named, homes, of_unit in zip(shards, parameters, resources.units, gradients, strict=True)
        ]
        self.shards = shards
        self.passes = Passes([each.arrivals for each in gradients])
        self.updates = Updates(resources, shadows)
        timed = None if resources.device is None else Timed()
        self.speculation = Speculation(resources.plan.placement.updates.overlap, timed)
        pool, fetches = open_pool(resources, shards), open_fetches(resources)
        self.room = Room(self.units, resources, self.updates, self.timeline, pool, fetches)
        self.progress = Progress(resources, self.updates, commits, self.health, self.timeline)
        self._speculator = Speculator(
            self.speculation, self.updates, self.passes, commits, self.progress, self.units, shards
        )
        self.gradients = open_gradients(resources, shards, gradients, self._speculator.gradients_land)

    @property
    def plan(self) -> Plan:
        return self.resources.plan

    @property
    def closed(self) -> bool:
        return self.health.closed

    def keep_room(self) -> None:
        """What is frozen from now on is unfrozen during the run."""
        self.keeps_room = True

    def why_not_anew(self) -> str:
        """What offloading anew would lose; "" where nothing came since the values were brought home."""
        with self._lock:
            if self.health.closed:
                return "it was closed"
            if not self.readers.nobody:
                return "its weights are being read: leave infinity.gathered, or let the forward end, first"
            if self.steps or self.copied_from is not None or self.commits.newest is not None:
                return "it was trained, or goes on with a run"
            if len(self.optimizers):
                return "an optimizer of it was made"
            if any(self.gradients.has(place) for _, place in self.places() if place.group.trainable):
                return "it has gradients: step, or call zero_grad(), first"
            return ""

    def save_wide(self, names: Iterable[str], frozen: Mapping[str, Callable[[], torch.Tensor]]) -> None:
        """The script had these parameters in fp32: their masters are what is saved of them.

        Args:
            frozen: of others that it had in fp32, what gives their values.
        """
        if all(shard.whole for shard in self.shards):  # else a rank has but a part of each master
            self.saved_wide, self.saved_from = frozenset(names), frozen

    def rewrote(self, names: Iterable[str]) -> None:
        """These parameters got other values than those that were brought home, by no step."""
        self.rewritten.update(names)

    def places(self) -> Iterator[tuple[nn.Parameter, Place]]:
        for unit in self.units:
            for index, group in enumerate(unit.unit.groups):
                for spec in group.specs:
                    yield unit.parameters[spec.name], Place(unit.unit, index, spec)

    def handle(self, parameter: nn.Parameter, place: Place) -> GradientHandle:
        """What stands in `parameter.grad` for a gradient that has landed."""
        return GradientHandle(parameter, weakref.ref(self), place)

    @whole
    def gradient_value(self, place: Place) -> torch.Tensor:
        """A copy of a gradient that has landed, in RAM, in the dtype that it waits in.

        Raises:
            NotAvailableError: there are several ranks, and this one has a slice of it.
            DeviceError, SwapIOError: it was lost on its way.
        """
        with self._lock:
            self.health.require_open()
            self.units[place.unit.index].apply_update()  # which reads what is brought to RAM here
            return self.gradients.value(place)

    def name_of(self, parameter: nn.Parameter) -> str:
        return self._owners[id(parameter)][1]


def _open_shadows(shards: Sequence[Shard], resources: Resources) -> Shadows:
    in_ram = [shards[index].local for index in sorted(resources.plan.placement.weights.in_ram)]
    sizes = [unit.home_bytes for unit in in_ram if unit.trained_whole]
    return Shadows(resources.resting, resources.pipeline, resources.plan.budgets.shadow_bytes, sizes)
