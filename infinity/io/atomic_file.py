"""Functions that write small files. Even after a crash, such a file exists completely or not at all.

A file is written under another name, fsynced and renamed, and then the directory is fsynced. A failed fsync is never
repeated, because the kernel may have dropped the pages that it could not write (Rebello et al., USENIX ATC 2020). The
error is raised instead.
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
"""Function that tests install. It is called before and after every act, which is one operation on the file system.

The function's arguments are the name of the moment, such as "begin fsync" or "end rename", the path, the new path of a
rename, and the data of a write. In tests the function kills the process, or writes a journal.
"""

_observers: list[Observer] = []


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Call `observer` before and after every act in the block."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


@contextmanager
def act(name: str, path: Path, target: Path | None = None, data: bytes = b"") -> Iterator[None]:
    """Return a context for one act. An OSError in the context becomes a SwapIOError that names the act and the path."""
    for observer in _observers:
        observer(f"begin {name}", path, target, data)
    try:
        yield
    except OSError as error:
        raise SwapIOError(name, path=str(path), nbytes=len(data), errno=error.errno or 0) from error
    for observer in _observers:
        observer(f"end {name}", path, target, data)


def write_file(path: Path, parts: Iterable[bytes]) -> None:
    """Write `parts`, one after the other, as the file `path`, mode 0600.

    An older file of the same name exists until the new file replaces it.

    Raises:
        SwapIOError: the file was not written. `path` is still the old file, except after a failed fsync of the
            directory, when `path` may be the new file.
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
    """Open a new file.

    After a crash, a file with the temporary name may exist, and it may be a link to another file. It is therefore
    removed and never written to.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    if os.path.lexists(aside):
        remove(aside)
    with act("create", aside):
        return os.open(aside, flags, 0o600)


def _rename(aside: Path, path: Path) -> None:
    with act("rename", aside, path):
        os.replace(aside, path)


def sync_directory(path: Path) -> None:
    """Flush a directory, so that the creation, renaming and removal of files in it is durable. Raises SwapIOError."""
    with act("fsync directory", path):
        fsync(path)


def fsync(path: Path) -> None:
    """Flush a file or directory to disk with fsync. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file if it exists. The removal is durable only after sync_directory. Raises SwapIOError."""
    with act("unlink", path):
        path.unlink(missing_ok=True)
