"""Training steps: what hooks and the coordinator do with the rooms, in their order."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from infinity.plan.plan import Plan
from infinity.units.unit import OffloadedUnit
from simulation.clock import Future
from simulation.fluid import Activity
from simulation.gpu import RING, RUN_AHEAD, Gpu
from simulation.machine import Machine
from simulation.memory import Pool
from simulation.rooms import Optimizer, Rooms
from simulation.shapes import Task

_CLIPPING = 0.5  # anything but 1: what a step that clips multiplies gradients by
_LANDING_BYTES = {True: 2, False: 6}  # of DRAM per parameter: a GPU's copy is there and read; a CPU's is made as well


@dataclass(frozen=True)
class Figures:
    """What steps took so far, or one step took.

    Attributes:
        used: of each resource, by name: core seconds, bytes, seconds of the device and of the disks.
        stalled: seconds for which the host waited, by cause. waited: for which a GPU did.
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
        """Of one step, on average, since earlier figures were taken."""

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
    """Args: clipped: every step clips its gradients."""

    def __init__(self, machine: Machine, task: Task, plan: Plan, *, clipped: bool) -> None:
        self.rooms = Rooms(machine, plan, list(task.units))
        self._machine, self._task = machine, task
        self._scale = _CLIPPING if clipped else 1.0
        self._optimizer = Optimizer(list(task.units))
        self._steps = 0
        self._in_step = 0.0
        self._ring = Pool(RING)
        self._window = Window(self.rooms, plan.budgets.landing_bytes)
        self._landing: list[Future] = []
        self._queued: deque[Future] = deque()
        self._order = [unit for unit in self.rooms.units if not unit.unit.stays]
        self._staying = [unit for unit in self.rooms.units if unit.unit.stays]
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

    # -- forward and backward -----------------------------------------------------------------------------------------

    def _forward(self) -> None:
        rooms = self.rooms
        rooms.progress.carry_on()
        rooms.room.begin_pass(training=True)
        for unit in self._staying:
            self._acquire(unit)
        for unit in self._order:
            self._acquire(unit)
            self._compute(unit, self._task.forward[unit.index])
            unit.weights.unuse()
        for unit in self._staying:
            unit.weights.unuse()

    def _acquire(self, unit: OffloadedUnit) -> None:
        unit.weights.use()
        self.rooms.progress.carry_on()
        self.rooms.room.bring(unit)

    def _backward(self) -> None:
        head, *others = reversed(self._order)
        for number, unit in enumerate([head, *self._staying, *others]):
            self._hold(unit)
            ring = self._ring.take(Future(self.rooms.clock)) if self.rooms.gpu is not None else None
            done = self._compute(unit, self._task.backward[unit.index], ring)
            if number == 0:
                self._begin_backward()
            if self.rooms.gpu is None:
                self._land(unit)
            else:
                self._land_from(self.rooms.gpu, unit, done)
        if self.rooms.gpu is None:
            self.rooms.passes.end()
        self.rooms.room.hold(())

    def _hold(self, unit: OffloadedUnit) -> None:
        rooms = self.rooms
        rooms.progress.carry_on()
        rooms.room.hold([unit.index])
        rooms.room.bring(unit)

    def _begin_backward(self) -> None:
        rooms = self.rooms
        rooms.passes.begin()
        rooms.progress.carry_on()
        rooms.speculator.backward_begins(rooms.room.order, self._optimizer, self._steps + 1)

    def _compute(self, unit: OffloadedUnit, flops: float, ring: Future | None = None) -> Future:
        """On the CPU it is done when this returns; a GPU has it in its queue."""
        machine, gpu = self._machine, self.rooms.gpu
        if gpu is None:
            self._busy(Activity(machine.visit_s, 1.0, {"cores": 1.0}))
            takes = {"cores": machine.compute_cores / machine.flops}
            return self._busy(Activity(flops, machine.flops, takes, weight=machine.compute_cores))
        self.rooms.clock.sleep(machine.visit_s)
        slot: object = unit.weights.slot
        after = [("weights", slot.ready)]  # type: ignore[attr-defined]
        if ring is not None:
            after.append(("the ring", ring))
        done = gpu.compute.run(Activity(flops, machine.flops, {"device": 1 / machine.flops}), after)
        slot.last_use = done  # type: ignore[attr-defined]
        self._queued.append(done)
        while len(self._queued) > RUN_AHEAD:
            self._queued.popleft().wait()
        return done

    def _busy(self, activity: Activity) -> Future:
        future = Future(self.rooms.clock)
        self.rooms.fluid.start(activity, future.complete)
        future.wait()
        return future

    # -- gradients ----------------------------------------------------------------------------------------------------

    def _land(self, unit: OffloadedUnit) -> None:
        if not unit.gradients.in_ram:
            self._window.lease(unit).wait()
        self._busy(self._landing_of(unit))
        self._landed(unit)

    def _land_from(self, gpu: Gpu, unit: OffloadedUnit, computed: Future) -> None:
        """One copy down, then the sum of its squares: a native thread does both, and tells."""
        landed = Future(self.rooms.clock)
        room = [] if unit.gradients.in_ram else [self._window.lease(unit)]
        copied = gpu.download(2.0 * unit.unit.numel, [computed, *room])
        copied.then(self._ring.give_back)
        copied.then(lambda: self.rooms.fluid.start(self._landing_of(unit), landed.complete))
        landed.then(lambda: self._landed(unit))
        self._landing.append(landed)

    def _landing_of(self, unit: OffloadedUnit) -> Activity:
        machine = self._machine
        takes = {"cores": machine.cores / machine.land, "dram": float(_LANDING_BYTES[machine.is_gpu])}
        return Activity(unit.unit.numel, machine.land, takes, weight=machine.cores)

    def _landed(self, unit: OffloadedUnit) -> None:
        if not unit.gradients.in_ram:
            self._window.leave(unit)
        names = [spec.name for group in unit.unit.trainable_groups for spec in group.specs]
        if [unit.gradients.arrivals.came(name) for name in names][-1]:
            self.rooms.speculator.complete(unit, self._optimizer, self._steps + 1)

    # -- the step -----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Coordinator.begin_step, update and end_step."""
        rooms = self.rooms
        with rooms.timeline.stall("gradient"):
            for landed in self._landing:
                landed.wait()
            self._window.clear()
        if rooms.gpu is not None:
            rooms.passes.end()  # the host was here long before the last gradient
        self._landing.clear()
        rooms.progress.finish_updates()
        rooms.room.hold(())
        rooms.room.finish_fetches()
        rooms.resources.device.synchronize_uploads()
        requests = self._optimizer.requests(self._scale)
        wrong = rooms.speculator.wrong(requests)
        rooms.room.end_iteration()
        begun = rooms.updates.decide(requests, rooms.room.order(), self._steps + 1, committed=False)
        rooms.speculator.step_decided(begun, wrong, requests, self._optimizer)
        for unit in begun:
            rooms.room.update_decided(unit)
        rooms.passes.step_ended()
        rooms.room.begin_pass(training=True)
        self._steps += 1
        if rooms.speculation.mode == "off":
            rooms.progress.finish_updates()
        rooms.room.prefetch()


class Window:
    """Where gradients land that do not stay in RAM, as tiers/window.py."""

    def __init__(self, rooms: Rooms, nbytes: int) -> None:
        self._rooms = rooms
        self._free = float(nbytes)
        self._waiting: deque[tuple[float, Future]] = deque()
        self._leaving: list[Future] = []

    def lease(self, unit: OffloadedUnit) -> Future:
        future = Future(self._rooms.clock)
        self._waiting.append((2.0 * unit.unit.numel, future))
        self._grant()
        return future

    def _grant(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            nbytes, future = self._waiting.popleft()
            self._free -= nbytes
            future.complete()

    def leave(self, unit: OffloadedUnit) -> None:
        nbytes = 2.0 * unit.unit.numel
        written = self._rooms.disk.write("states", nbytes)
        self._leaving.append(written)

        def gone() -> None:
            self._free += nbytes
            self._grant()

        written.then(gone)

    def clear(self) -> None:
        for each in self._leaving:
            each.wait()
        self._leaving.clear()
