"""The results of a survey, as JSON for programs and as a swap config for infinity.

[Note: the JSON] `schema` and `version` identify the format. Keys may be added without a new version, but no key is
removed or changed. All keys except `schema`, `version`, `infinity` and `time` are the fields of BenchReport. Sizes are
in bytes, rates in bytes per second.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from infinity import __version__
from infinity.cli.bench.sustained import SustainedRate
from infinity.cli.bench.sweep import SweepPoint
from infinity.io.disk_profile import DiskProfile

SCHEMA, VERSION = "infinity-bench", 3


@dataclass(frozen=True)
class DiskReport:
    """The results for the disk of one directory. They come from a sweep, or from writing until the rate was constant.

    Attributes:
        written_bytes: bytes that the survey wrote.
        points: all settings that the sweep measured, with their rates.
        choice: the recommended settings and the rates with these settings; None if there was no sweep.
        sustained: the result of --sustained; None if the option was not given.
    """

    path: Path
    written_bytes: int
    points: Sequence[SweepPoint] = ()
    choice: DiskProfile | None = None
    sustained: SustainedRate | None = None


@dataclass(frozen=True)
class BenchReport:
    """All results of one call of infinity-bench.

    `reason` says why infinity-bench chose the I/O engine and the engine's flags.
    """

    engine: str
    reason: str
    paths: Sequence[DiskReport]

    def to_json(self) -> dict[str, Any]:
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        head = {"schema": SCHEMA, "version": VERSION, "infinity": __version__, "time": now}
        return head | dict(to_jsonable_python(self))


def swap_config(choices: Sequence[DiskProfile]) -> str:
    """Return a swap config in YAML, with the settings that the slowest of the disks needs."""
    block = max(choice.block_bytes for choice in choices)
    in_flight = max(choice.in_flight_bytes for choice in choices)
    rate = sum(choice.mixed_rate for choice in choices)
    paths = json.dumps([str(Path(choice.path) / "infinity-swap") for choice in choices])
    return (
        f"# measured {choices[0].measured}: {rate / 1e9:.2f} GB/s, half reads and half writes\n"
        "weights: auto\n"
        "optimizer: nvme\n"
        "activations: auto\n"
        "# memory: {device: 20GiB, host: 48GiB}   # omitted = measured\n"
        f"nvme: {{paths: {paths}, engine: auto, block: {block >> 10}KiB, in_flight: {in_flight >> 10}KiB}}\n"
    )
