"""One measurement: it runs a workload and returns bytes, seconds and processor time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from infinity import _native
from infinity.cli.bench.scratch import ScratchFile
from infinity.errors import BenchError

Kind = Literal["read", "overwrite", "mixed"]
WRITTEN_SHARE: dict[Kind, float] = {"read": 0.0, "overwrite": 1.0, "mixed": 0.5}

# reads and writes alternate in pieces of this size, or of one block if a block is larger
_MIXED_REQUEST_BYTES = 1 << 20


@dataclass(frozen=True)
class Workload:
    """The I/O of one run on a scratch file.

    Attributes:
        kind: read, overwrite or mixed.
        block_bytes, queue_depth: the bytes of a transfer, and the number of transfers in flight, which is constant
            until the end.
        nbytes: bytes moved in total; for mixed, the sum of both directions.
        engine: io_uring, threads or auto.
    """

    kind: Kind
    block_bytes: int
    queue_depth: int
    nbytes: int
    engine: str = "auto"


@dataclass(frozen=True)
class WorkloadMeasurement:
    """The bytes, the seconds and the processor time of one run of a workload.

    Attributes:
        cpu_s: processor time of all threads of the process, including the kernel's part.
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


class WorkloadRunner:
    """A scratch file with the memory for its writes and reads.

    Every piece of `memory_bytes` of the file has the same pattern, so the data of each read can be checked.

    Args:
        scratch: the file.
        memory_bytes: bytes of the source, and also of the target. The file's size must be a multiple of this number.

    Raises:
        BenchError: the memory cannot be allocated, or ScratchFile raised the error.
    """

    def __init__(self, scratch: ScratchFile, memory_bytes: int) -> None:
        if scratch.nbytes % memory_bytes:
            raise AssertionError("the size of the file is not a multiple of the memory")
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
        """Write the pattern to the complete file. After this call, every write overwrites existing data.

        Raises:
            BenchError: the device failed.
        """
        engine = _native.IOEngine()
        _wait([engine.write(self.scratch.file, at, self._source) for at in self._starts(self.scratch.nbytes)])
        engine.close()

    def run(self, workload: Workload, *, check: bool = True) -> WorkloadMeasurement:
        """Run the workload once.

        Args:
            workload: the workload.
            check: whether to compare the data read with the pattern; False if another process wrote to the file.

        Raises:
            BenchError: the device failed, or the data read differs from the data written.
            ConfigError: the engine is not available.
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
        return WorkloadMeasurement(workload.nbytes, seconds, cpu)

    def _submit(self, engine: _native.IOEngine, workload: Workload) -> list[_native.IOFuture]:
        if workload.kind == "mixed":
            return self._submit_mixed(engine, workload)
        act, memory = (engine.read, self._target) if workload.kind == "read" else (engine.write, self._source)
        return [act(self.scratch.file, at, memory) for at in self._starts(workload.nbytes)]

    def _submit_mixed(self, engine: _native.IOEngine, workload: Workload) -> list[_native.IOFuture]:
        """Submit reads alternating with writes. The reads begin at the start of the file, the writes at the middle."""
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
                f"WRONG DATA: page {page} of the data read ({workload.kind}, {workload.block_bytes >> 10} KiB × "
                f"{workload.queue_depth}) differs from the data written. Do not trust this disk, its cable or this "
                "memory: run memtest and smartctl."
            )


def verify(scratch: ScratchFile, faults: Sequence[_native.Fault] = ()) -> None:
    """Write the complete file with new contents and read it back, and compare each page with its checksum.

    Args:
        scratch: the file.
        faults: injected faults, for tests.

    Raises:
        BenchError: the device failed, or a page differs (the error names the page).
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
