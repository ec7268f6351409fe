"""`infinity-bench compare A.json B.json`: two surveys, job by job."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from infinity.cli.bench.report import SCHEMA, VERSION
from infinity.errors import BenchError


@dataclass(frozen=True)
class Change:
    """One job in both files. `beyond_noise`: the rates differ by more than either run's spread."""

    path: str
    job: str
    before: float
    after: float
    beyond_noise: bool

    @property
    def ratio(self) -> float:
        return self.after / self.before


def load_survey(path: Path) -> dict[str, Any]:
    """Raises BenchError: not readable, or not a survey of this version."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BenchError(f"cannot read {path}: {error}") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise BenchError(f"{path} is not a survey of infinity-bench (--json)")
    if found.get("version") != VERSION:
        raise BenchError(f"{path} has version {found.get('version')} of the schema; this infinity reads {VERSION}")
    return found


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[Change]:
    """The jobs that both have. Paths are matched by name, or, where each has one, with each other."""
    changes = []
    for one, other in _matched(before["paths"], after["paths"]):
        jobs = {job["jobname"]: job for job in other["jobs"]}
        for job in one["jobs"]:
            if job["jobname"] not in jobs:
                continue
            pair = (job, jobs[job["jobname"]])
            rates = [side["read"]["bw_bytes"] + side["write"]["bw_bytes"] for side in pair]
            noise = max(side["spread"] for side in pair)
            beyond = abs(rates[1] / rates[0] - 1) > noise
            changes.append(Change(other["path"], job["jobname"], rates[0], rates[1], beyond))
    return changes


def _matched(before: list[Any], after: list[Any]) -> list[tuple[Any, Any]]:
    if len(before) == len(after) == 1:
        return [(before[0], after[0])]
    named = {report["path"]: report for report in after}
    return [(report, named[report["path"]]) for report in before if report["path"] in named]


def print_changes(console: Console, changes: list[Change]) -> None:
    """Raises BenchError where the two have nothing in common."""
    if not changes:
        raise BenchError("the two surveys have no job in common")
    table = Table(title="GB/s; * = more than the spread of the runs")
    for name in ("path", "job", "before", "after", "after / before"):
        table.add_column(name, justify="left" if name in ("path", "job") else "right")
    for change in changes:
        mark = " *" if change.beyond_noise else ""
        table.add_row(
            change.path,
            change.job,
            f"{change.before / 1e9:.2f}",
            f"{change.after / 1e9:.2f}",
            f"{change.ratio:.2f}{mark}",
        )
    console.print(table)
