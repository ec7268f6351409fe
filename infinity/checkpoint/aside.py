"""Directories that exist whole or not at all: written beside their place, synced to disk, and then renamed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infinity.errors import InfinityError, SwapIOError
from infinity.io import durable


@contextmanager
def written_aside(target: Path, doing: str) -> Iterator[Path]:
    """A new directory beside `target`, which the block fills and renames. If the block fails, the directory is removed.

    Args:
        doing: the beginning of the error's message, such as "saving to".

    Raises:
        InfinityError: the disk is full, or cannot be written; nothing is left behind.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise InfinityError(f"cannot write to {target.parent}: {error.strerror}") from error
    try:
        with failing(target, doing):
            yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # ours, made above


@contextmanager
def failing(target: Path, doing: str) -> Iterator[None]:
    """An OSError that leaves this context says what was done. Raises InfinityError in its place."""
    try:
        yield
    except SwapIOError:
        raise
    except OSError as error:
        raise InfinityError(
            f"{doing} {target} failed: {error.strerror or error}. Nothing there was changed; free space or choose "
            f"another directory."
        ) from error


def is_free(target: Path) -> bool:
    """Whether a directory can be put in a place as a whole: nothing is there, or an empty directory."""
    return not target.exists() or (target.is_dir() and not any(target.iterdir()))


def put(aside: Path, target: Path, *, last: str) -> set[str]:
    """put_in_place() where the place is free, and move_into() where it is not: then what move_into() returns."""
    if not is_free(target):
        return move_into(aside, target, last=last)
    put_in_place(aside, target)
    return set()


def put_in_place(aside: Path, target: Path) -> None:
    """Sync the directory `aside` with all that is in it, and rename it to `target`, which is missing or an empty
    directory. Raises OSError."""
    sync_tree(aside)
    os.chmod(aside, 0o755)
    os.replace(aside, target)
    durable.fsync(target.parent)


def move_into(aside: Path, target: Path, *, last: str) -> set[str]:
    """Sync the directory `aside` with all that is in it, and move each entry into the directory `target`, where it
    replaces an entry of the same name; of two directories of the same name the entries are treated like this.

    Args:
        last: the name of the entry that is moved last: readers find a new set only once this entry is there.

    Returns:
        The names of the entries.

    Raises:
        OSError: an entry cannot be moved; those before it are in `target`.
    """
    sync_tree(aside)
    entries = sorted(aside.iterdir(), key=lambda path: path.name == last)
    for path in entries:
        if path.is_dir() and (target / path.name).is_dir():
            move_into(path, target / path.name, last=last)
        else:
            os.replace(path, target / path.name)
    durable.fsync(target)
    return {path.name for path in entries}


def sync_tree(directory: Path) -> None:
    for path in directory.rglob("*"):
        durable.fsync(path)
    durable.fsync(directory)
