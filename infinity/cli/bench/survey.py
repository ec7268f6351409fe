"""`infinity-bench`: the survey of one or more disks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import psutil

from infinity import _native
from infinity.cli.bench.options import SIZE_MIN, BenchOptions
from infinity.cli.bench.scratch import ScratchFile
from infinity.cli.bench.survey_report import BenchReport, DiskReport, swap_config
from infinity.cli.bench.sustained import sustain
from infinity.cli.bench.sweep import DiskSweep, SweepPoint, most_written
from infinity.cli.bench.workload import Workload, WorkloadRunner, verify
from infinity.errors import BenchError, ConfigError
from infinity.files import require_different
from infinity.io.disk_profile import save_profile
from infinity.quoting import one_line
from infinity.sizes import format_bytes

_MEMORY_BYTES = 256 << 20
_SAMPLE_BYTES = 1 << 30
_SAMPLE_S = 0.6
"""Seconds that one run should take. On a slow disk a run moves fewer bytes, so that a survey is short on any disk."""
_SUSTAINED = (1 << 20, 32)
"""Block size and queue depth of --sustained."""
_LIMIT_S = 3600.0
"""Maximum duration of --sustained."""


def run_survey(options: BenchOptions) -> BenchReport:
    """Measure every path and print the results.

    Raises:
        BenchError, ConfigError: a path cannot be measured, or returned wrong data.
    """
    paths = _directories(options.path)
    try:
        engine = _native.IOEngine(options.engine)
    except OSError as error:
        raise ConfigError(f"--engine {options.engine}: {error}. Use auto or threads.") from error
    name, reason = engine.name, engine.reason
    engine.close()
    _say(f"I/O engine: {name}: {reason}")
    return BenchReport(name, reason, [_measure(path, options, name) for path in paths])


def conclude(survey: BenchReport) -> None:
    """Save the disks' profiles for the planner and print a swap config. If there was no sweep, do nothing."""
    choices = [report.choice for report in survey.paths if report.choice is not None]
    if not choices:
        return
    try:
        for choice in choices:
            remembered = save_profile(Path(choice.path), choice)
        _say(f"The planner reads these figures from {remembered}.")
    except OSError as error:  # the swap config is useful even if the profiles cannot be saved
        _say(f"The planner cannot read these figures: {error.filename}: {error.strerror}")
    print(f"A swap config for these disks:\n\n{swap_config(choices)}")


def _say(line: str) -> None:
    print(one_line(line), flush=True)


def _measure(path: Path, options: BenchOptions, engine: str) -> DiskReport:
    memory = _memory_bytes(options.size)
    file_bytes = options.size // memory * memory
    _announce(path, options, file_bytes)
    with ScratchFile(path, file_bytes) as scratch:
        if not scratch.file.direct:
            _say("direct I/O does not work on this disk: the measurement includes the page cache")
        rig = WorkloadRunner(scratch, memory)
        rig.fill()
        if options.sustained:
            load = Workload("overwrite", *_SUSTAINED, file_bytes, engine)
            sustained = sustain(rig, load, _LIMIT_S, _say_minute)
            if not sustained.settled:
                _say(
                    "The rate is not constant yet: in each of the last three minutes it should differ by less than 5 % "
                    "from the minute before."
                )
            report = DiskReport(path, 2 * file_bytes + sustained.written_bytes, sustained=sustained)
        else:
            sweep = DiskSweep(path, rig, _sample_bytes(rig, engine), engine, _say_point)
            choice = sweep.run()
            report = DiskReport(path, 2 * file_bytes + memory + sweep.written_bytes, sweep.points, choice)
        verify(scratch)
    _say(f"verified: all {file_bytes >> 20} MiB were read back as they were written")
    _say(f"written to this disk: about {format_bytes(report.written_bytes)}")
    return report


def _announce(path: Path, options: BenchOptions, file_bytes: int) -> None:
    """Print, before anything is written, how many bytes the survey will write."""
    if file_bytes != options.size:
        _say(f"--size {format_bytes(options.size)}: {format_bytes(file_bytes)} are used")
    filled = 2 * file_bytes
    wear = f"{format_bytes(filled + most_written(min(file_bytes, _SAMPLE_BYTES)))} at most, less on a slow disk"
    if options.sustained:
        longest = "for an hour at most: 3.6 TB on a disk that writes 1 GB/s"
        wear = f"{format_bytes(filled)} and then as much as the disk writes, {longest}"
    _say(f"will write to {path}: {wear}")


def _say_point(point: SweepPoint) -> None:
    setting = f"{point.kind:<10}{point.block_bytes >> 10:>6} KiB × {point.queue_depth:<4}"
    _say(f"{setting}{point.rate / 1e9:6.2f} GB/s ± {point.spread:.0%}")


def _say_minute(rate: float, written_bytes: int) -> None:
    _say(f"overwriting, in one minute: {rate / 1e9:.2f} GB/s, {format_bytes(written_bytes)} written")


def _sample_bytes(rig: WorkloadRunner, engine: str) -> int:
    """Return the bytes of a run that takes about 0.6 s, at most 1 GiB and at most the size of the file.

    The result is a multiple of the rig's memory.
    """
    probe = rig.run(Workload("overwrite", 1 << 20, 16, rig.memory_bytes, engine))
    wanted = int(min(probe.rate * _SAMPLE_S, _SAMPLE_BYTES, rig.scratch.nbytes))
    return max(wanted // rig.memory_bytes * rig.memory_bytes, rig.memory_bytes)


def _memory_bytes(size: int) -> int:
    """Return the bytes of memory of the source, which are also the bytes of the target.

    The result is a power of two. Its maximum is the smallest of 256 MiB, the size of the file, and an eighth of the
    available memory. Its minimum is 16 MiB, which is the largest block.
    """
    most = min(psutil.virtual_memory().available // 8, size)
    memory = _MEMORY_BYTES
    while memory > most and memory > SIZE_MIN:
        memory //= 2
    return memory


def _directories(paths: Sequence[Path]) -> list[Path]:
    """Return each path as an absolute path.

    Raises:
        BenchError: a path is not a directory, or is not writable.
        ConfigError: two of the paths are the same directory.
    """
    found: list[Path] = []
    for given in paths:
        path = given.expanduser().absolute()
        if not path.is_dir():
            raise BenchError(f"--path {path}: not a directory")
        if not os.access(path, os.W_OK):
            raise BenchError(f"--path {path}: not writable")
        found.append(path)
    try:
        require_different(found)
    except ValueError as error:
        raise ConfigError(f"--path: {error}") from None
    return found
