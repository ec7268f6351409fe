"""How the directories of several ranks are named: each rank has one in each of nvme.paths."""

from __future__ import annotations

import re
from pathlib import Path

NAME = re.compile(r"rank-([0-9]{5})-of-([0-9]{5})")


def rank_path(path: Path, rank: int, count: int) -> Path:
    """The directory of one of `count` ranks in one of nvme.paths; of one process that path itself."""
    return path if count == 1 else path / f"rank-{rank:05}-of-{count:05}"


def is_rank_path(path: Path) -> bool:
    return bool(NAME.fullmatch(path.name))


def place_of(path: Path) -> Path:
    """What the commands are given for a store's directory: of nvme.paths the one that it is, or is in."""
    return path.parent if is_rank_path(path) else path


def rank_of(path: Path) -> tuple[int, int]:
    """Which rank of how many has its store in a directory; (0, 1) where it is no directory of a rank."""
    found = NAME.fullmatch(path.name)
    return (int(found[1]), int(found[2])) if found else (0, 1)


def rank_paths(path: Path, count: int) -> list[Path]:
    """The directories of all ranks in one of nvme.paths."""
    return [rank_path(path, rank, count) for rank in range(count)]
