"""Directories of each rank: one in each of nvme.paths, or that path itself for a process that trains alone."""

from __future__ import annotations

from pathlib import Path

from infinity.io.rank_paths import rank_name


def rank_path(path: Path, rank: int, count: int) -> Path:
    """Return the directory of one of `count` ranks in one of nvme.paths; for one process, that path itself."""
    return path if count == 1 else path / rank_name(rank, count)


def rank_paths(path: Path, count: int) -> list[Path]:
    """Return the directories of all ranks in one of nvme.paths."""
    return [rank_path(path, rank, count) for rank in range(count)]
