"""The swap directory: whose it is, what is in it, and what may be deleted."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
from pathlib import Path

from infinity.errors import ConfigError, StoreLockedError, SwapIOError
from infinity.io import fork
from infinity.io.devices import describe_disk

logger = logging.getLogger(__name__)

LOCK_NAME = "infinity.lock"
SWAP_NAME = "states.infinity-swap"


class SwapDirectory:
    """A directory held by one run, from construction to close().

    Invariant: nothing is deleted that is not named as ours and under our lock.

    Raises:
        StoreLockedError: another run holds it.
        ConfigError: it cannot be created or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        self._created = not self.path.exists()
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._lock_fd = os.open(self.path / LOCK_NAME, flags, 0o600)
        except OSError as error:
            raise ConfigError(
                f"nvme.paths: cannot use {self.path}: {error.strerror}. Name a directory that you may write to."
            ) from error
        self._take_lock()
        fork.close_in_children(self)
        self._warn_if_memory()

    @property
    def swap_path(self) -> Path:
        return self.path / SWAP_NAME

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._lock_fd, 64, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock_fd)
            self._lock_fd = -1
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise SwapIOError("locking", path=str(self.path / LOCK_NAME), errno=error.errno or 0) from error
            raise StoreLockedError(
                f"the swap directory {self.path} is in use by another run (process {holder}). Wait for it, or give "
                f"this run "
                "a directory of its own in nvme.paths."
            ) from error
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)
        if self.swap_path.exists():
            logger.warning("removing the swap file of a run that did not end: %s", self.swap_path)
            self.swap_path.unlink()

    def _warn_if_memory(self) -> None:
        if describe_disk(self.path).filesystem in ("tmpfs", "ramfs"):
            logger.warning(
                "%s is on tmpfs, which is RAM: it works, but saves no memory. Name a directory on an SSD in "
                "nvme.paths.",
                self.path,
            )

    @property
    def numa_node(self) -> int:
        """Of the disk below; -1 where it has none."""
        node = describe_disk(self.path).numa_node
        return -1 if node is None else node

    @property
    def free_bytes(self) -> int:
        info = os.statvfs(self.path)
        return info.f_bavail * info.f_frsize

    def close(self) -> None:
        """Remove what this run put there and let the directory go. Idempotent."""
        if self._lock_fd < 0:
            return
        self.swap_path.unlink(missing_ok=True)
        (self.path / LOCK_NAME).unlink(missing_ok=True)
        os.close(self._lock_fd)
        self._lock_fd = -1
        if self._created:
            with contextlib.suppress(OSError):  # somebody else put something there: not ours to remove
                self.path.rmdir()

    def close_in_child(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
