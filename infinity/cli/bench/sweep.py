"""The sweep: a search for the best block size and queue depth of a disk, with few runs."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.cli.bench.workload import WRITTEN_SHARE, Kind, Workload, WorkloadRunner
from infinity.io.disk_profile import DiskProfile

DEPTHS = (1, 4, 8, 16, 32, 64)
BLOCKS = (128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20, 16 << 20)
_MIDDLE_BLOCK = 1 << 20
_IN_FLIGHT_BYTES_MIN, _IN_FLIGHT_BYTES_MAX = 8 << 20, 128 << 20
_GAIN = 1.05
"""Minimum speed-up that justifies the memory and latency of a deeper queue or another block size."""
_REPEATS = 3
_DEPTH_MIN = 8
"""Minimum queue depth for block sizes other than 1 MiB.

A training step also moves pieces smaller than a block, and small pieces need a deeper queue.
"""
_FINALISTS = 3


@dataclass(frozen=True)
class SweepPoint:
    """A block size and a queue depth, with the rates of their runs.

    Attributes:
        kind: read, overwrite or mixed.
        block_bytes, queue_depth: the setting.
        rate: median of the runs in bytes per second.
        spread: (fastest - slowest) / median of the runs. Differences between settings that are smaller than the spread
            are not significant.
    """

    kind: Kind
    block_bytes: int
    queue_depth: int
    rate: float
    spread: float


def most_written(sample_bytes: int) -> int:
    """Return an upper bound of the bytes that a sweep with samples of at most `sample_bytes` writes.

    The bound is the sum of four parts: the writes at all queue depths, the writes with all block sizes, half of the
    bytes of the mixed runs, and the run that determines the sample size.
    """
    runs = len(DEPTHS) + len(BLOCKS) + _FINALISTS / 2
    return int((runs * _REPEATS + 1) * sample_bytes)


class DiskSweep:
    """A sweep of one disk.

    The sweep first raises the queue depth at blocks of 1 MiB until a deeper queue gains nothing. The sweep then finds
    the best block size for the same number of bytes in flight. Finally the sweep measures the best few settings with
    mixed reads and writes, which is the pattern of training.

    Args:
        directory: a directory on the disk.
        rig: the scratch file, which is already filled, and its memory.
        sample_bytes: bytes moved per run.
        engine: the I/O engine.
        say: function that is called with every point.
    """

    def __init__(
        self, directory: Path, rig: WorkloadRunner, sample_bytes: int, engine: str, say: Callable[[SweepPoint], None]
    ) -> None:
        self._directory, self._rig, self._sample_bytes = directory, rig, sample_bytes
        self._engine, self._say = engine, say
        self._points: dict[tuple[Kind, int, int], SweepPoint] = {}

    def run(self) -> DiskProfile:
        """Return the recommended settings. Raises BenchError: the disk failed, or returned wrong data."""
        depth = max(self._best_depth(kind) for kind in ("read", "overwrite"))
        # so that one read and one write can be in flight
        for block in (each for each in BLOCKS if 2 * each <= self._sample_bytes):
            self._measure_both(block, max(min(depth * _MIDDLE_BLOCK // block, 256), _DEPTH_MIN))
        finalists = self._ranked()[:_FINALISTS]
        for block, blocks_deep in finalists:
            self._point("mixed", block, blocks_deep)
        block, depth = chosen = self._economical("mixed", finalists)
        return DiskProfile(
            block_bytes=block,
            in_flight_bytes=max(block * depth, _IN_FLIGHT_BYTES_MIN),
            read_rate=self._rate("read", chosen),
            overwrite_rate=self._rate("overwrite", chosen),
            mixed_rate=self._rate("mixed", chosen),
            engine=self._engine,
            path=str(self._directory),
            measured=datetime.date.today().isoformat(),
        )

    @property
    def points(self) -> list[SweepPoint]:
        """The measured settings, in the order of measurement."""
        return list(self._points.values())

    @property
    def written_bytes(self) -> int:
        return int(sum(WRITTEN_SHARE[point.kind] for point in self.points) * _REPEATS * self._sample_bytes)

    def _best_depth(self, kind: Kind) -> int:
        """Return the best queue depth for blocks of 1 MiB.

        The queue depth is raised until each of the last two steps has gained less than 5 %.
        """
        best, idle, tried = 0.0, 0, list[tuple[int, int]]()
        for depth in DEPTHS:
            rate = self._point(kind, _MIDDLE_BLOCK, depth).rate
            tried.append((_MIDDLE_BLOCK, depth))
            idle = 0 if rate > best * _GAIN else idle + 1
            best = max(best, rate)
            if idle == 2:
                break
        return self._economical(kind, tried)[1]

    def _economical(self, kind: Kind, settings: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Return the setting with the fewest bytes in flight among the settings within 5 % of the fastest."""
        best = max(self._rate(kind, setting) for setting in settings)
        good = [setting for setting in settings if self._rate(kind, setting) * _GAIN >= best]
        return min(good, key=lambda setting: (setting[0] * setting[1], setting[1]))

    def _rate(self, kind: Kind, setting: tuple[int, int]) -> float:
        return self._points[kind, setting[0], setting[1]].rate

    def _measure_both(self, block: int, depth: int) -> None:
        if block * depth <= _IN_FLIGHT_BYTES_MAX:
            self._point("read", block, depth)
            self._point("overwrite", block, depth)

    def _ranked(self) -> list[tuple[int, int]]:
        """Return the settings that were measured for reads and for writes, sorted by speed.

        The speed is computed for half reads and half writes. The fastest setting comes first.
        """
        reads, writes = ({key[1:] for key in self._points if key[0] == kind} for kind in ("read", "overwrite"))

        def both(setting: tuple[int, int]) -> float:
            return sum(1 / self._rate(kind, setting) for kind in ("read", "overwrite"))

        return sorted(reads & writes, key=both)

    def _point(self, kind: Kind, block: int, depth: int) -> SweepPoint:
        key = (kind, block, depth)
        if key not in self._points:
            workload = Workload(kind, block, depth, self._sample_bytes, self._engine)
            rates = [self._rig.run(workload).rate for _ in range(_REPEATS)]
            median = statistics.median(rates)
            self._points[key] = SweepPoint(kind, block, depth, median, (max(rates) - min(rates)) / median)
            self._say(self._points[key])
        return self._points[key]
