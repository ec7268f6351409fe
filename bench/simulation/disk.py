"""Simulated disks: one server for all disks, with the priority classes of csrc/aio.

[Note: what a mix of reads and writes gets]
Reads and writes of the same disk take turns. A disk that reads 3.23 GB/s and writes 4.40 GB/s gave fio 3.78 GB/s for
half reads and half writes (bench/results/README.md), and a model in which they take turns gives 3.73 GB/s. `mixed` is
the share of this rate that a machine reaches.

Requests of a higher class are served before requests of lower classes; within a class, requests are served in their
order. A request that has begun is never interrupted, even by a more urgent request: the engine has up to 32 MiB in
flight, and requests in the simulation are about as large.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from simulation.clock import Clock, Future, when_all
from simulation.fluid import TRANSFER, Activity, Fluid
from simulation.machine import SimulatedMachine

CLASSES = ("weights", "activations", "states", "writeback")


class Disk:
    """Counterpart of _native.IOEngine. Attributes: read_bytes, written_bytes: total bytes read and written so far."""

    def __init__(self, clock: Clock, fluid: Fluid, machine: SimulatedMachine) -> None:
        self.clock = clock
        self._fluid = fluid
        self._machine = machine
        self._queues: dict[str, deque[tuple[bool, float, Future]]] = {name: deque() for name in CLASSES}
        self._queued = {True: 0, False: 0}  # number of requests; the key is whether they are reads
        self._busy = False
        self.read_bytes = 0.0
        self.written_bytes = 0.0

    def read(
        self, file: object, offset: int, into: memoryview, io_class: str, *, verify: bool, after: Future | None
    ) -> Future:
        return self.transfer(io_class, into.nbytes, () if after is None else (after,), reads=True)

    def write(
        self, file: object, offset: int, data: memoryview, io_class: str, *, after: Future | None = None
    ) -> Future:
        return self.transfer(io_class, data.nbytes, () if after is None else (after,), reads=False)

    def register_memory(self, memory: memoryview) -> str:
        return ""

    def transfer(self, io_class: str, nbytes: float, after: Sequence[Future] = (), *, reads: bool) -> Future:
        future = Future(self.clock)
        if reads:
            self.read_bytes += nbytes
        else:
            self.written_bytes += nbytes

        def enqueue() -> None:
            self._queues[io_class].append((reads, nbytes, future))
            self._queued[reads] += 1
            self._next()

        when_all(after, enqueue)
        return future

    def _next(self) -> None:
        if self._busy:
            return
        queue = next((queue for queue in self._queues.values() if queue), None)
        if queue is None:
            return
        reads, nbytes, future = queue.popleft()
        self._queued[reads] -= 1
        self._busy = True
        rate = self._machine.disk_read if reads else self._machine.disk_write
        if self._queued[not reads]:
            rate *= self._machine.disk_mixed
        takes = {"disk": 1 / rate, "dram": 1.0, "cores": self._machine.disk_core_s_per_byte}
        self._fluid.start(Activity(nbytes, rate, takes, TRANSFER), lambda: self._ended(future))

    def _ended(self, future: Future) -> None:
        self.clock.after(self._machine.disk_latency_s, future.complete)
        self._busy = False
        self._next()
