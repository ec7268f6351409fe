"""Safe access to files: reading small files of unknown origin, replacing files, and checking names that users give.

Only regular files are read, and no more bytes than the caller requests. A FIFO, a device or a socket in place of a file
would block the reader, or deliver data without end. The kind of a file is determined from the open descriptor, because
another file can be moved to the path at any time.
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

from infinity.quoting import quoted
from infinity.sizes import format_bytes

# a path of at most 4000 bytes leaves room for the names of files in the directory
_NAME_BYTES_MAX, _PATH_BYTES_MAX = 255, 4000
_READ_BYTES = 64 << 20
_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class UnusableFileError(OSError):
    """The path is not that of a regular file, or the file is too large to be one of infinity's files."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(errno.EINVAL, problem, str(path))


@contextmanager
def opened(path: Path, *, follow: bool = False) -> Iterator[tuple[int, int]]:
    """Open a regular file for reading. Yields the file's descriptor and its size in bytes.

    Args:
        path: path of the file.
        follow: whether the target is opened if `path` is a symbolic link; False: a symbolic link is an error.

    Raises:
        UnusableFileError: the path does not name a regular file.
        OSError: the file cannot be opened, or is a directory or (without `follow`) a symbolic link.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except ValueError as error:  # the path has a NUL, or characters that no file name can have
        raise UnusableFileError(path, f"is not a valid file name: {error}") from error
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
    """Return the first `nbytes` bytes of a file, or fewer if the file was truncated after its size was determined.
    Raises OSError."""
    parts, at = [], 0
    while at < nbytes:
        part = os.pread(descriptor, min(nbytes - at, _READ_BYTES), at)
        if not part:
            break
        parts.append(part)
        at += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_into(descriptor: int, into: memoryview, at: int) -> int:
    """Fill memory with the bytes of a file from byte `at` on. Raises OSError.

    Returns:
        The number of bytes read, which is smaller than the memory if the file ends.
    """
    done = 0
    while done < len(into):
        part = os.preadv(descriptor, [into[done : done + _READ_BYTES]], at + done)
        if not part:
            break
        done += part
    return done


def read_regular(path: Path, bytes_max: int, *, follow: bool = False) -> bytes:
    """Return all bytes of a regular file.

    Raises the errors of opened(), and UnusableFileError for a file of more than `bytes_max` bytes.
    """
    with opened(path, follow=follow) as (descriptor, nbytes):
        if nbytes > bytes_max:
            raise UnusableFileError(
                path, f"has {format_bytes(nbytes)}, but at most {format_bytes(bytes_max)} can be read"
            )
        return read(descriptor, nbytes)


def write(descriptor: int, data: bytes | memoryview, at: int = 0) -> None:
    """Write all of `data` at byte `at` of a file. Raises OSError."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, at)
        rest, at = rest[written:], at + written


def nearest(path: Path) -> Path:
    """Return `path` as an absolute path if it exists; otherwise return its nearest parent that exists.

    Raises OSError if the system does not say whether a path exists.
    """
    there = path.expanduser().absolute()
    return next(each for each in (there, *there.parents) if each.exists())


def require_possible(name: str) -> None:
    """Raise ValueError for a text that cannot be the name of any file or directory.

    Such a text is empty, too long or not UTF-8, contains a NUL, or begins with ~ and the name of a user who does not
    exist.
    """
    if not name.strip():
        raise ValueError(f"{quoted(name)} is not a valid name of a file or directory")
    try:
        encoded = name.encode()
    except UnicodeEncodeError as error:  # undecodable bytes of the command line, or half of a surrogate pair
        raise ValueError(f"{quoted(name)} is not UTF-8") from error
    if b"\0" in encoded or len(encoded) > _PATH_BYTES_MAX or max(map(len, encoded.split(b"/"))) > _NAME_BYTES_MAX:
        raise ValueError(f"{quoted(name)} cannot be the name of a file or directory")
    try:
        Path(name).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{quoted(name)}: there is no such user, or the user has no known home directory") from error


def require_different(paths: Iterable[Path]) -> None:
    """Raise ValueError if two paths lead to the same directory, also through links or mounts.

    Directories that do not exist yet are compared only by their names.
    """
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
    """Rename `aside` to `path` at the end of the `with` block. The block must write the file `aside`.

    If the block or the rename fails, `aside` is removed and `path` is unchanged.

    Args:
        aside: the temporary file.
        path: the final name.
        rename: function that renames.
    """
    try:
        yield
        rename(aside, path)
    except BaseException:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """Yield a new text file, to which the `with` block writes. When the block ends without an error, the file replaces
    `path`.

    An existing file is never overwritten in place, because the file may be a link to another file.

    Raises:
        OSError: the file cannot be written; `path` is unchanged.
    """
    aside = path.with_name(f".infinity-{uuid.uuid4().hex}")
    with renamed(aside, path), aside.open("x", encoding="utf-8") as file:
        yield file


def require_replaceable(path: Path) -> None:
    """Raise OSError if replacing() cannot replace `path`."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a directory", str(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    aside = path.with_name(f".infinity-{uuid.uuid4().hex}")
    aside.touch(exist_ok=False)
    aside.unlink()
