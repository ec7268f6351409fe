"""Time of a step on a machine with a device, from the order in which its units use the resources of the machine.

[Note: the flow of a step]
Each resource works on one thing at a time, in order: the device, the links to and from the device, the processor, and
the disks. In the forward, a unit is fetched after its update, as far ahead as the slots reach, and computed. In the
backward, units come in reverse order, and the gradients of a unit go down to host memory, where they land. A
speculative update begins then. All other updates begin when the step is decided, in the order of the next forward, and
the device updates the resident units before the next forward. If memory is busier than the processor, landing and
updates take as long as memory needs. Three steps are walked through, and the last one counts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

_STEPS = 3


@dataclass(frozen=True)
class UnitSeconds:
    """Seconds for which one unit occupies each resource in one step.

    Attributes:
        forward_s, backward_s: forward and backward, on the device.
        on_device: the update on the device in front of the forward; 0 if the unit is not resident.
        beside: the update on the device beside computing, with weights and gradients from RAM; 0 if there is none.
        fetch_forward, fetch_backward: the link to the device, for the fetch before the forward and the backward.
        read_forward, read_backward: the disks, for these fetches.
        down: the link from the device.
        land: the processor, for gradients that land.
        spill: the disks, for gradients that are written.
        update: the processor, for the update; 0 if nothing of the unit is updated there.
        read, write: the disks, for the update.
        slot_bytes: bytes of the unit's slot; 0 if it needs none.
        ring_bytes: bytes of the ring for the unit's gradients.
        speculates: whether the update begins before the step is decided.
    """

    forward_s: float
    backward_s: float
    on_device: float
    beside: float
    fetch_forward: float
    fetch_backward: float
    read_forward: float
    read_backward: float
    down: float
    land: float
    spill: float
    update: float
    read: float
    write: float
    slot_bytes: int
    ring_bytes: int
    speculates: bool


class _Resource:
    """A resource. Attributes: free: the time from which the resource has no work."""

    def __init__(self) -> None:
        self.free = 0.0

    def run(self, seconds: float, ready: float) -> float:
        """Work for some seconds, not before the time `ready`. Return the time of the end."""
        self.free = max(self.free, ready) + seconds
        return self.free


class _Uses:
    """Uses of a memory, each by some bytes until some time, in the order in which they begin."""

    def __init__(self) -> None:
        self._ends: list[float] = []
        self._before = [0]  # bytes of all uses before each use, and those of all uses

    def add(self, end: float, nbytes: int) -> None:
        self._ends.append(end)
        self._before.append(self._before[-1] + nbytes)

    def room_at(self, room: int) -> float:
        """Return the time from which the last uses leave room, if they may take `room` bytes."""
        last = bisect_left(self._before, self._before[-1] - room, hi=len(self._ends)) - 1
        return self._ends[last] if last >= 0 else 0.0


class StepFlow:
    """The walk through steps.

    Args:
        units: the units, in the order of the forward.
        slot_bytes: bytes of all slots together.
        ring_bytes: bytes of the ring.
        norm: seconds for the sums of squares of gradients on the device.
    """

    def __init__(self, units: Sequence[UnitSeconds], slot_bytes: int, ring_bytes: int, norm: float) -> None:
        self._units, self._slot_bytes, self._ring_bytes, self._norm = units, slot_bytes, ring_bytes, norm
        self._device, self._up, self._down = _Resource(), _Resource(), _Resource()
        self._processor, self._disks, self._beside = _Resource(), _Resource(), _Resource()
        self._updated = [0.0] * len(units)
        self._computed = _Uses()  # of the slots
        self._update_begins = [0.0, 0.0]
        self._unwritten = (0.0, 0.0)  # seconds of the last update's write, and the time from which it may begin

    def seconds(self) -> float:
        """Return the seconds of a step once the run is under way."""
        decided = [self._step(0.0)]
        while len(decided) < _STEPS:
            decided.append(self._step(decided[-1]))
        return decided[-1] - decided[-2]

    def _step(self, begins: float) -> float:
        """Walk through a step. Return the time at which the step is decided."""
        fetched = self._fetch_ready(begins)
        self._device.run(sum(unit.on_device for unit in self._units), begins)
        for index, unit in enumerate(self._units):
            if not unit.speculates:
                self._update(index, begins)
            if index not in fetched:
                fetched[index] = self._fetch(
                    unit.read_forward, unit.fetch_forward, unit, max(self._updated[index], begins)
                )
            self._compute(unit, unit.forward_s, max(fetched[index], begins))
        landed, sent = begins, _Uses()
        for index, unit in reversed(list(enumerate(self._units))):
            there = self._fetch(unit.read_backward, unit.fetch_backward, unit, begins)
            there = max(there, sent.room_at(self._ring_bytes - unit.ring_bytes))
            end = self._compute(unit, unit.backward_s, there)
            if unit.down:
                copied = self._down.run(unit.down, end)
                sent.add(copied, unit.ring_bytes)
                end = copied + unit.land
                self._processor.run(unit.land, copied)  # landing does not wait for updates, but delays them
                if unit.spill:
                    self._disks.run(unit.spill, end)
            landed = max(landed, end)
            if unit.speculates:
                self._update(index, end)
        return max(landed, self._device.run(self._norm, landed))

    def _fetch_ready(self, begins: float) -> dict[int, float]:
        """Fetch the units that fit the slots and whose updates have begun before the step was decided.

        Units whose updates have ended are fetched first.
        """
        room, there = self._slot_bytes, list[int]()
        for index, unit in enumerate(self._units):
            room -= unit.slot_bytes
            if room < 0:
                break
            if unit.speculates:
                there.append(index)
        fetched = {}
        for index in sorted(there, key=lambda each: max(self._updated[each], begins)):
            unit, ready = self._units[index], max(self._updated[index], begins)
            fetched[index] = self._fetch(unit.read_forward, unit.fetch_forward, unit, ready)
        return fetched

    def _fetch(self, read: float, up: float, unit: UnitSeconds, ready: float) -> float:
        """Fetch a unit as soon as earlier uses of slots have made room. Return the time of the end."""
        if not up:
            return ready
        ready = max(ready, self._computed.room_at(self._slot_bytes - unit.slot_bytes))
        return self._up.run(up, self._disks.run(read, ready) if read else ready)

    def _compute(self, unit: UnitSeconds, seconds: float, ready: float) -> float:
        end = self._device.run(seconds, ready)
        self._computed.add(end, unit.slot_bytes)
        return end

    def _update(self, index: int, ready: float) -> None:
        """Update a unit on the processor; its states are read while the unit before is updated."""
        unit = self._units[index]
        if not unit.update:
            self._updated[index] = self._beside.run(unit.beside, ready) if unit.beside else ready
            return
        read = self._disks.run(unit.read, self._update_begins[-2]) if unit.read else ready
        end = self._processor.run(unit.update, max(ready, read))
        self._update_begins.append(end - unit.update)
        self._updated[index] = end
        if self._unwritten[0]:
            self._disks.run(*self._unwritten)  # the disks read the next states before they write the last ones
        self._unwritten = (unit.write, end)
