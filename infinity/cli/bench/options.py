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
    size: int = argument("of the file that is measured on (default 2GiB)", types.size(SIZE_MIN), 2 << 30)
    engine: str = argument("default auto", types.word, "auto", choices=("auto", "io_uring", "threads"))
    json: Path | None = argument("write everything found as JSON", types.path, metavar="FILE")
    sustained: bool = argument("in place of the sweep: overwrite until the rate settles")
    limit_s: float | None = argument("in seconds (default 3600)", types.number(1, 7 * 86400), needs="sustained")
