"""What a survey found, as tables for people, JSON for programs, and a swap config for infinity.

[Note: the JSON]
`schema` and `version` name it; a version only ever gains keys. Version 1 had more of `disk`. Each job has fio's keys
(jobname, "job options", read and write with io_bytes, bw_bytes, iops, clat_ns.percentile), so that what reads fio's
output reads ours; cpu_s_per_gb, spread and runs are our own. Sizes are bytes, rates bytes per second, GB is 10^9.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from infinity.cli.bench.sustained import Sustained
from infinity.cli.bench.sweep import Choice, Point
from infinity.cli.bench.workload import FIO_NAMES, PERCENTILES, Latencies, percentile
from infinity.cli.disk_facts import DiskFacts
from infinity.cli.endurance import Endurance
from infinity.cli.machine_facts import MachineFacts
from infinity.echo import one_line
from infinity.sizes import format_bytes

SCHEMA, VERSION = "infinity-bench", 2


@dataclass(frozen=True)
class PathReport:
    """One directory's disk: what it is and what was measured; None where it was not asked for.

    Attributes:
        alignment: bytes that infinity found direct I/O to ask of memory and of offsets; 1 without direct I/O.
        endurance: None where the drive does not tell it.
    """

    path: Path
    disk: DiskFacts
    alignment: tuple[int, int]
    endurance: Endurance | None
    points: Sequence[Point] = ()
    choice: Choice | None = None
    sustained: Sustained | None = None
    written_bytes: int = 0


@dataclass(frozen=True)
class Survey:
    """Everything one call of infinity-bench found. `engine_reason` says why this engine, and its flags."""

    machine: MachineFacts
    engine: str
    engine_reason: str
    registered: str
    paths: Sequence[PathReport]


def cell(text: object) -> Text:
    """As it is: `[/]` in a path is no markup."""
    return Text(one_line(text))


# -- tables -----------------------------------------------------------------------------------------------------------


def print_facts(console: Console, facts: Mapping[str, object]) -> None:
    """Facts by their names in the JSON; not those that the system does not tell."""
    made = Table(show_header=False, box=None, padding=(0, 2))
    for name, value in facts.items():
        said = " ".join(map(str, value)) if isinstance(value, tuple) else value
        if isinstance(value, int) and name.endswith("_bytes"):
            said = format_bytes(value)
        if said not in (None, ""):
            made.add_row(name.removesuffix("_bytes").replace("_", " "), cell(said))
    console.print(made)


def machine_facts(survey: Survey) -> dict[str, object]:
    """Of the machine, and of the engine that it has."""
    lock = {"memlock_soft_bytes": "no limit"} if survey.machine.memlock_soft_bytes is None else {}
    engine = {"engine": f"{survey.engine}: {survey.engine_reason}", "registered": survey.registered}
    return dataclasses.asdict(survey.machine) | lock | engine


def disk_facts(report: PathReport) -> dict[str, object]:
    """Of the disk, with its wear."""
    memory, offset = report.alignment
    wear = "not readable (smartctl as root can; virtual disks have none)"
    if report.endurance is not None:
        wear = f"{report.endurance.written_bytes / 1e12:.1f} TB written, {report.endurance.percentage_used} % used"
    return dataclasses.asdict(report.disk) | {"alignment": f"memory {memory} B, offset {offset} B", "endurance": wear}


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, words: int = 1) -> Table:
    """Args: words: how many columns, from the left, are words; numbers are at the right of theirs."""
    made = Table(title=title)
    for at, name in enumerate(columns):
        made.add_column(name, justify="left" if at < words else "right")
    for row in rows:
        made.add_row(*map(cell, row))
    return made


def print_points(console: Console, points: Sequence[Point]) -> None:
    def row(point: Point) -> list[object]:
        load = point.workload
        latencies = merge([side for sample in point.samples for side in (sample.reads, sample.writes)])
        values = [f"{percentile(latencies, percent) / 1e6:.2f}" for percent in (*PERCENTILES, 100.0)]
        rate = [f"{point.rate / 1e9:.2f}", f"{point.spread:.0%}"]
        setting = [load.kind.replace("_", " "), format_block(load.block_bytes), load.queue_depth]
        return [*setting, *rate, *values, f"{point.cpu_s_per_gb:.4f}"]

    title = "GB/s = 10^9 bytes per second; latency of a block in ms; medians of the runs"
    columns = ("", "block", "depth", "GB/s", "±", "p50", "p90", "p99", "p99.9", "max", "CPU s/GB")
    console.print(table(title, columns, map(row, points)))


def format_block(nbytes: int) -> str:
    return f"{nbytes >> 20}MiB" if nbytes % (1 << 20) == 0 else f"{nbytes >> 10}KiB"


def merge(parts: Sequence[Latencies]) -> Latencies:
    """Several histograms as one."""
    sums: dict[int, int] = {}
    for part in parts:
        for value, count in part:
            sums[value] = sums.get(value, 0) + count
    return sorted(sums.items())


# -- the swap config --------------------------------------------------------------------------------------------------


def swap_config(reports: Sequence[PathReport]) -> str:
    """YAML that infinity accepts, with the settings the slowest of the disks needs."""
    choices = [report.choice for report in reports if report.choice is not None]
    block = max(choice.block_bytes for choice in choices)
    in_flight = max(choice.in_flight_bytes for choice in choices)
    rate = sum(choice.mixed_rate for choice in choices)
    paths = ", ".join(_yaml_word(str(report.path / "infinity-swap")) for report in reports)
    return (
        f"# measured {datetime.date.today().isoformat()}: {rate / 1e9:.2f} GB/s, half reads and half writes\n"
        "weights: auto\n"
        "optimizer: nvme\n"
        "activations: auto\n"
        "# memory: {device: 20GiB, host: 48GiB}   # omitted = measured\n"
        f"nvme: {{paths: [{paths}], engine: auto, block: {format_block(block)}, "
        f"in_flight: {format_block(in_flight)}}}\n"
    )


def _yaml_word(text: str) -> str:
    """In quotes where YAML needs them."""
    return text if re.fullmatch(r"[\w/.+-]+", text) else json.dumps(text)


# -- JSON -------------------------------------------------------------------------------------------------------------


def to_json(survey: Survey, version: str) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "infinity": version,
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": dataclasses.asdict(survey.machine),
        "engine": {"name": survey.engine, "reason": survey.engine_reason, "registered": survey.registered},
        "paths": [_path_json(report) for report in survey.paths],
    }


def _path_json(report: PathReport) -> dict[str, Any]:
    return {
        "path": str(report.path),
        "disk": dataclasses.asdict(report.disk),
        "alignment": report.alignment,
        "endurance": None if report.endurance is None else dataclasses.asdict(report.endurance),
        "jobs": [_job_json(point) for point in report.points],
        "choice": None if report.choice is None else dataclasses.asdict(report.choice),
        "sustained": None if report.sustained is None else dataclasses.asdict(report.sustained),
        "written_bytes": report.written_bytes,
    }


def _job_json(point: Point) -> dict[str, Any]:
    load = point.workload
    return {
        "jobname": f"{load.kind}-{load.block_bytes}-{load.queue_depth}",
        "job options": {
            "rw": FIO_NAMES[load.kind],
            "bs": str(load.block_bytes),
            "iodepth": str(load.queue_depth),
            "ioengine": load.engine,
            "direct": "1",
        },
        "read": _side_json(point, "reads"),
        "write": _side_json(point, "writes"),
        "cpu_s_per_gb": point.cpu_s_per_gb,
        "spread": point.spread,
        "runs": [sample.rate for sample in point.samples],
    }


def _side_json(point: Point, side: str) -> dict[str, Any]:
    latencies = merge([getattr(sample, side) for sample in point.samples])
    blocks = sum(count for _, count in latencies)
    share = 0.5 if point.workload.kind == "mixed" else 1.0
    if blocks == 0:
        return {"io_bytes": 0, "bw_bytes": 0, "iops": 0.0, "clat_ns": {"N": 0, "max": 0, "percentile": {}}}
    moved = sum(sample.nbytes for sample in point.samples) * share
    return {
        "io_bytes": int(moved),
        "bw_bytes": int(point.rate * share),
        "iops": point.rate * share / point.workload.block_bytes,
        "clat_ns": {
            "N": blocks,
            "max": percentile(latencies, 100.0),
            "percentile": {f"{percent:.6f}": percentile(latencies, percent) for percent in PERCENTILES},
        },
    }
