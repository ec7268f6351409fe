"""The update's pipeline. This module follows csrc/update/driver.cpp, because infinity chooses the order of tiles in
C++.

The names are the same as in the driver. In the simulation only canceled updates fail, and every tile has work to do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from infinity import _native
from infinity.plan.budgets import UpdateStaging
from infinity.state.machine_rates import ADAM_BYTES
from simulation.clock import Clock, Future, when_all
from simulation.disk import Disk
from simulation.fluid import Activity, Fluid
from simulation.machine import SimulatedMachine
from simulation.native import Stream

STATES = ("weight", "residual", "exp_avg", "exp_avg_sq", "grad")
CANCELED = SimpleNamespace(
    kind="canceled", operation="update", path="", offset=0, nbytes=0, errno=0, cause="taken back"
)
"""Counterpart of _native.Failure."""


_NO_BUFFER = -1


class UpdateFuture(Future):
    """Counterpart of _native.UpdateFuture."""

    finite = True

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.computed = Future(clock)
        self.weights = Future(clock)

    def complete_all(self, failure: Any = None) -> None:
        for each in (self.computed, self.weights, self):
            each.complete(failure)


class Job:
    """An update. Attributes: phase: held, ahead, queued, begun, ending or done. Others: see csrc/update/job.hpp."""

    def __init__(self, clock: Clock, given: dict[str, Any], phase: str) -> None:
        self.numel: int = given["numel"]
        self.moments: str = given["moments"]
        self.streams: dict[str, Stream] = {name: given[name] for name in STATES if given.get(name) is not None}
        self.item = {name: self._item(name, given) for name in self.streams}
        self.future = UpdateFuture(clock)
        self.phase = phase
        self.unit: int | None = given.get("unit")
        self.next = self.next_ahead = 0
        self.tiles = self.uncomputed = self.weight_writes = 0
        self.ahead: deque[Tile] = deque()
        self.failure: Any = None

    def _item(self, name: str, given: dict[str, Any]) -> float:
        """Return the bytes per parameter."""
        if name in ("exp_avg", "exp_avg_sq"):
            return _native.moment_bytes(given["moments"], self.numel) / self.numel
        fp32 = given.get("grad_dtype" if name == "grad" else "weight_dtype", "bfloat16") in ("float32", "fp32")
        return 4.0 if fp32 and name != "residual" else 2.0

    @property
    def in_memory(self) -> bool:
        """Whether no part of the job is read from or written to a file."""
        return not self.ahead and all(stream.file is None for stream in self.streams.values())

    def written(self, name: str) -> bool:
        return name != "grad" and self.streams[name].file is not None


class Tile:
    def __init__(self, job: Job, numel: int, phase: str, buffer: int) -> None:
        self.job = job
        self.numel = numel
        self.phase = phase
        self.buffer = buffer
        self.there: set[str] = set()
        self.pending = 0


class Pipeline:
    """Simulated pipeline.

    Attributes:
        adam_s: seconds of computing.
        tiles_ahead_used: number of tiles that were read ahead and used.
    """

    def __init__(
        self, clock: Clock, fluid: Fluid, disk: Disk, machine: SimulatedMachine, staging: UpdateStaging
    ) -> None:
        self._clock, self._fluid, self._disk, self._machine = clock, fluid, disk, machine
        self._tile_numel = staging.tile_numel
        self._tile_bytes = staging.tile_bytes
        own = (staging.nbytes + staging.ahead_bytes) // staging.tile_bytes
        self._free = [0] * own  # free buffers, by the loan to which they belong; 0: buffers of the pipeline itself
        self._ahead_own = staging.ahead_tiles
        self._loans: dict[int, int] = {}  # number of buffers of each loan that has not ended
        self._ending: dict[int, tuple[int, Future]] = {}
        self._loan_of: dict[int, int] = {}
        self._held: dict[UpdateFuture, tuple[Job, UpdateFuture | None]] = {}
        self._jobs: deque[Job] = deque()
        self._in_memory: deque[Job] = deque()
        self._begun_units: list[int | None] = [None, None]  # last unit that was begun, for each of the two queues
        self._jobs_ahead: list[Job] = []
        self._reading: deque[Tile] = deque()
        self._tiles_ahead = 0
        self._computing = False
        self._planned = False
        self.adam_s = 0.0
        self.tiles_ahead_used = 0

    # -- what callers ask -----------------------------------------------------------------------------------------

    def submit(
        self,
        *,
        speculative: bool = False,
        ahead: UpdateFuture | None = None,
        after: Sequence[Future] = (),
        **given: Any,
    ) -> UpdateFuture:
        job = Job(self._clock, given, "held")
        self._held[job.future] = job, ahead
        when_all(after, lambda: self._arrived(job, speculative=speculative))
        return job.future

    def _arrived(self, job: Job, *, speculative: bool) -> None:
        if job.phase == "held":
            _, ahead = self._held.pop(job.future)
            job.phase = "queued"
            still_ahead = any(each.future is ahead for each in self._jobs_ahead)
            self._enter(job, speculative=speculative, ahead=ahead if still_ahead else None)

    def _enter(self, job: Job, *, speculative: bool, ahead: UpdateFuture | None) -> None:
        if ahead is not None:
            self._take_over(ahead, job)
        queue = self._in_memory if job.in_memory else self._jobs
        queue.insert(self._place_of_next(queue) if speculative else len(queue), job)
        self._pump_soon()

    def _place_of_next(self, queue: deque[Job]) -> int:
        unit = self._begun_units[queue is self._in_memory]
        behind = (at for at, job in enumerate(queue) if job.phase != "begun" and (unit is None or job.unit != unit))
        return next(behind, len(queue))

    def read_ahead(self, **given: Any) -> UpdateFuture:
        job = Job(self._clock, given, "ahead")
        self._jobs_ahead.append(job)
        self._pump_soon()
        return job.future

    def withdraw(self, lists: Sequence[Sequence[UpdateFuture]]) -> list[bool]:
        return [self._withdraw_all(futures) for futures in lists]

    def _withdraw_all(self, futures: Sequence[UpdateFuture]) -> bool:
        queued = [job for queue in (self._jobs_ahead, self._jobs, self._in_memory) for job in queue]
        untouched = {job.future for job in queued if job.phase in ("ahead", "queued")} | self._held.keys()
        if not untouched.issuperset(futures):
            return False
        for future in futures:
            self._withdraw(future)
        return True

    def _withdraw(self, future: UpdateFuture) -> bool:
        if future in self._held:
            job, ahead = self._held.pop(future)
            job.failure = CANCELED
            self._finish(job)
            if ahead is not None:
                self._withdraw(ahead)
            return True
        for queue in (self._jobs_ahead, self._jobs, self._in_memory):
            found = next((job for job in queue if job.future is future), None)
            if found is None:
                continue
            if found.phase not in ("ahead", "queued"):
                return False
            queue.remove(found)
            found.failure = CANCELED
            self._drop_ahead(found)
            self._finish(found)
            self._pump_soon()
            return True
        return False

    def cancel(self, future: UpdateFuture) -> None:
        if self._withdraw(future):
            return
        job = next((job for job in [*self._jobs, *self._in_memory] if job.future is future), None)
        if job is not None:
            job.failure = CANCELED
            self._pump_soon()

    @property
    def ahead_tiles_max(self) -> int:
        return self._ahead_own + sum(self._loans.values())

    def lend(self, memory: Any) -> None:
        buffers = memory.nbytes // self._tile_bytes
        loan = len(self._loan_of) + 1
        self._loan_of[loan] = memory.nbytes
        self._loans[loan] = buffers
        self._free += [loan] * buffers
        self._pump_soon()

    def reclaim(self, memory: Any) -> bool:
        loan = next(loan for loan in reversed(self._loans) if self._loan_of[loan] == memory.nbytes)
        buffers = self._loans.pop(loan)
        kept = [each for each in self._free if each != loan]
        in_use = buffers - (len(self._free) - len(kept))
        self._free = kept
        if in_use:
            future = Future(self._clock)
            self._ending[loan] = (in_use, future)
            future.wait()
        return True

    # -- what the driver does next --------------------------------------------------------------------------------

    def _pump_soon(self) -> None:
        if not self._planned:
            self._planned = True
            self._clock.after(0.0, self._pump)

    def _pump(self) -> None:
        self._planned = False
        while not self._computing and (self._start_next_tile() or self._read_next_ahead() or self._compute_next()):
            pass

    def _advance(self, queue: deque[Job]) -> int:
        """Start the first job's next tile and return its number of elements."""
        job = queue[0]
        self._begun_units[queue is self._in_memory] = job.unit
        numel = min(self._tile_numel, job.numel - job.next)
        job.next += numel
        job.phase = "begun"
        if job.next == job.numel:
            queue.popleft()
            job.phase = "ending"
        job.uncomputed += 1
        return numel

    def _start_next_tile(self) -> bool:
        if not self._jobs:
            return False
        job = self._jobs[0]
        if job.failure:
            self._jobs.popleft()
            self._give_up(job)
            return True
        if not job.ahead and not self._free:
            return False
        numel = self._advance(self._jobs)
        if job.ahead:
            tile = job.ahead.popleft()
            tile.phase = "reading"
            self._tiles_ahead -= 1
            self.tiles_ahead_used += 1
        else:
            tile = self._take_tile(job, numel, "reading")
        self._reading.append(tile)
        self._read(tile)
        return True

    def _read_next_ahead(self) -> bool:
        if self._jobs:
            return False
        for job in self._jobs_ahead:
            if job.next_ahead == job.numel or not self._free or self._tiles_ahead >= self.ahead_tiles_max:
                continue
            tile = self._take_tile(job, min(self._tile_numel, job.numel - job.next_ahead), "ahead")
            job.next_ahead += tile.numel
            job.ahead.append(tile)
            self._tiles_ahead += 1
            self._read(tile)
            return True
        return False

    def _compute_next(self) -> bool:
        if not self._reading or self._reading[0].pending:
            return self._compute_in_memory()
        tile = self._reading.popleft()
        if tile.job.failure:
            tile.job.uncomputed -= 1
            self._leave(tile)
        else:
            self._compute(tile)
        return True

    def _compute_in_memory(self) -> bool:
        if not self._in_memory:
            return False
        job = self._in_memory[0]
        if job.failure:
            self._in_memory.popleft()
            self._give_up(job)
            return True
        tile = self._take_tile(job, self._advance(self._in_memory), "reading", in_memory=True)
        tile.there.update(job.streams)
        self._compute(tile)
        return True

    # -- one tile -------------------------------------------------------------------------------------------------

    def _take_tile(self, job: Job, numel: int, phase: str, *, in_memory: bool = False) -> Tile:
        job.tiles += 1
        return Tile(job, numel, phase, _NO_BUFFER if in_memory else self._free.pop())

    def _read(self, tile: Tile) -> None:
        job = tile.job
        missing = [name for name in job.streams if name not in tile.there]
        tile.there.update(missing)
        from_file = sum(job.item[name] for name in missing if job.streams[name].read_from_file) * tile.numel
        if from_file:
            tile.pending += 1
            self._disk.transfer("states", from_file, reads=True).then(lambda: self._transferred(tile))

    def _compute(self, tile: Tile) -> None:
        job, machine = tile.job, self._machine
        tile.phase, self._computing = "computing", True
        moved = sum(job.item[name] * (job.streams[name].read_from_file + job.written(name)) for name in job.streams)
        seconds = tile.numel / machine.adam[job.moments] + tile.numel * moved / machine.checksums
        began = self._clock.now

        def computed() -> None:
            self._computing = False
            self.adam_s += self._clock.now - began
            self._computed(tile)

        # Fetched bytes are read from one place and written to another place, which the processor first reads into the
        # cache.
        brought = sum(job.item[name] for name, stream in job.streams.items() if stream.source and stream.memory)
        takes = {"cores": machine.cores * seconds, "dram": tile.numel * (ADAM_BYTES[job.moments] + brought)}
        self._fluid.start(Activity(1.0, 1 / seconds, takes, weight=machine.cores), computed)

    def _computed(self, tile: Tile) -> None:
        job = tile.job
        job.uncomputed -= 1
        weights = tile.numel * job.item["weight"] if job.written("weight") else 0.0
        others = [name for name in job.streams if name != "weight" and job.written(name)]
        writes = [self._disk.transfer("weights", weights, reads=False)] if weights else []
        if others:
            writes.append(
                self._disk.transfer("writeback", tile.numel * sum(job.item[name] for name in others), reads=False)
            )
        if weights:
            job.weight_writes += 1
            writes[0].then(lambda: self._weights_written(job))
        if writes:
            tile.phase = "writing"
            when_all(writes, lambda: self._leave(tile))
        else:
            self._leave(tile)
        self._tell(job)
        self._pump_soon()

    def _weights_written(self, job: Job) -> None:
        job.weight_writes -= 1
        self._tell(job)

    def _transferred(self, tile: Tile) -> None:
        tile.pending -= 1
        if tile.pending == 0 and tile.phase == "dropped":
            self._leave_dropped(tile)
        self._pump_soon()

    def _leave(self, tile: Tile) -> None:
        tile.phase = "gone"
        self._give_back(tile.buffer)
        tile.job.tiles -= 1
        if tile.job.phase == "ending" and tile.job.tiles == 0:
            self._finish(tile.job)
        self._pump_soon()

    def _give_back(self, buffer: int) -> None:
        if buffer == _NO_BUFFER:
            return
        if buffer in self._ending:
            in_use, future = self._ending[buffer]
            self._ending[buffer] = (in_use - 1, future)
            if in_use == 1:
                del self._ending[buffer]
                future.complete()
        else:
            self._free.append(buffer)

    def _drop_ahead(self, job: Job) -> None:
        while job.ahead:
            tile = job.ahead.popleft()
            tile.phase = "dropped"
            if not tile.pending:
                self._leave_dropped(tile)

    def _leave_dropped(self, tile: Tile) -> None:
        self._tiles_ahead -= 1
        self._give_back(tile.buffer)
        tile.job.tiles -= 1

    # -- jobs -----------------------------------------------------------------------------------------------------

    def _take_over(self, ahead: UpdateFuture, by: Job) -> None:
        source = next(job for job in self._jobs_ahead if job.future is ahead)
        self._jobs_ahead.remove(source)
        for tile in source.ahead:
            tile.job = by
            tile.there = {
                name
                for name in tile.there
                if name in by.streams and by.streams[name].read_from_file and source.streams[name].file is not None
            }
        by.tiles += len(source.ahead)
        by.ahead, source.ahead = source.ahead, deque()
        self._finish(source)

    def _give_up(self, job: Job) -> None:
        self._drop_ahead(job)
        job.phase = "ending"
        if job.tiles == 0:
            self._finish(job)

    def _tell(self, job: Job) -> None:
        if job.next < job.numel or job.uncomputed or job.failure:
            return
        job.future.computed.complete()
        if not job.weight_writes:
            job.future.weights.complete()

    def _finish(self, job: Job) -> None:
        job.phase = "done"
        job.future.complete_all(job.failure)
