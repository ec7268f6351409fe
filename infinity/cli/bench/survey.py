"""`infinity-bench`: the survey of one or more disks."""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import psutil
from rich.console import Console

from infinity import _native
from infinity.cli.bench.report import (
    PathReport,
    Survey,
    disk_facts,
    machine_facts,
    print_facts,
    print_points,
    swap_config,
)
from infinity.cli.bench.scratch import Scratch
from infinity.cli.bench.sustained import Minute, Sustained, sustain
from infinity.cli.bench.sweep import Point, Sweep, most_written
from infinity.cli.bench.workload import WRITTEN_SHARE, Rig, Workload, verify
from infinity.cli.disk_facts import describe_disk
from infinity.cli.endurance import endurance_of
from infinity.cli.machine_facts import describe_machine
from infinity.echo import one_line
from infinity.errors import BenchError, ConfigError
from infinity.files import require_different
from infinity.io.profile import DiskProfile, save_profile
from infinity.sizes import format_bytes

_MEMORY_BYTES = 256 << 20
_SAMPLE_BYTES = 1 << 30
_SAMPLE_S = 0.6
"""Slow disks move less per run, so that a survey stays short."""
_SUSTAINED = (1 << 20, 32)
"""Block size and queue depth of --sustained."""
_LIMIT_S = 3600.0


def run_survey(options: argparse.Namespace, console: Console) -> Survey:
    """Measure every path and print what is found.

    Raises:
        BenchError, ConfigError: a path cannot be measured, or returned wrong data.
    """
    engine = _open(options.engine)
    registered = engine.register_memory(_native.Arena(1 << 20).view(0, 1 << 20)) or "buffers can be registered"
    machine, name, reason = describe_machine(), engine.name, engine.reason
    engine.close()
    survey = Survey(machine, name, reason, registered, ())
    print_facts(console, machine_facts(survey))
    return replace(survey, paths=tuple(_measure(path, options, name, console) for path in options.path))


def conclude(survey: Survey, console: Console) -> None:
    """Remember the disks for the planner and print a config. Only after a sweep."""
    swept = [(report, report.choice) for report in survey.paths if report.choice is not None]
    if not swept:
        return
    now = datetime.date.today().isoformat()
    try:
        for report, choice in swept:
            found = DiskProfile(**asdict(choice), engine=survey.engine, path=str(report.path), measured=now)
            remembered = save_profile(report.path, found)
        console.print(f"\nThe planner reads these figures from {one_line(remembered)}.", markup=False, highlight=False)
    except OSError as error:  # what was measured is worth its config all the same
        said = f"{error.filename}: {error.strerror}"
        console.print(f"\nThe planner cannot read these figures: {one_line(said)}", markup=False, highlight=False)
    console.print("A swap config for these disks:\n")
    console.print(swap_config([report for report, _ in swept]), markup=False, highlight=False, soft_wrap=True)


def _open(engine: str) -> _native.IOEngine:
    try:
        return _native.IOEngine(engine)
    except OSError as error:
        raise ConfigError(f"--engine {engine}: {error}. Use auto or threads.") from error


def _measure(path: Path, options: argparse.Namespace, engine: str, console: Console) -> PathReport:
    memory = _memory_bytes(options.size)
    file_bytes = options.size // memory * memory
    _announce(path, options, file_bytes, console)
    with Scratch(path, file_bytes) as scratch:
        disk = describe_disk(path)
        endurance = endurance_of(disk.members[0]) if disk.members else None
        report = PathReport(path, disk, scratch.file.alignment, endurance)
        print_facts(console, disk_facts(report))
        if not scratch.file.direct:
            console.print("[yellow]no direct I/O here: the page cache is measured as well[/]")
        rig = Rig(scratch, memory)
        with console.status("filling the file"):
            rig.fill()
        if not options.sustained:
            sweep = Sweep(path, rig, _sample_bytes(rig, engine), engine, lambda point: _say(console, point))
            choice = sweep.run()
            report = replace(report, choice=choice, points=sweep.points)
            print_points(console, report.points)
        if options.sustained:
            load = Workload("overwrite", *_SUSTAINED, file_bytes, engine)
            report = replace(report, sustained=_sustain(rig, load, options.limit_s or _LIMIT_S, console))
        with console.status("verifying"):
            verify(scratch)
        console.print(f"verified: all {file_bytes >> 20} MiB read back as written")
    written = _written(report, file_bytes, memory)
    console.print(f"written to this disk: about {format_bytes(written)}", highlight=False)
    return replace(report, written_bytes=written)


def _announce(path: Path, options: argparse.Namespace, file_bytes: int, console: Console) -> None:
    """How much will be written, before anything is."""
    if file_bytes != options.size:
        console.print(f"--size {format_bytes(options.size)}: {format_bytes(file_bytes)} are used", highlight=False)
    filled = 2 * file_bytes
    if options.sustained:
        longest = f"for up to {options.limit_s or _LIMIT_S:.0f} s: 3.6 TB an hour on a disk that takes 1 GB/s"
        wear = f"{format_bytes(filled)} and then whatever the disk takes, {longest}"
    else:
        wear = f"{format_bytes(filled + most_written(min(file_bytes, _SAMPLE_BYTES)))} at most, less on a slow disk"
    console.print(f"will write to {one_line(path)}: {wear}", markup=False, highlight=False, soft_wrap=True)


def _say(console: Console, point: Point) -> None:
    load = point.workload
    console.print(
        f"{load.kind:<12} {load.block_bytes >> 10:>6} KiB × {load.queue_depth:<3} {point.rate / 1e9:6.2f} GB/s",
        highlight=False,
    )


def _sustain(rig: Rig, load: Workload, limit_s: float, console: Console) -> Sustained:
    def say(minute: Minute) -> None:
        rate = f"{minute.rate / 1e9:.2f} GB/s"
        console.print(f"overwriting, a minute: {rate}, {format_bytes(minute.written_bytes)} written", highlight=False)

    sustained = sustain(rig, load, limit_s, say)
    if not sustained.settled:
        console.print("It has not settled: each of the last three minutes should be within 5 % of the one before.")
    return sustained


def _sample_bytes(rig: Rig, engine: str) -> int:
    """So much that a run takes about 0.6 s, at most 1 GiB or the file; a multiple of what is moved at once."""
    probe = rig.run(Workload("overwrite", 1 << 20, 16, rig.memory_bytes, engine))
    wanted = int(min(probe.rate * _SAMPLE_S, _SAMPLE_BYTES, rig.scratch.nbytes))
    return max(wanted // rig.memory_bytes * rig.memory_bytes, rig.memory_bytes)


def _memory_bytes(size: int) -> int:
    """For the source and the target each: a power of two, at most the file and an eighth of what is free; 16 MiB at
    least, a block of the largest size."""
    most = min(psutil.virtual_memory().available // 8, size)
    memory = _MEMORY_BYTES
    while memory > most and memory > 16 << 20:
        memory //= 2
    return memory


def _written(report: PathReport, file_bytes: int, probe_bytes: int) -> int:
    """Filling and verifying the file included."""
    points, settled = report.points, report.sustained.written_bytes if report.sustained else 0
    moved = sum(sample.nbytes * WRITTEN_SHARE[point.workload.kind] for point in points for sample in point.samples)
    return int(moved) + settled + 2 * file_bytes + (probe_bytes if points else 0)


def require_directories(paths: Sequence[Path]) -> list[Path]:
    """Each path, absolute. Raises BenchError unless all are directories that may be written to; ConfigError where two
    are the same."""
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
