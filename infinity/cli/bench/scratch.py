"""The scratch files of infinity-bench.

infinity-bench creates each scratch file and never writes to an existing file. Each scratch file is removed whenever the
program ends.

A scratch file is unlinked as soon as it is open. The system therefore frees the file's space when the process ends,
even by Ctrl-C, an exception or a kill.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from infinity import _native
from infinity.errors import BenchError
from infinity.sizes import format_bytes

_KEPT_SHARE, _KEPT_BYTES = 0.05, 2 << 30
"""A share and a number of bytes. The smaller space stays free, because full disks are slow and others need space."""


class ScratchFile:
    """One unlinked file of `nbytes` bytes under `directory`, preallocated.

    Args:
        directory: an existing directory.
        nbytes: size of the file.
        direct: bypass the page cache.

    Raises:
        BenchError: the directory is not writable, or less than 5 % of the disk, and less than 2 GiB, would stay free.
        OSError: the directory does not exist.
    """

    def __init__(self, directory: Path, nbytes: int, *, direct: bool = True) -> None:
        _require_room(directory, nbytes)
        try:
            self._fd, name = tempfile.mkstemp(prefix=".infinity-bench-", dir=directory)
        except OSError as error:
            raise BenchError(f"cannot write to {directory}: {error.strerror}") from error
        self.nbytes = nbytes
        try:
            self.file = _native.File(name, direct=direct)
        except OSError as error:
            os.close(self._fd)
            raise BenchError(f"cannot open a file in {directory}: {error.strerror}") from error
        finally:
            os.unlink(name)
        try:
            self.file.preallocate(nbytes)
        except OSError as error:
            self.close()
            raise BenchError(f"cannot reserve {format_bytes(nbytes)} in {directory}: {error.strerror}") from error

    @property
    def open_path(self) -> str:
        """Path with which other processes can open the unlinked file while this process has it open."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """Close the file and free the file's space. Later calls do nothing."""
        if self._fd >= 0:
            self.file.close()
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> ScratchFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _require_room(directory: Path, nbytes: int) -> None:
    room = shutil.disk_usage(directory)
    kept = min(_KEPT_SHARE * room.total, _KEPT_BYTES)
    if room.free - nbytes < kept:
        raise BenchError(
            f"{format_bytes(nbytes)} in {directory} would leave less than {format_bytes(kept)} of the disk free "
            f"({format_bytes(room.free)} of {format_bytes(room.total)} are free now). Free space, name another disk, "
            f"or set --size to at most {format_bytes(max(room.free - kept, 0))}."
        )
