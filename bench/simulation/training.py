"""Simulated training steps: the calls of hooks and of the coordinator, in the same order as in training."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from infinity.plan.plan import Plan
from infinity.units.resident_gradients import ResidentGradients
from infinity.units.unit import OffloadedUnit
from simulation.clock import Future
from simulation.fluid import Activity
from simulation.machine import SimulatedMachine
from simulation.rooms import Optimizer, Rooms
from simulation.shapes import Task

_CLIPPING = 0.5  # any value but 1: the factor by which a clipped step multiplies gradients
_RUN_AHEAD = 8
"""Largest number of visits of units by which the host is ahead of the GPU.

The number models a queue of about 1,000 launches, with about 100 launches per block.
"""


@dataclass(frozen=True)
class Figures:
    """Figures of all steps so far, or of one step.

    Attributes:
        used: amount of each resource by name: core seconds, bytes, seconds of the device and of the disks.
        stalled: seconds for which the host waited, by cause.
        waited: seconds for which a GPU waited, by cause.
        in_step: seconds inside optim.step().
    """

    seconds: float
    read_bytes: float
    written_bytes: float
    adam_s: float
    in_step: float
    used: dict[str, float] = field(default_factory=dict)
    stalled: dict[str, float] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=dict)

    def since(self, earlier: Figures, steps: int) -> Figures:
        """Return the figures of one step, averaged over the steps since the earlier figures."""

        def parts(now: dict[str, float], then: dict[str, float]) -> dict[str, float]:
            return {name: (value - then.get(name, 0.0)) / steps for name, value in now.items()}

        return Figures(
            (self.seconds - earlier.seconds) / steps,
            (self.read_bytes - earlier.read_bytes) / steps,
            (self.written_bytes - earlier.written_bytes) / steps,
            (self.adam_s - earlier.adam_s) / steps,
            (self.in_step - earlier.in_step) / steps,
            parts(self.used, earlier.used),
            parts(self.stalled, earlier.stalled),
            parts(self.waited, earlier.waited),
        )


class Training:
    """Simulated training.

    Args:
        clipped: whether every step clips its gradients.
        micro_batches: number of micro-batches of a step; all micro-batches pass through a unit before the next unit
            begins.
    """

    def __init__(
        self, machine: SimulatedMachine, task: Task, plan: Plan, *, clipped: bool, micro_batches: int = 1
    ) -> None:
        self._micro_batches = micro_batches
        self.rooms = Rooms(machine, plan, list(task.units))
        self._machine, self._task = machine, task
        self._scale = _CLIPPING if clipped else 1.0
        self._optimizer = Optimizer(list(task.units))
        self._steps = 0
        self._in_step = 0.0
        self._gradient = torch.empty(0, dtype=getattr(torch, task.work.dtype))
        self._queued: deque[Future] = deque()
        self._order = [unit for unit in self.rooms.units if not unit.full.stays]
        self._staying = [unit for unit in self.rooms.units if unit.full.stays]
        if machine.busy_cores:
            endless = Activity(1e15, machine.busy_cores, {"cores": 1.0}, weight=machine.busy_cores)
            self.rooms.fluid.start(endless, lambda: None)

    def figures(self) -> Figures:
        rooms = self.rooms
        waited = {} if rooms.gpu is None else dict(rooms.gpu.compute.waited)
        used, stalled = dict(rooms.fluid.used), dict(rooms.timeline.stalled)
        disk, adam = rooms.disk, rooms.pipeline.adam_s
        return Figures(rooms.clock.now, disk.read_bytes, disk.written_bytes, adam, self._in_step, used, stalled, waited)

    def step(self) -> None:
        self._forward()
        self._backward()
        began = self.rooms.clock.now
        with self.rooms.timeline.stall("step"):
            self._step()
        self._in_step += self.rooms.clock.now - began
        self._zero_grad()

    # -- forward and backward -----------------------------------------------------------------------------------------

    def _forward(self) -> None:
        rooms = self.rooms
        rooms.pump.advance()
        rooms.fetcher.begin_pass(training=True)
        for unit in self._staying:
            self._acquire(unit)
        for unit in self._order:
            self._acquire(unit)
            for _ in range(self._micro_batches):
                self._compute(self._task.forward[unit.index])
            rooms.fetcher.unuse(unit)
        for unit in self._staying:
            rooms.fetcher.unuse(unit)

    def _acquire(self, unit: OffloadedUnit) -> None:
        unit.weights.use()
        self.rooms.pump.advance()
        self.rooms.fetcher.fetch(unit)

    def _backward(self) -> None:
        rooms = self.rooms
        head, *others = reversed(self._order)
        for number, unit in enumerate([head, *self._staying, *others]):
            self._hold(unit)
            for passed in range(self._micro_batches):
                self._compute(self._task.backward[unit.index])
                if number == passed == 0:
                    self._begin_backward()
                self._land(unit, passed)
        rooms.passes.end()
        rooms.fetcher.hold(())
        rooms.gradients.send()
        rooms.gradients.backward_begins((), ())

    def _hold(self, unit: OffloadedUnit) -> None:
        rooms = self.rooms
        rooms.pump.advance()
        rooms.fetcher.hold([unit.index])
        rooms.gradients.backward_begins([unit.index], [each.index for each in self._staying])
        rooms.pump.advance()
        rooms.fetcher.fetch(unit)

    def _begin_backward(self) -> None:
        rooms = self.rooms
        rooms.passes.begin()
        rooms.pump.advance()
        rooms.speculative_updates.backward_begins(rooms.fetcher.order, self._optimizer, self._steps + 1)

    def _compute(self, flops: float) -> None:
        """Compute `flops`. On the CPU the work is done when this function returns; on a GPU the work is queued."""
        machine, gpu = self._machine, self.rooms.gpu
        if gpu is None:
            self._busy(Activity(machine.visit_s, 1.0, {"cores": 1.0}))
            takes = {"cores": machine.compute_cores / machine.flops}
            self._busy(Activity(flops, machine.flops, takes, weight=machine.compute_cores))
            return
        self.rooms.clock.sleep(machine.visit_s)
        self._queued.append(gpu.compute.run(Activity(flops, machine.flops, {"device": 1 / machine.flops})))
        while len(self._queued) > _RUN_AHEAD:
            self._queued.popleft().wait()

    def _busy(self, activity: Activity) -> None:
        future = Future(self.rooms.clock)
        self.rooms.fluid.start(activity, future.complete)
        future.wait()

    def _land(self, unit: OffloadedUnit, passed: int) -> None:
        """Simulate Coordinator.land_gradient, parameter by parameter.

        `passed` is the number of micro-batches that were computed before this micro-batch.
        """
        complete, more = False, passed + 1 < self._micro_batches
        unit.apply_update()
        for index, group in unit.gradients.groups.items():
            for spec in unit.full.groups[index].specs:
                with self.rooms.timeline.stall("gradient"):
                    group.land(spec, self._gradient, accumulate=passed > 0, more=more)
                complete = not more and unit.gradients.arrivals.came(spec.name)
        if complete:
            unit.gradients.send()
            self.rooms.speculative_updates.gradients_complete(unit, self._optimizer, self._steps + 1)

    # -- the step -----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Simulate Coordinator.begin_step, update and end_step."""
        rooms = self.rooms
        with rooms.timeline.stall("gradient"):
            rooms.resources.idle.begins()
            rooms.gradients.synchronize()
        rooms.pump.finish_updates()
        rooms.pump.make_way()
        rooms.fetcher.hold(())
        rooms.fetcher.finish_fetches()
        rooms.resources.synchronize_uploads()
        for unit in rooms.units:
            for group in unit.gradients.groups.values():
                if isinstance(group, ResidentGradients):
                    group.sums.compute()
        requests = self._optimizer.requests(self._scale)
        wrong = rooms.speculative_updates.wrong(requests)
        rooms.fetcher.end_iteration()
        begun = rooms.update_queue.decide(requests, rooms.fetcher.order(), self._steps + 1, committed=False)
        rooms.speculative_updates.step_decided(begun, wrong, requests, self._optimizer)
        for unit in begun:
            rooms.fetcher.update_decided(unit)
        rooms.passes.step_ended()
        rooms.fetcher.begin_pass(training=True)
        self._steps += 1
        if rooms.speculation_choice.mode == "off":
            rooms.pump.finish_updates()
        rooms.fetcher.prefetch()
        rooms.resources.idle.ends()

    def _zero_grad(self) -> None:
        for unit in self.rooms.units:
            for group in unit.gradients.groups.values():
                group.forget()
