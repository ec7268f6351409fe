"""Small files that are there whole or not at all, whatever happens: written aside, fsynced, renamed, directory fsynced.

A failed fsync is never tried again: the kernel may have forgotten what it could not write (Rebello et al., USENIX ATC
2020), so the file is given up and the error raised.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from infinity import files
from infinity.errors import SwapIOError

ASIDE = ".aside"

Observer = Callable[[str, Path, Path | None, bytes], None]
"""Told of every act before it begins and after it ended: "begin fsync", "end rename", …; its path, the new name of a
rename, and what a write writes. For tests: killing there, or keeping a journal."""

_observers: list[Observer] = []


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Tell `observer` of every act in the block."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


@contextmanager
def act(name: str, path: Path, target: Path | None = None, data: bytes = b"") -> Iterator[None]:
    """One step of making something durable. An OSError becomes a SwapIOError that names the step and the path."""
    for observer in _observers:
        observer(f"begin {name}", path, target, data)
    try:
        yield
    except OSError as error:
        raise SwapIOError(name, path=str(path), nbytes=len(data), errno=error.errno or 0) from error
    for observer in _observers:
        observer(f"end {name}", path, target, data)


def write_file(path: Path, parts: Iterable[bytes]) -> None:
    """Put `parts`, one after the other, into the file `path`, mode 0600; what was there before is there until then.

    Raises:
        SwapIOError: `path` is as it was, but for a failure of the directory's fsync, after which either may be there.
    """
    aside = path.with_name(path.name + ASIDE)
    data = b"".join(parts)
    with files.renamed(aside, path, _rename):
        descriptor = _create(aside)
        try:
            with act("write", aside, data=data):
                files.write(descriptor, data)
            with act("fsync", aside):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    sync_directory(path.parent)


def _create(aside: Path) -> int:
    """A new file. What a crash left of its name is removed and not written to: it may be a link to another file."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    if os.path.lexists(aside):
        remove(aside)
    with act("create", aside):
        return os.open(aside, flags, 0o600)


def _rename(aside: Path, path: Path) -> None:
    with act("rename", aside, path):
        os.replace(aside, path)


def sync_directory(path: Path) -> None:
    """Make what was created, renamed and removed in a directory durable. Raises SwapIOError."""
    with act("fsync directory", path):
        fsync(path)


def fsync(path: Path) -> None:
    """fsync a file or directory. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, if it is there. Not durable by itself. Raises SwapIOError."""
    with act("unlink", path):
        path.unlink(missing_ok=True)
