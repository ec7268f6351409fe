"""Directories that exist completely or not at all: they are written under a temporary name, synced to disk and
renamed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infinity.errors import InfinityError, SwapIOError
from infinity.io import atomic_file


@contextmanager
def written_aside(target: Path, doing: str) -> Iterator[Path]:
    """Create a temporary directory beside `target`. The `with` block fills and renames this directory. If the block
    fails, the temporary directory is removed.

    Args:
        target: the directory that is to be written.
        doing: the beginning of the error message, such as "saving to".

    Raises:
        InfinityError: the disk is full or cannot be written; nothing is left behind.
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
        shutil.rmtree(aside, ignore_errors=True)  # created above


@contextmanager
def failing(target: Path, doing: str) -> Iterator[None]:
    """Convert an OSError of the `with` block to an InfinityError. The message names the failed action."""
    try:
        yield
    except SwapIOError:
        raise
    except OSError as error:
        raise InfinityError(
            f"{doing} {target} failed: {error.strerror or error}. The directory was not changed; free space or choose "
            f"another directory."
        ) from error


def is_free(target: Path) -> bool:
    """Return whether a directory can be renamed to `target`, because `target` is missing or is an empty directory."""
    return not target.exists() or (target.is_dir() and not any(target.iterdir()))


def put(aside: Path, target: Path, *, last: str) -> set[str]:
    """Move the directory `aside` to `target`: by put_in_place() if `target` is free, otherwise by move_into().

    Returns:
        The result of move_into(); an empty set after put_in_place().
    """
    if not is_free(target):
        return move_into(aside, target, last=last)
    put_in_place(aside, target)
    return set()


def put_in_place(aside: Path, target: Path) -> None:
    """Sync the directory `aside` with all its contents, and rename it to `target`.

    `target` is missing or an empty directory. Raises OSError.
    """
    sync_tree(aside)
    os.chmod(aside, 0o755)
    os.replace(aside, target)
    atomic_file.fsync(target.parent)


def move_into(aside: Path, target: Path, *, last: str) -> set[str]:
    """Sync the directory `aside` with all its contents, and move its entries into the directory `target`.

    An entry replaces an entry of the same name in `target`. If both entries are directories, the entries of the new
    directory are moved into the existing directory in the same way.

    Args:
        aside: the directory whose entries are moved.
        target: an existing directory.
        last: the name of the entry that is moved last: readers do not use the new files before this entry exists.

    Returns:
        The names of the entries.

    Raises:
        OSError: an entry cannot be moved. Entries that were moved before the error stay in `target`.
    """
    sync_tree(aside)
    entries = sorted(aside.iterdir(), key=lambda path: path.name == last)
    for path in entries:
        if path.is_dir() and (target / path.name).is_dir():
            move_into(path, target / path.name, last=last)
        else:
            os.replace(path, target / path.name)
    atomic_file.fsync(target)
    return {path.name for path in entries}


def sync_tree(directory: Path) -> None:
    for path in directory.rglob("*"):
        atomic_file.fsync(path)
    atomic_file.fsync(directory)
