"""Whether a directory's file system takes direct I/O, tried on a small file that is gone at once."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path

from infinity import _native
from infinity.sizes import PAGE_BYTES

_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
"""What a file system says to a block that is too small for its direct I/O."""


def takes_direct(place: Path) -> bool:
    """Whether infinity's swap files go around the page cache, and a block of 4 KiB does. The file loses its name before
    anything is written to it.

    Args:
        place: the name of the file, which must not be there.

    Raises:
        OSError: the file cannot be made, or not written to.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(place, flags, 0o600)
    try:
        try:
            file = _native.File(str(place))
        finally:
            os.unlink(place)
        used = file.direct
        file.close()
        return used and _moves(descriptor)
    finally:
        os.close(descriptor)


def _moves(descriptor: int) -> bool:
    """Whether a block at an offset of its own size is written and read back directly."""
    with mmap.mmap(-1, PAGE_BYTES) as out, mmap.mmap(-1, PAGE_BYTES) as back:
        out[:] = b"i" * PAGE_BYTES
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
            moved = os.pwrite(descriptor, out, PAGE_BYTES) == os.preadv(descriptor, [back], PAGE_BYTES) == PAGE_BYTES
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            return False
        return moved and back[:] == out[:]
