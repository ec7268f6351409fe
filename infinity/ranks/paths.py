"""Directories of the ranks. Each rank has a directory in each path of nvme.paths. A process that trains alone uses the
paths themselves."""

from __future__ import annotations

from pathlib import Path

from infinity.io.rank_paths import rank_name


def rank_path(path: Path, rank: int, count: int) -> Path:
    """Return the directory of one of `count` ranks in a path of nvme.paths. For a single process this is the path
    itself."""
    return path if count == 1 else path / rank_name(rank, count)


def rank_paths(path: Path, count: int) -> list[Path]:
    """Return the directories of all ranks in a path of nvme.paths."""
    return [rank_path(path, rank, count) for rank in range(count)]
