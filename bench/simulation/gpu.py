"""A GPU: streams in order, one slab of slots, landing room for what comes from the disk.

[Note: the rules of a GPU that are simulated]
One slab holds the slots. An upload waits for the last use of the memory it goes to, and for nothing else that computes.
What is read from the disk lands in pieces of 64 MiB, at least four of them, apart from the slots; each goes up when it
is there, without Python, so that a fetch or a prefetch never has its caller wait. Gradients go down one copy per unit,
from a ring of two. The update of weights in the store copies them down from their slot; the slot stays until then.

[Note: an upload enters its stream when its slot is free]
Were an upload put into the stream at once, to wait there for its slot's last use, steps would stop for ever where some
weights are in RAM and others come from the disk. The host runs ahead: it gives the slot of unit 3, whose work is queued
and waits for unit 2, to unit 5, whose weights are in RAM. Then the pieces of unit 2 come from the disk, and stand in
the stream behind unit 5's upload, which waits for unit 3, which waits for unit 2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from infinity.tiers.home import WeightsHome
from infinity.tiers.slots import Fetch
from infinity.units.room import Room
from infinity.units.unit import OffloadedUnit
from infinity.units.weights import Residency, Weights
from simulation.clock import Clock, Future, when_all
from simulation.disk import Disk
from simulation.fluid import TRANSFER, Activity, Fluid
from simulation.machine import Machine
from simulation.memory import Lease, Pool

PIECE_BYTES = 64 << 20
PIECES_MIN = 4
RING = 2
"""Units' gradients on the device: one is computed while another goes down."""
RUN_AHEAD = 8
"""Visits of units that the host is ahead of the GPU at most: a queue of some 1,000 launches, about 100 to a block."""


class Line:
    """Work in order: each piece begins when the one before has ended, and what it waits for.

    Attributes: waited: seconds that the line stood still, by what it waited for last.
    """

    def __init__(self, clock: Clock, fluid: Fluid) -> None:
        self._clock, self._fluid = clock, fluid
        self._last: Future | None = None
        self._idle_since = 0.0
        self.waited: dict[str, float] = {}

    def run(self, activity: Activity, after: Sequence[tuple[str, Future]] = ()) -> Future:
        """Args: after: what it waits for, by name."""
        ended = Future(self._clock)
        came = {"the host": self._clock.now}
        for name, future in after:
            future.then(lambda name=name: came.update({name: max(came.get(name, 0.0), self._clock.now)}))

        def begin() -> None:
            cause = max(came, key=lambda name: came[name])
            idle = self._clock.now - self._idle_since
            if idle > 0:
                self.waited[cause] = self.waited.get(cause, 0.0) + idle
            self._fluid.start(activity, end)

        def end() -> None:
            self._idle_since = self._clock.now
            ended.complete()

        before = [] if self._last is None else [self._last]
        self._last = ended
        when_all([*before, *(future for _, future in after)], begin)
        return ended

    def synchronize(self) -> None:
        if self._last is not None:
            self._last.wait()


class Gpu:
    """As tiers.accelerator.CudaDevice."""

    shares_memory = False
    device = "cuda"

    def __init__(self, clock: Clock, fluid: Fluid, machine: Machine) -> None:
        self._clock, self._machine = clock, machine
        self.compute, self.up, self.down = (Line(clock, fluid) for _ in range(3))

    def upload(self, nbytes: float, after: Sequence[Future]) -> Future:
        """Args: after: the last uses of where it goes ([Note: an upload enters its stream when its slot is free])."""
        takes = {"up": 1.0, "link": 1.0, "dram": 1.0}
        there = Future(self._clock)

        def go_up() -> None:
            self.up.run(Activity(nbytes, self._machine.up, takes, TRANSFER)).then(there.complete)

        when_all(after, go_up)
        return there

    def download(self, nbytes: float, after: Sequence[Future]) -> Future:
        takes = {"down": 1.0, "link": 1.0, "dram": 1.0}
        return self.down.run(Activity(nbytes, self._machine.down, takes, TRANSFER), [("", each) for each in after])

    def synchronize_uploads(self) -> None:
        self.up.synchronize()

    def idle_begins(self) -> None:
        return

    def idle_ends(self) -> None:
        return


class GpuSlot:
    """As tiers.accelerator.Slot. Attributes: ready: the weights are there. last_use: who frees it waits for that."""

    def __init__(self, nbytes: int, ready: Future) -> None:
        self.lease = Lease(None, nbytes, "device")
        self.tensor = self.lease.tensor()
        self.nbytes = nbytes
        self.ready = ready
        self.last_use = ready

    def wait(self) -> None:
        return

    def outstanding(self) -> bool:
        return False

    def expect(self, views: int) -> None:
        return


class _Going(Fetch):
    def __init__(self, slot: Any) -> None:
        super().__init__()
        self._slot = slot

    def finish(self) -> Any:
        return self._slot


class GpuSlots:
    """The slab, as tiers.slots.SlotPool ([Note: the rules of a GPU that are simulated])."""

    def __init__(self, clock: Clock, gpu: Gpu, disk: Disk, slot_bytes: int, landing_bytes: int) -> None:
        self._clock, self._gpu, self._disk = clock, gpu, disk
        self._free_bytes = slot_bytes
        self._freed: deque[tuple[int, Future | None]] = deque([(slot_bytes, None)])  # memory, and its last use
        self._landing = Pool(max(landing_bytes // PIECE_BYTES, PIECES_MIN))

    def counts(self, home: WeightsHome) -> bool:
        return True

    def start(self, home: WeightsHome, after: Any) -> Fetch | None:
        if home.nbytes > self._free_bytes:
            return None
        uses = self._take(home.nbytes)
        if home.lease is not None:
            return _Going(GpuSlot(home.nbytes, self._gpu.upload(home.nbytes, uses)))
        written: list[Any] = [transfer.future for _, transfer in after.values()]
        ready = Future(self._clock)
        pieces = -(-home.nbytes // PIECE_BYTES)
        sizes = [PIECE_BYTES] * (pieces - 1) + [home.nbytes - PIECE_BYTES * (pieces - 1)]
        ups = [self._piece(nbytes, written, uses) for nbytes in sizes]
        when_all(ups, ready.complete)
        return _Going(GpuSlot(home.nbytes, ready))

    def _piece(self, nbytes: int, written: Sequence[Future], uses: Sequence[Future]) -> Future:
        """disk → landing room → slot."""
        there = Future(self._clock)

        def read() -> None:
            self._disk.read("weights", nbytes, written).then(go_up)

        def go_up() -> None:
            self._gpu.upload(nbytes, uses).then(land)

        def land() -> None:
            self._landing.give_back()
            there.complete()

        self._landing.take(Future(self._clock)).then(read)
        return there

    def _take(self, nbytes: int) -> list[Future]:
        """Memory that was freed longest ago: what used it last."""
        self._free_bytes -= nbytes
        uses = []
        while nbytes:
            size, use = self._freed.popleft()
            if use is not None:
                uses.append(use)
            if size > nbytes:
                self._freed.appendleft((size - nbytes, use))
            nbytes -= min(size, nbytes)
        return uses

    def free(self, slot: Any) -> None:
        self._free_bytes += slot.nbytes
        self._freed.append((slot.nbytes, slot.last_use))


class GpuWeights(Weights):
    """An update finds the weights in their slot: it copies them down."""

    def host_memory(self) -> Any:
        slot: Any = self.slot
        return None if slot is None or self.residency is Residency.STALE else slot.lease


class GpuUnit(OffloadedUnit):
    def writes_from_slot(self) -> bool:
        """New weights are written from the staging."""
        return False


class GpuRoom(Room):
    """Old weights leave when they are read; Python comes by to see it."""

    def update_decided(self, unit: OffloadedUnit) -> None:
        unit.weights.bump()
        update = unit.decided
        if update is None or unit.weights.residency is not Residency.RESIDENT:
            return
        if unit.homes.weights.lease is None and update.place.slot is not None and not update.reached("computed"):
            unit.weights.begin_update(writes_slot=False)
        else:
            self._evict(unit)

    def prefetch(self) -> None:
        for unit in list(self._present.values()):
            stale = unit.weights.residency is Residency.STALE
            if stale and unit.update is not None and unit.update.reached("computed"):
                unit.apply_update()
                self._vacate(unit)
        super().prefetch()
