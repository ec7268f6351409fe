"""A directory that is there whole or not at all: written beside its place, on disk before it is renamed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infinity.errors import InfinityError, SwapIOError


@contextmanager
def written_aside(target: Path, doing: str) -> Iterator[Path]:
    """A fresh directory beside `target`, which the block fills and renames; what is left of it goes.

    Args:
        doing: for the message, such as "saving to".

    Raises:
        InfinityError: the disk is full, or cannot be written; nothing is left behind.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise InfinityError(f"cannot write to {target.parent}: {error.strerror}") from error
    try:
        yield aside
    except SwapIOError:
        raise
    except OSError as error:
        raise InfinityError(
            f"{doing} {target} failed: {error.strerror or error}. Nothing there was changed; free space or choose "
            f"another directory."
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # ours, made above


def put_in_place(aside: Path, target: Path) -> None:
    """Have everything on disk and rename it to `target`, which is missing or an empty directory. Raises OSError."""
    sync_tree(aside)
    os.chmod(aside, 0o755)
    os.replace(aside, target)
    sync(target.parent)


def sync_tree(directory: Path) -> None:
    """fsync every file and directory. Raises OSError."""
    for path in directory.rglob("*"):
        sync(path)
    sync(directory)


def sync(path: Path) -> None:
    """fsync a file or directory. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
