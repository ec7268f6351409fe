"""Simulated counterparts of infinity's C++ parts: csrc/device, csrc/base/thread_pool, and the types of their callers.

In infinity, C++ chooses the order of pieces. This module therefore follows the driver of csrc/device/upload_driver.cpp
and the thread of csrc/device/landings.cpp, as pipeline.py follows csrc/update/driver.cpp. Nothing fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from infinity import _native
from infinity.state.unit import ParameterSpec
from infinity.tiers.downloads import GradientBatch, GradientQueue
from simulation import resident
from simulation.clock import Clock, Future
from simulation.disk import Disk
from simulation.fluid import Activity, Fluid
from simulation.gpu import Event, Gpu, Line
from simulation.machine import SimulatedMachine

_ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# DRAM bytes per parameter: a GPU's copy exists and is only read; a CPU's copy is made, too
_LANDING_BYTES = {True: 2, False: 6}


@dataclass(frozen=True)
class Stream:
    """Counterpart of _native.StateStream."""

    memory: Any = None
    file: str | None = None
    offset: int = 0
    write_offset: int = 0
    source: Any = None

    @property
    def read_from_file(self) -> bool:
        return self.source is None and self.memory is None


class Pool:
    """Counterpart of _native.ThreadPool, for the work of landing gradients."""

    def __init__(self, clock: Clock, fluid: Fluid, machine: SimulatedMachine) -> None:
        self.clock = clock
        self._fluid, self._machine = fluid, machine

    def land(self, numel: int, done: Callable[[], None]) -> None:
        machine = self._machine
        takes = {"cores": machine.cores / machine.land, "dram": float(_LANDING_BYTES[machine.is_gpu])}
        self._fluid.start(Activity(numel, machine.land, takes, weight=machine.cores), done)


def land_gradient(
    dst: memoryview, dtype: str, src: object, src_dtype: str, *, add: bool, pool: Pool, **_: object
) -> list[float]:
    future = Future(pool.clock)
    pool.land(dst.nbytes // _ITEM_BYTES[dtype], future.complete)
    future.wait()
    return [0.0]


# -- gradients from a device -------------------------------------------------------------------------------------------


class LandingPiece:
    """Counterpart of _native.LandingPiece."""

    def __init__(self, target: memoryview, dtype: str, **_: object) -> None:
        self.numel = target.nbytes // _ITEM_BYTES[dtype]


class LandingFuture(Future):
    def __init__(self, clock: Clock, pieces: int) -> None:
        super().__init__(clock)
        self.sums = [[0.0]] * pieces


class Landings:
    """A thread that waits for a copy, lands it, and continues with the next copy."""

    def __init__(self, gate: Gpu, pool: Pool) -> None:
        self._pool = pool
        self._last = Future(pool.clock)
        self._last.complete()

    def land(self, event: Event, pieces: Sequence[LandingPiece]) -> LandingFuture:
        future = LandingFuture(self._pool.clock, len(pieces))
        numel, reached = sum(piece.numel for piece in pieces), event.reached
        before, self._last = self._last, future
        before.then(lambda: reached.then(lambda: self._pool.land(numel, future.complete)))
        return future


def pack(queue: GradientQueue, packed: GradientBatch, spec: ParameterSpec, gradient: object, *, add: bool) -> None:
    """Counterpart of GradientQueue.pack without a copy: device memory is many times faster than a link."""
    if spec not in packed.specs:
        packed.specs.append(spec)
    packed.uses.begin()


# -- weights to a device -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UploadPart:
    """Counterpart of _native.UploadPart."""

    file: object
    offset: int
    nbytes: int
    address: int
    after: Future | None = None


class _Job:
    def __init__(self, clock: Clock, parts: Sequence[UploadPart], piece_bytes: int) -> None:
        self.future = Future(clock)
        self.pieces = deque(
            (min(piece_bytes, part.nbytes - begin), part.after)
            for part in parts
            for begin in range(0, part.nbytes, piece_bytes)
        )
        self.copied = False


class _Piece:
    def __init__(self, job: _Job, nbytes: int, *, last: bool) -> None:
        self.job, self.nbytes, self.last = job, nbytes, last
        self.read = False


class Uploads:
    """Counterpart of the upload driver; its methods have the same names."""

    def __init__(self, engine: Disk, gate: Gpu, bounce: memoryview, piece_bytes: int, events: Sequence[Event]) -> None:
        self._disk, self._gpu, self._clock = engine, gate, engine.clock
        self._piece_bytes = piece_bytes
        self._free = len(events)
        self._jobs: deque[_Job] = deque()  # jobs that have pieces to read
        self._under_way: deque[_Piece] = deque()
        self._copied: deque[Event] = deque()
        self._given: dict[int, tuple[Line, Sequence[Event], Event]] = {}
        self._sleeps = False

    def upload(self, parts: Sequence[UploadPart], *, stream: Line, waits: Sequence[Event], ready: Event) -> Future:
        job = _Job(self._clock, parts, self._piece_bytes)
        self._given[id(job)] = stream, list(waits), ready
        self._jobs.append(job)
        for part in parts:
            if part.after is not None:
                part.after.then(self._run)
        self._run()
        return job.future

    def _run(self) -> None:
        while not self._sleeps and (self._copy_next() or self._read_next() or self._reuse_oldest()):
            pass

    def _copy_next(self) -> bool:
        if not self._under_way or not self._under_way[0].read:
            return False
        piece = self._under_way.popleft()
        stream, waits, ready = self._given[id(piece.job)]
        if not piece.job.copied:
            for event in waits:
                stream.wait(event)
        piece.job.copied = True
        self._gpu.transfer(piece.nbytes, stream, up=True)
        self._copied.append(stream.record())
        if piece.last:
            stream.record(ready)
            del self._given[id(piece.job)]
            piece.job.future.complete()
        return True

    def _may_read(self) -> bool:
        """Return whether the first job that has pieces to read may read its next piece."""
        after = self._jobs[0].pieces[0][1] if self._jobs else None
        return bool(self._jobs) and (after is None or after.done())

    def _read_next(self) -> bool:
        if not self._may_read() or not self._free:
            return False
        job = self._jobs[0]
        nbytes, _ = job.pieces.popleft()
        piece = _Piece(job, nbytes, last=not job.pieces)
        if piece.last:
            self._jobs.popleft()
        self._free -= 1
        self._under_way.append(piece)
        self._disk.transfer("weights", nbytes, reads=True).then(lambda: self._was_read(piece))
        return True

    def _was_read(self, piece: _Piece) -> None:
        piece.read = True
        self._run()

    def _reuse_oldest(self) -> bool:
        """Put the thread to sleep until the device has read the oldest piece; return whether it sleeps."""
        if not self._copied or self._free or not self._may_read():
            return False
        self._sleeps = True
        self._copied.popleft().reached.then(self._woken)
        return True

    def _woken(self) -> None:
        self._sleeps = False
        self._free += 1
        self._clock.after(0.0, self._run)


@contextmanager
def imitated() -> Iterator[None]:
    """Replace infinity's C++ parts by the simulated ones within the context."""
    with ExitStack() as patches:
        for name, own in _IMITATED.items():
            patches.enter_context(mock.patch.object(_native, name, own))
        patches.enter_context(mock.patch.object(GradientQueue, "pack", pack))
        resident.imitate(patches)
        yield


_IMITATED: dict[str, Any] = {
    "StateStream": Stream,
    "DeviceGate": lambda index, *, keep, **_: keep.keep,
    "LandingPiece": LandingPiece,
    "Landings": Landings,
    "UploadPart": UploadPart,
    "Uploads": Uploads,
    "land_gradient": land_gradient,
}
