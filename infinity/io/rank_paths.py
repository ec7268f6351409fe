"""Names of the directories of several ranks. Each rank has a directory in each directory of nvme.paths."""

from __future__ import annotations

import re
from pathlib import Path

NAME = re.compile(r"rank-([0-9]{5})-of-([0-9]{5})")


def rank_name(rank: int, count: int) -> str:
    """Return the name of the directory of one of `count` ranks."""
    return f"rank-{rank:05}-of-{count:05}"


def is_rank_path(path: Path) -> bool:
    return bool(NAME.fullmatch(path.name))


def place_of(path: Path) -> Path:
    """Return the path of nvme.paths to which a store's directory belongs: the directory itself, or its parent for a
    store of several ranks. `infinity checkpoint` takes this path as its argument."""
    return path.parent if is_rank_path(path) else path


def rank_of(path: Path) -> tuple[int, int]:
    """Return the rank whose store is in a directory, and the number of ranks; (0, 1) if there is no such rank."""
    found = NAME.fullmatch(path.name)
    return (int(found[1]), int(found[2])) if found else (0, 1)
