"""Names of files that somebody else gives, and reading what they name: regular files, up to a limit."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from infinity.echo import quoted

_NAME_BYTES_MAX, _PATH_BYTES_MAX = 255, 4000  # a path leaves room for the names of what lies in it


def read_small(path: Path, limit_bytes: int) -> bytes:
    """The whole file.

    A FIFO, a device or a directory is refused, never waited for: what a device gives may have no end.

    Raises:
        OSError: it cannot be read, is no regular file, or holds more than `limit_bytes`; `strerror` says which.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except ValueError as error:  # a NUL, or what has no form in the file system's encoding
        raise OSError(errno.EINVAL, "no file can have this name") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        with open(fd, "rb", closefd=False) as file:
            data = file.read(limit_bytes + 1)
    finally:
        os.close(fd)
    if len(data) > limit_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {limit_bytes >> 10} KiB, the most that is read of such a file")
    return data


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
