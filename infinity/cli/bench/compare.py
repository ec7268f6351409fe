"""`infinity-bench compare A.json B.json`: two surveys, job by job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Console

from infinity.cli.bench.report import SCHEMA, VERSION, table
from infinity.echo import quoted
from infinity.errors import BenchError
from infinity.files import read_regular
from infinity.strict import parse_json

_FILE_BYTES_MAX = 16 << 20
_VERSIONS = (1, VERSION)
"""The jobs have the same form in all of them."""


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


class _Kept(BaseModel):
    """What is read of a survey; the rest of it is ignored."""

    model_config = ConfigDict(frozen=True)


class _Side(_Kept):
    bw_bytes: float = Field(ge=0, allow_inf_nan=False)


class _Job(_Kept):
    jobname: str
    read: _Side
    write: _Side
    spread: float = Field(ge=0, allow_inf_nan=False)

    @property
    def rate(self) -> float:
        return self.read.bw_bytes + self.write.bw_bytes


class _Path(_Kept):
    path: str
    jobs: list[_Job]


class SurveyFile(_Kept):
    """A survey that was written with --json."""

    paths: list[_Path]


def load_survey(path: Path) -> SurveyFile:
    """Raises BenchError: not readable, or not a survey of this version."""
    try:
        found = parse_json(read_regular(path.expanduser(), _FILE_BYTES_MAX, follow=True).decode())
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise BenchError(f"cannot read {path}: not valid JSON: {error}") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise BenchError(f"{path} is not a survey of infinity-bench (--json)")
    version = found.get("version")
    if version not in _VERSIONS:
        known = " and ".join(map(str, _VERSIONS))
        raise BenchError(f"{path} has version {quoted(version)} of the schema; this infinity reads {known}")
    try:
        return SurveyFile.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise BenchError(f"{path} is not a survey as infinity-bench writes it: {where}: {first['msg']}") from None


def compare(before: SurveyFile, after: SurveyFile) -> list[Change]:
    """The jobs that both have, and that moved something. Paths are matched by name, or, where each has one, with each
    other."""
    changes = []
    for one, other in _matched(before.paths, after.paths):
        jobs = {job.jobname: job for job in other.jobs}
        for job in one.jobs:
            again = jobs.get(job.jobname)
            if again is None or not job.rate or not again.rate:
                continue
            beyond = abs(again.rate / job.rate - 1) > max(job.spread, again.spread)
            changes.append(Change(other.path, job.jobname, job.rate, again.rate, beyond))
    return changes


def _matched(before: list[_Path], after: list[_Path]) -> list[tuple[_Path, _Path]]:
    if len(before) == len(after) == 1:
        return [(before[0], after[0])]
    named = {report.path: report for report in after}
    return [(report, named[report.path]) for report in before if report.path in named]


def print_changes(console: Console, changes: list[Change]) -> None:
    """Raises BenchError where the two have nothing in common."""
    if not changes:
        raise BenchError("the two surveys have no job in common")
    rows = [
        (
            change.path,
            change.job,
            f"{change.before / 1e9:.2f}",
            f"{change.after / 1e9:.2f}",
            f"{change.ratio:.2f}{' *' if change.beyond_noise else ''}",
        )
        for change in changes
    ]
    title = "GB/s; * = more than the spread of the runs"
    console.print(table(title, ("path", "job", "before", "after", "after / before"), rows, words=2))
