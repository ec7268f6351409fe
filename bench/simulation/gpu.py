"""A simulated GPU: streams in order, and copies that take time.

It is an Accelerator of infinity; the slab and queues of infinity/tiers run on it unchanged. Its memory is a range of
addresses that nothing ever touches.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from infinity import _native
from infinity.base.accelerator import DeviceFunctionTable
from simulation.clock import Clock, Future, when_all
from simulation.fluid import TRANSFER, Activity, Fluid
from simulation.machine import SimulatedMachine

_UPLOADED, _DOWNLOADED, _COMPUTED = "weights", "the ring", "other streams"


class Event:
    """An event: a position in a stream.

    Attributes:
        reached: future that is done when the stream reaches the position.
        cause: kind of the work before the event.
    """

    def __init__(self, reached: Future, cause: str) -> None:
        self.reached = reached
        self.cause = cause


class Line:
    """A stream: each piece of work begins when the previous piece has ended and the events for which it waits are
    reached.

    Attributes:
        waited: idle seconds of the stream, by the cause of its last wait.
        cause: cause that is recorded in the events of this stream.
    """

    def __init__(self, clock: Clock, fluid: Fluid, cause: str) -> None:
        self._clock, self._fluid = clock, fluid
        self._last = Future(clock)
        self._last.complete()
        self._waits: list[tuple[str, Future]] = []
        self._idle_since = 0.0
        self.cause = cause
        self.waited: dict[str, float] = {}

    def wait(self, event: Event) -> None:
        self._waits.append((event.cause, event.reached))

    def record(self, event: Event | None = None) -> Event:
        """Record an event and return it. Args: event: an event to record again; None: a new one."""
        reached = Future(self._clock)
        when_all([self._last, *(future for _, future in self._waits)], reached.complete)
        if event is None:
            return Event(reached, self.cause)
        event.reached, event.cause = reached, self.cause
        return event

    def run(self, activity: Activity) -> Future:
        ended = Future(self._clock)
        came = {"the host": self._clock.now}
        after, self._waits = self._waits, []

        def arrived(name: str) -> None:
            came[name] = self._clock.now

        for name, future in after:
            if not future.done():
                future.then(partial(arrived, name))

        def begin() -> None:
            cause = max(came, key=lambda name: came[name])
            idle = self._clock.now - self._idle_since
            if idle > 0:
                self.waited[cause] = self.waited.get(cause, 0.0) + idle
            self._fluid.start(activity, end)

        def end() -> None:
            self._idle_since = self._clock.now
            ended.complete()

        before, self._last = self._last, ended
        when_all([before, *(future for _, future in after)], begin)
        return ended


class Gpu:
    """Counterpart of base.accelerator.Accelerator. Attributes: compute: the stream that models compute on."""

    device = torch.device("cuda", 0)
    numa_node = -1
    pins_resident = False
    nice = 0

    def __init__(self, clock: Clock, fluid: Fluid, machine: SimulatedMachine) -> None:
        self._clock, self._fluid, self.machine = clock, fluid, machine
        self.compute = Line(clock, fluid, _COMPUTED)
        self._memory = range(0)

    def stream(self) -> Line:
        return Line(self._clock, self._fluid, _COMPUTED)

    def current(self) -> Line:
        return self.compute

    def on(self, stream: Line) -> AbstractContextManager[None]:
        return nullcontext()

    def record(self, on: Line, *, timed: bool = False) -> Event:
        return on.record()

    def event(self) -> Event:
        return Event(Future(self._clock), _UPLOADED)

    def wait(self, on: Line, event: Event) -> None:
        on.wait(event)

    def reached(self, event: Event) -> bool:
        return event.reached.done()

    def synchronize(self, event: Event) -> None:
        event.reached.wait()

    def synchronize_all(self) -> None:
        self.synchronize(self.record(self.compute))

    def seconds(self, began: Event, ended: Event) -> float:
        return ended.reached.at - began.reached.at

    def slab(self, nbytes: int) -> torch.Tensor:
        arena = _native.Arena(nbytes)
        self._memory = range(arena.address, arena.address + nbytes)
        return torch.frombuffer(arena.view(0, nbytes), dtype=torch.uint8)

    def copy(self, into: torch.Tensor, source: torch.Tensor, *, on: Line, after: Sequence[Event] = ()) -> Event:
        for event in after:
            on.wait(event)
        self.transfer(into.nbytes, on, up=into.data_ptr() in self._memory)
        return on.record()

    def transfer(self, nbytes: int, on: Line, *, up: bool) -> None:
        """Run a copy of `nbytes` on a stream."""
        on.cause = _UPLOADED if up else _DOWNLOADED
        name, rate = ("up", self.machine.up) if up else ("down", self.machine.down)
        on.run(Activity(nbytes, rate, {name: 1.0, "link": 1.0, "dram": 1.0}, TRANSFER))

    def pin(self, address: int, nbytes: int) -> str:
        return ""

    def unpin(self, address: int) -> None:
        return

    def handle(self, of: object) -> object:
        """Return the object itself, which the simulated native code accepts."""
        return of

    def gate(self) -> DeviceFunctionTable:
        return DeviceFunctionTable(0, 0, 0, 0, 0, keep=self)
