"""The options of infinity-bench. This module imports nothing slow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from infinity.cli import options as types
from infinity.cli.options import argument

SIZE_MIN = 16 << 20


@dataclass(frozen=True)
class BenchOptions:
    """The scope and the duration of the measurement."""

    path: tuple[Path, ...] = argument("directories, one per disk (default .)", types.path, (Path("."),), nargs="+")
    size: int = argument("size of the test file (default 2GiB)", types.size(SIZE_MIN), 2 << 30)
    engine: str = argument("default auto", types.word, "auto", choices=("auto", "io_uring", "threads"))
    json: Path | None = argument("write all results as JSON", types.path, metavar="FILE")
    sustained: bool = argument("instead of the sweep, overwrite until the rate is constant, for an hour at most")
