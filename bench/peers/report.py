"""Report of a run: tables, JSON and bounds, computed from the measured steps."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.bounds import median_ratio, summarise_infinity
from peers.contenders import setting_of

Steps = list[dict[str, Any]]


@dataclass
class Run:
    """All measurements of a run.

    Attributes:
        facts: by contender, its answer when it was ready.
        warmup, steps: by contender, in the order in which they were made; a measured step has its `round`, and its
            `replay` if the contender can replay.
        disk: by contender that swaps, bytes per second of the mixed probe in its own files after each round.
        failures: by contender, the reason why it is missing.
    """

    interleaved: bool
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    warmup: dict[str, Steps] = field(default_factory=dict)
    steps: dict[str, Steps] = field(default_factory=dict)
    disk: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def _bytes_per_parameter(steps: Steps, key: str, numel: int) -> float:
    return float(statistics.median(step[key] for step in steps)) / numel


def summarise(run: Run) -> dict[str, dict[str, Any]]:
    """Return for each contender the median seconds, spread, ratios to the peers, memory and traffic, and infinity's
    bounds."""
    summary: dict[str, dict[str, Any]] = {}
    for name, steps in run.steps.items():
        facts, every = run.facts[name], run.warmup[name] + steps
        seconds, setting = [step["seconds"] for step in steps], setting_of(name)
        summary[name] = {
            "median_s": statistics.median(seconds),
            "min_s": min(seconds),
            "max_s": max(seconds),
            "cpu_s": statistics.median(step["cpu_seconds"] for step in steps),
            "step_peak_rss_bytes": max(step["peak_rss_bytes"] for step in steps),
            "run_peak_rss_bytes": max([facts["setup_peak_rss_bytes"], *(step["peak_rss_bytes"] for step in every)]),
            "read_bytes_per_parameter": _bytes_per_parameter(steps, "read_bytes", facts["numel"]),
            "written_bytes_per_parameter": _bytes_per_parameter(steps, "written_bytes", facts["numel"]),
            "disk_bytes_per_s": statistics.median(run.disk[name]) if run.disk.get(name) else None,
            "losses": [step["loss"] for step in every],
            **(summarise_infinity(setting, run.steps) if setting else {}),
        }
    for peer in ("torch", "deepspeed"):
        for name, row in summary.items():
            row[f"time_ratio_to_{peer}"] = median_ratio(run.steps[name], run.steps.get(peer, []))
    if "deepspeed" in summary:
        for row in summary.values():
            for key in ("step_peak_rss", "run_peak_rss"):
                row[f"{key}_ratio_to_deepspeed"] = row[f"{key}_bytes"] / summary["deepspeed"][f"{key}_bytes"]
    return summary


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose first column is aligned left and whose other columns are aligned right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in [header, *rows]
    ]
    return "\n".join([lines[0], "─" * len(lines[0]), *lines[1:]])


def _bound_row(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    return (
        name,
        f"{row['cached_bytes'] / 1e9:.2f}",
        _number(row["processor_s"]),
        _number(row["io_s"]),
        _number(row["median_s"]),
        _number(row["of_bound"]),
        _number(row["update_s"]),
        _number(row["fetch_wait_s"]),
        "–" if row["hidden_update_share"] is None else f"{row['hidden_update_share']:.0%}",
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def format_summary(run: Run, summary: dict[str, dict[str, Any]]) -> str:
    """Return the tables and the notes below them."""
    header = (
        "contender",
        "s/step",
        "min–max",
        "time/DS",
        "time/torch",
        "peak RSS",
        "RSS/DS",
        "with set-up",
        "read B/p",
        "written B/p",
        "disk GB/s",
        "CPU s",
    )
    rows = [
        (
            name,
            f"{row['median_s']:.2f}",
            f"{row['min_s']:.2f}–{row['max_s']:.2f}",
            _times(row["time_ratio_to_deepspeed"]),
            _times(row["time_ratio_to_torch"]),
            f"{row['step_peak_rss_bytes'] / 1e9:.2f} GB",
            _times(row.get("step_peak_rss_ratio_to_deepspeed")),
            f"{row['run_peak_rss_bytes'] / 1e9:.2f} GB",
            f"{row['read_bytes_per_parameter']:.1f}",
            f"{row['written_bytes_per_parameter']:.1f}",
            f"{row['disk_bytes_per_s'] / 1e9:.2f}" if row["disk_bytes_per_s"] else "–",
            f"{row['cpu_s']:.1f}",
        )
        for name, row in summary.items()
    ]
    parts = [format_table(header, rows), *(f"  {name}: {run.facts[name].get('describes', '')}" for name in summary)]
    if bounded := [_bound_row(name, row) for name, row in summary.items() if "of_bound" in row]:
        columns = (
            "bounds",
            "cached GB",
            "processor s",
            "I/O s",
            "step s",
            "step/bound",
            "update s",
            "waits s",
            "hidden",
        )
        parts += ["", format_table(columns, bounded)]
    return "\n".join([*parts, "", *_notes(run, summary)])


def _notes(run: Run, summary: dict[str, dict[str, Any]]) -> list[str]:
    notes = []
    rates = [row["disk_bytes_per_s"] for row in summary.values() if row["disk_bytes_per_s"]]
    if rates and max(rates) > 1.15 * min(rates):
        notes.append("the disk is faster under some contenders' files than under others': read times beside `disk`")
    if not run.interleaved:
        notes.append("the contenders ran one after the other, not in turns, so the ratios carry the machine's drift")
    notes += [f"{name} is missing: {reason}" for name, reason in run.failures.items()]
    for name, steps in run.steps.items():
        share = statistics.median(step["idle_cpu_share"] for step in steps)
        if share > 0.02:
            notes.append(f"{name} used {share:.0%} of a core while others had their turn, whose times are too long")
    first = {name: row["losses"][0] for name, row in summary.items()}
    if first and max(first.values()) - min(first.values()) > 0.01 * max(first.values()):
        notes.append(f"the first losses differ, so this is not the same training: {first}")
    return notes


def machine_facts(swap_dir: Path) -> dict[str, Any]:
    """Return cores, memory, kernel, the swap directory's file system and the date."""
    model = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    found = subprocess.run(
        ["findmnt", "--noheadings", "--output", "FSTYPE,SOURCE", "--target", str(swap_dir)],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": model[0] if model else platform.processor(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "swap_file_system": " ".join(found.stdout.split()) or "unknown",
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def write_result(path: Path, result: Mapping[str, Any], places: Mapping[Path, str]) -> None:
    """Write a JSON file without this machine's paths.

    Args:
        path: the file to write.
        result: contents of the file.
        places: replacement texts by directory, also for directories inside messages; the first match is used.
    """
    text = json.dumps(result, indent=2)
    for place, name in places.items():
        text = text.replace(str(place), name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
