"""One measurement: a workload goes in, bytes, seconds and processor time come out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from infinity import _native
from infinity.cli.bench.scratch import Scratch
from infinity.errors import BenchError

Kind = Literal["read", "overwrite", "mixed"]
WRITTEN_SHARE: dict[Kind, float] = {"read": 0.0, "overwrite": 1.0, "mixed": 0.5}

_MIXED_REQUEST_BYTES = 1 << 20  # reads and writes alternate in pieces of this, or of a block where that is larger


@dataclass(frozen=True)
class Workload:
    """What is done to a scratch file.

    Attributes:
        block_bytes, queue_depth: of every transfer; the depth is held until the end.
        nbytes: moved in all; mixed counts both directions.
        engine: io_uring, threads or auto.
    """

    kind: Kind
    block_bytes: int
    queue_depth: int
    nbytes: int
    engine: str = "auto"


@dataclass(frozen=True)
class Sample:
    """What one run of a workload took.

    Attributes:
        cpu_s: processor time of the process, all threads, the kernel's part included.
    """

    nbytes: int
    seconds: float
    cpu_s: float

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.seconds

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / (self.nbytes / 1e9)


class Rig:
    """A scratch file with the memory its contents come from and go to.

    Every piece of `memory_bytes` of the file holds the same pattern, so what was read can always be checked.

    Raises:
        BenchError: see Scratch; the memory cannot be had.
    """

    def __init__(self, scratch: Scratch, memory_bytes: int) -> None:
        if scratch.nbytes % memory_bytes:
            raise AssertionError("the file is no multiple of the memory")
        self.scratch = scratch
        self.memory_bytes = memory_bytes
        arena = _native.Arena(2 * memory_bytes)
        self._arena = arena
        self._source = arena.view(0, memory_bytes)
        self._target = arena.view(memory_bytes, memory_bytes)
        pages = np.frombuffer(self._source, np.uint64).reshape(-1, 512)
        pages[:] = np.random.default_rng().integers(0, 1 << 63, 512, np.uint64)
        pages[:, 0] = np.arange(len(pages), dtype=np.uint64)

    def fill(self) -> None:
        """Write the pattern everywhere: from here on every write is an overwrite.

        Raises:
            BenchError: the device failed.
        """
        engine = _native.IOEngine()
        _wait([engine.write(self.scratch.file, at, self._source) for at in self._starts(self.scratch.nbytes)])
        engine.close()

    def run(self, workload: Workload, *, check: bool = True) -> Sample:
        """Do the workload once.

        Args:
            check: compare what was read with the pattern; not where somebody else wrote to the file.

        Raises:
            BenchError: the device failed.
            BenchError: what was read is not what had been written.
            ConfigError: the engine is not to be had.
        """
        engine = _native.IOEngine(
            workload.engine,
            block_bytes=workload.block_bytes,
            queue_depth=workload.queue_depth,
            in_flight_bytes=workload.block_bytes * workload.queue_depth,
            threads=min(workload.queue_depth, 16),
        )
        engine.register_memory(self._arena.view(0, 2 * self.memory_bytes))
        if workload.kind != "overwrite":
            np.frombuffer(self._target, np.uint64)[:] = 0
        began, cpu = time.perf_counter(), time.process_time()
        futures = self._submit(engine, workload)
        _wait(futures)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        engine.close()
        if check and workload.kind in ("read", "mixed"):
            self._compare(workload)
        return Sample(workload.nbytes, seconds, cpu)

    def _submit(self, engine: _native.IOEngine, workload: Workload) -> list[_native.IOFuture]:
        if workload.kind == "mixed":
            return self._submit_mixed(engine, workload)
        act, memory = (engine.read, self._target) if workload.kind == "read" else (engine.write, self._source)
        return [act(self.scratch.file, at, memory) for at in self._starts(workload.nbytes)]

    def _submit_mixed(self, engine: _native.IOEngine, workload: Workload) -> list[_native.IOFuture]:
        """Reads walk from the start of the file, writes from its middle."""
        piece = max(workload.block_bytes, _MIXED_REQUEST_BYTES)
        half = self.scratch.nbytes // 2 // self.memory_bytes * self.memory_bytes
        futures = []
        for at in range(0, workload.nbytes // 2, piece):
            memory = at % self.memory_bytes
            read_at, write_at = at % self.scratch.nbytes, (half + at) % self.scratch.nbytes
            futures.append(engine.read(self.scratch.file, read_at, self._target[memory : memory + piece]))
            futures.append(engine.write(self.scratch.file, write_at, self._source[memory : memory + piece]))
        return futures

    def _starts(self, nbytes: int) -> list[int]:
        return [at % self.scratch.nbytes for at in range(0, nbytes, self.memory_bytes)]

    def _compare(self, workload: Workload) -> None:
        nbytes = min(self.memory_bytes, workload.nbytes // 2 if workload.kind == "mixed" else workload.nbytes)
        got = np.frombuffer(self._target[:nbytes], np.uint64)
        wanted = np.frombuffer(self._source[:nbytes], np.uint64)
        if not np.array_equal(got, wanted):
            page = int(np.flatnonzero(got != wanted)[0]) // 512
            raise BenchError(
                f"WRONG DATA: page {page} of what was read ({workload.kind}, {workload.block_bytes >> 10} KiB × "
                f"{workload.queue_depth}) is not what had been written. Do not trust this disk, its cable or this "
                "memory: run memtest and smartctl."
            )


def verify(scratch: Scratch, faults: Sequence[_native.Fault] = ()) -> None:
    """Write the whole file with new contents and read it back, each page against its checksum.

    Args:
        faults: for tests.

    Raises:
        BenchError: the device failed, or a page came back changed; names it.
    """
    piece = min(64 << 20, scratch.nbytes)
    memory = _native.Arena(piece).view(0, piece)
    words = np.frombuffer(memory, np.uint64)
    engine = _native.IOEngine(faults=list(faults))
    scratch.file.keep_checksums(scratch.nbytes)
    try:
        for at in range(0, scratch.nbytes, piece):
            words[:] = np.random.default_rng(at).integers(0, 1 << 63, 1, np.uint64) + np.arange(
                len(words), dtype=np.uint64
            )
            _wait([engine.write(scratch.file, at, memory[: scratch.nbytes - at])])
        for at in range(0, scratch.nbytes, piece):
            _wait([engine.read(scratch.file, at, memory[: scratch.nbytes - at])])
    finally:
        engine.close()


def _wait(futures: Sequence[_native.IOFuture]) -> None:
    for future in futures:
        future.wait()
    for future in futures:
        failure = future.failure()
        if failure is not None:
            wrong = "WRONG DATA: " if failure.kind == "corruption" else ""
            raise BenchError(wrong + failure.message)
