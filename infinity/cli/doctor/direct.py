"""Whether a directory's file system takes direct I/O, tried on a small file that is gone at once."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from infinity import _native

_BLOCKS = (512, 4096, 1 << 20)
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
"""What a file system says to a block that is too small for its direct I/O."""


@dataclass(frozen=True)
class DirectIO:
    """What direct I/O was tried, and went well.

    Attributes:
        blocks: bytes of the blocks that were written and read back directly, ascending.
        used: whether infinity's swap files go around the page cache.
    """

    blocks: tuple[int, ...]
    used: bool


def try_direct(place: Path) -> DirectIO:
    """Make a file of 2 MiB at most, which loses its name before anything is written to it.

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
        return DirectIO(tuple(block for block in _BLOCKS if _moves(descriptor, block)), used)
    finally:
        os.close(descriptor)


def _moves(descriptor: int, block: int) -> bool:
    """Whether a block at an offset of its own size is written and read back directly."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:  # the file system has no direct I/O
        return False
    with mmap.mmap(-1, block) as out, mmap.mmap(-1, block) as back:
        out[:] = bytes([block.bit_length()]) * block
        try:
            moved = os.pwrite(descriptor, out, block) == os.preadv(descriptor, [back], block) == block
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            return False
        return moved and back[:] == out[:]
