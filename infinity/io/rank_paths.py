"""How the directories of several ranks are named: each rank has one in each of nvme.paths."""

from __future__ import annotations

import re
from pathlib import Path

NAME = re.compile(r"rank-([0-9]{5})-of-([0-9]{5})")


def rank_name(rank: int, count: int) -> str:
    """The name of the directory of one of `count` ranks."""
    return f"rank-{rank:05}-of-{count:05}"


def is_rank_path(path: Path) -> bool:
    return bool(NAME.fullmatch(path.name))


def place_of(path: Path) -> Path:
    """What the commands are given for a store's directory: of nvme.paths the one that it is, or is in."""
    return path.parent if is_rank_path(path) else path


def rank_of(path: Path) -> tuple[int, int]:
    """Which rank of how many has its store in a directory; (0, 1) where it is no directory of a rank."""
    found = NAME.fullmatch(path.name)
    return (int(found[1]), int(found[2])) if found else (0, 1)
