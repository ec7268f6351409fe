"""Opening small files that anybody may have put there: only regular ones, and no more of them than their reader wants;
writing files that nothing depends on; and the names of files that anybody may give.

A FIFO, a device or a socket in a file's place would hang its reader or feed it without end. What a file is, is asked of
the open descriptor: a path may name something else the next time it is looked at.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from infinity.echo import quoted
from infinity.sizes import format_bytes

_NAME_BYTES_MAX, _PATH_BYTES_MAX = 255, 4000  # a path leaves room for the names of what lies in it
_READ_BYTES = 64 << 20
_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class UnusableFileError(OSError):
    """What has a file's name is no regular file, or a much larger one: nothing that infinity wrote."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(errno.EINVAL, problem, str(path))


@contextmanager
def opened(path: Path, *, follow: bool = False) -> Iterator[tuple[int, int]]:
    """A regular file, open for reading: its descriptor and its size in bytes.

    Args:
        follow: symbolic links.

    Raises:
        UnusableFileError: it is no regular file.
        OSError: it cannot be opened, or is a directory or a symbolic link.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except ValueError as error:  # a NUL, or bytes that no file system has
        raise UnusableFileError(path, f"has no name of a file: {error}") from error
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise UnusableFileError(path, "is a socket or a device, not a regular file") from error
        if error.errno == errno.ELOOP and path.is_symlink():
            raise OSError(errno.ELOOP, "it is a symbolic link", str(path)) from error
        raise
    try:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(found.st_mode):
            what = next((name for test, name in _KINDS if test(found.st_mode)), "something else")
            raise UnusableFileError(path, f"is {what}, not a regular file")
        yield descriptor, found.st_size
    finally:
        os.close(descriptor)


def read(descriptor: int, nbytes: int) -> bytes:
    """The first `nbytes` of a file; fewer where it ends before: it may have been cut meanwhile. Raises OSError."""
    parts, at = [], 0
    while at < nbytes:
        part = os.pread(descriptor, min(nbytes - at, _READ_BYTES), at)
        if not part:
            break
        parts.append(part)
        at += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_regular(path: Path, bytes_max: int, *, follow: bool = False) -> bytes:
    """All of a regular file of no more than `bytes_max`. Raises what opened() does, UnusableFileError for a larger
    one."""
    with opened(path, follow=follow) as (descriptor, nbytes):
        if nbytes > bytes_max:
            raise UnusableFileError(path, f"has {format_bytes(nbytes)}, and {format_bytes(bytes_max)} at most are read")
        return read(descriptor, nbytes)


def write(descriptor: int, data: bytes | memoryview, at: int = 0) -> None:
    """Write all of `data` at byte `at` of a file. Raises OSError."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, at)
        rest, at = rest[written:], at + written


def require_possible(name: str) -> None:
    """Raises ValueError for a text that can never name a file or directory: an empty one, one that is too long, is not
    UTF-8, has a NUL, or begins with the home of nobody."""
    if not name.strip():
        raise ValueError(f"{quoted(name)} is no name of a file or directory")
    try:
        encoded = name.encode()
    except UnicodeEncodeError as error:  # bytes of the command line, or half of a pair of JSON or YAML
        raise ValueError(f"{quoted(name)} is not UTF-8") from error
    if b"\0" in encoded or len(encoded) > _PATH_BYTES_MAX or max(map(len, encoded.split(b"/"))) > _NAME_BYTES_MAX:
        raise ValueError(f"no file or directory can be called {quoted(name)}")
    try:
        Path(name).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{quoted(name)}: there is no such user, or no home is known") from error


def require_different(paths: Iterable[Path]) -> None:
    """Raises ValueError where two paths name the same directory, by links or mounts. A directory that is not there yet
    has its name alone."""
    seen: dict[object, Path] = {}
    for path in paths:
        place = os.path.realpath(path.expanduser())
        try:
            info = os.stat(place)
            identity: object = (info.st_dev, info.st_ino)
        except OSError:
            identity = place
        if identity in seen:
            both = f"{quoted(str(seen[identity]))} and {quoted(str(path))}"
            raise ValueError(f"{both} are the same directory: name each disk once")
        seen[identity] = path


@contextmanager
def renamed(aside: Path, path: Path, rename: Callable[[Path, Path], None] = os.replace) -> Iterator[None]:
    """Rename `aside`, which the block writes, to `path`. When the block or the rename fails, `aside` is removed and
    `path` is as it was."""
    try:
        yield
        rename(aside, path)
    except BaseException:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A new file, which takes the place of `path` when the block ends without an error. What has that name now, or any
    other, is never written to: it may be a link to something else.

    Raises:
        OSError: it cannot be written; `path` is as it was.
    """
    aside = path.with_name(f".infinity-{uuid.uuid4().hex}")
    with renamed(aside, path), aside.open("x", encoding="utf-8") as file:
        yield file


def require_replaceable(path: Path) -> None:
    """Raises OSError where replacing() would."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a directory", str(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    aside = path.with_name(f".infinity-{uuid.uuid4().hex}")
    aside.touch(exist_ok=False)
    aside.unlink()
