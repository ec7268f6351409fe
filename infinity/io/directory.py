"""Swap directory: its lock, which a run holds, its files, and the rules by which files may be deleted."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import shlex
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from infinity.base import fork
from infinity.errors import (
    ConfigError,
    ManifestError,
    ResumeError,
    StoreLockedError,
    StoreNotEmptyError,
    SwapIOError,
    printable,
)
from infinity.io import atomic_file
from infinity.io.disks import MEMORY_FILESYSTEMS, disk_under
from infinity.io.generation_pins import PINNED, PINS_NAME, pins_text, read_pins
from infinity.io.manifest import read_header

logger = logging.getLogger(__name__)

LOCK_NAME = "infinity.lock"
_MADE = "made"
"""Second line of the lock file; present only if the first run of the store created the directory."""
SWAP_NAME = "states.infinity-swap"
HEADER_NAME = "store.infinity"
FINISHED_NAME = "finished.infinity"
"""Name of the file about a finished run whose store was removed (cli/finished_run.py).

The next run removes this file.
"""
_GENERATION = re.compile(r"generation-([0-9]{12})\.infinity")


class StoreDirectory:
    """Directory of a store: the names of its files, and the lock, which is held until close()."""

    def __init__(self, path: Path) -> None:
        self.path = require_name(path.expanduser().absolute())
        self._lock_fd = -1
        fork.close_in_children(self)

    @property
    def swap_path(self) -> Path:
        return self.path / SWAP_NAME

    @property
    def header_path(self) -> Path:
        return self.path / HEADER_NAME

    def generation_path(self, step: int) -> Path:
        """Return the path of the manifest of the generation after optimizer step `step`."""
        return self.path / f"generation-{step:012d}.infinity"

    def generations(self) -> dict[int, Path]:
        """Return the paths of existing manifests by step, newest first."""
        return generations_in(self.path)

    @property
    def numa_node(self) -> int:
        """NUMA node of the disk below the directory; -1 if the disk has no node."""
        node = disk_under(self.path).numa_node
        return -1 if node is None else node

    @property
    def free_bytes(self) -> int:
        return shutil.disk_usage(self.path).free

    def require_replaceable(self) -> None:
        """Check that no generation would be lost if a new store replaced this one.

        Call this for all directories of a store before any make_room().

        Raises:
            StoreNotEmptyError: there are generations in this directory, or in the first directory of the store to which
                this directory belongs. Also raised if generations may exist, because the first directory is missing or
                the header is damaged.
        """
        kept = self._kept_by()
        if kept is not None:
            newest = next(iter(kept.values()), None)
            what = f"a checkpoint of an earlier run ({newest})" if newest else "a part of an earlier run's store"
            pinned, parts = _pinned_for_messages(self.path), parts_text(self.path)
            remove = f"`infinity checkpoint remove {parts}`"
            if pinned:
                what += f", and generations that checkpoint folders pin: {pinned}"
                remove = (
                    f"`infinity checkpoint remove --pinned {parts}`, after which no run can resume from these folders "
                    f"(`infinity checkpoint unpin {shlex.quote(str(self.path))} --folder FOLDER` unpins one of them)"
                )
            raise StoreNotEmptyError(
                f"{self.path} holds {what}. {ways_on(self.path, folders=bool(pinned) or newest is None)} "
                f"To start over: give this run another directory in nvme.paths, or remove the old one with {remove}. "
                "A script whose runs are never resumed can remove the store at its end: "
                "infinity.close(model, discard=True)."
            )

    def _kept_by(self) -> dict[int, Path] | None:
        """Return the generations that need the files of this directory; None if there is no generation.

        If generations may exist but cannot be listed, the result is {}.
        """
        found = self.generations()
        if found or pinned_in(self.path):
            return found
        try:
            header = read_header(self.header_path)
        except ResumeError:
            return {} if os.path.lexists(self.header_path) else None  # damaged header: a resumed run may rebuild it
        first = Path(header.members[0])
        if header.mode != "generations" or header.member == 0:
            return None
        try:
            same = read_header(first / HEADER_NAME).run == header.run
        except ResumeError:
            same = False
        # The generations are in the first member's directory, whose disk may not be mounted now.
        return (generations_in(first) or None) if same else {}

    def close(self, *, keep: bool = True) -> None:
        """Release the lock. A second call does nothing."""
        self.close_in_child()

    def close_in_child(self) -> None:
        """Close a forked child's copy of the lock's descriptor, which would keep the lock after the end of the
        parent."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _open_lock(self, access: int) -> int:
        """Open the lock file and return its descriptor. Raises ConfigError if the path is not a regular file."""
        path = self.path / LOCK_NAME
        try:
            descriptor = os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except OSError as error:
            if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
                raise _no_lock(path) from error
            raise _unusable(self.path, error) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise _no_lock(path)
        return descriptor

    def _holder(self) -> str:
        """Return the id of the process that holds the lock, as written in the lock file."""
        written = next(iter(self._written()), "")
        return written if written.isascii() and written.isdigit() else "unknown"

    def _written(self) -> list[str]:
        """Return the lines of the lock file."""
        return os.pread(self._lock_fd, 64, 0).decode(errors="replace").split()

    def _try_lock(self, kind: int) -> bool:
        """Try to take the lock without waiting, and return whether the lock was taken. Raises SwapIOError."""
        try:
            fcntl.flock(self._lock_fd, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            self.close_in_child()
            raise SwapIOError("locking", path=str(self.path / LOCK_NAME), errno=error.errno or 0) from error
        return True


class ReadDirectory(StoreDirectory):
    """Directory that is opened only for reading. Nothing on disk is changed, and several processes may read it at the
    same time.

    Readers take a shared lock, so no run can lock the directory at the same time. A directory without a lock file, such
    as a copy of a directory, is read without a lock. If a run begins in such a directory during reading, the checksums
    show that the data have changed.

    Args:
        path: the directory.
        shared: whether the run that holds the lock knows about this reader, and does not change the data that the
            reader reads.

    Raises:
        StoreLockedError: a run holds the lock.
        ConfigError: the lock file cannot be opened.
    """

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        super().__init__(path)
        if shared or not os.path.lexists(self.path / LOCK_NAME):
            return
        self._lock_fd = self._open_lock(os.O_RDONLY)
        if not self._try_lock(fcntl.LOCK_SH):
            holder = self._holder()
            self.close()
            raise StoreLockedError(
                f"the swap directory {self.path} is in use by a run (process {holder}). Wait for it, or stop it first."
            )


class SwapDirectory(StoreDirectory):
    """Directory locked by one run, from construction to close().

    Invariant: a file is deleted only if it has one of infinity's names, only while the lock is held, and only after
    make_room() or take_over().

    Args:
        path: the directory.
        create: whether a missing directory is created; False: a missing directory is an error.

    Attributes:
        new_in: for each directory that the constructor made, its parent directory; the innermost is first.

    Raises:
        StoreLockedError: another run holds the lock.
        ConfigError: the directory cannot be created or written.
        ResumeError: the directory does not exist, and `create` is False.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        super().__init__(path)
        self._created = not os.path.exists(self.path)
        self.new_in = [above.parent for above in (self.path, *self.path.parents) if not os.path.exists(above)]
        self._ours = False  # whether the files in the directory belong to this run
        if self._created and not create:
            raise ResumeError(f"{self.path}: no such directory, so there is nothing to resume there")
        try:
            _require_parent(self.path)
            self.path.mkdir(mode=0o700, exist_ok=True)
        except FileExistsError as error:
            raise _unusable(self.path, NotADirectoryError(errno.ENOTDIR, "it is no directory")) from error
        except OSError as error:
            raise _unusable(self.path, error) from error
        self._take_lock()
        while not self._lock_is_ours():  # an earlier run removed the file after it was opened and before it was locked
            os.close(self._lock_fd)
            self._take_lock()
        self._created |= self._written()[1:] == [_MADE]
        os.ftruncate(self._lock_fd, 0)
        made = f"{_MADE}\n" if self._created else ""
        os.pwrite(self._lock_fd, f"{os.getpid()}\n{made}".encode(), 0)
        self._warn_if_memory()

    def _lock_is_ours(self) -> bool:
        """Return whether the locked file still has the name of the lock file, and no second name.

        A file with a second name (a hard link) may belong to another program. The name of the lock file is then removed
        from it, so that a new lock file can be made.
        """
        path, mine = self.path / LOCK_NAME, os.fstat(self._lock_fd)
        try:
            if not os.path.samestat(os.stat(path, follow_symlinks=False), mine):
                return False
            if mine.st_nlink > 1:
                os.unlink(path)
        except FileNotFoundError:
            return False
        except OSError as error:
            os.close(self._lock_fd)
            raise _no_lock(path) from error
        return mine.st_nlink == 1

    def _take_lock(self) -> None:
        self._lock_fd = self._open_lock(os.O_RDWR | os.O_CREAT)
        if self._try_lock(fcntl.LOCK_EX):
            return
        is_read = self._try_lock(fcntl.LOCK_SH)  # readers hold a shared lock, and do not write their process ids
        who = "being read by another process" if is_read else f"in use by another run (process {self._holder()})"
        self.close_in_child()
        raise StoreLockedError(
            f"the swap directory {self.path} is {who}. Wait for it, or give this run a directory of its own in "
            "nvme.paths."
        )

    def take_over(self) -> None:
        """From now on, treat all files in the directory as files of this run."""
        self._ours = True
        atomic_file.remove(self.path / FINISHED_NAME)

    def make_room(self) -> None:
        """Remove the files of an earlier run that has no generations. The removal is durable when this method
        returns."""
        if self.swap_path.exists():
            logger.warning("removing the swap file of a run that did not end: %s", self.swap_path)
        self._ours = True
        left = os.path.lexists(self.header_path)
        atomic_file.remove(self.path / FINISHED_NAME)
        self.remove_all()
        if left:
            atomic_file.sync_directory(self.path)

    def remove_all(self) -> None:
        """Remove every file of a store.

        Manifests are removed first, because the data of a generation must exist as long as its manifest. The header is
        removed last, because a repeated call after an interrupted removal needs the header to identify the other files.
        """
        found = [*self.generations().values(), *pinned_in(self.path)]
        if os.path.lexists(self.path / PINS_NAME):
            found.append(self.path / PINS_NAME)
        for path in found:
            atomic_file.remove(path)
        if found:
            atomic_file.sync_directory(self.path)
        for path in (self.swap_path, self.header_path):
            atomic_file.remove(path)
        self.remove_asides()

    def remove_asides(self) -> None:
        """Remove the partially written files that exist after a crash."""
        for entry in entries_of(self.path):
            name = entry.name.removesuffix(atomic_file.ASIDE)
            ours = (
                name in (HEADER_NAME, FINISHED_NAME, PINS_NAME) or _GENERATION.fullmatch(name) or PINNED.fullmatch(name)
            )
            if name != entry.name and ours:
                atomic_file.remove(entry)

    def _warn_if_memory(self) -> None:
        if disk_under(self.path).filesystem in MEMORY_FILESYSTEMS:
            logger.warning(
                "%s is on tmpfs, which is RAM: it works, but saves no memory. Name a directory on an SSD in "
                "nvme.paths.",
                self.path,
            )

    def close(self, *, keep: bool = False) -> None:
        """Release the lock. If `keep` is False, remove this run's files before. A second call does nothing."""
        if self._lock_fd < 0:
            return
        if self._ours and not keep:
            self.remove_all()
        if not keep and not self.header_path.exists():
            (self.path / LOCK_NAME).unlink(missing_ok=True)
        super().close()
        if self._created:
            with contextlib.suppress(OSError):  # the directory is not empty: it also has files of other programs
                self.path.rmdir()


def remove_store(directories: Sequence[SwapDirectory]) -> dict[Path, int]:
    """Remove a store. `directories` has the locked directories of the store, in the store's order.

    Return the bytes freed in each directory.
    """
    freed = {}
    for directory in directories:  # first the swap files: manifests show the run of a header
        freed[directory.path] = directory.swap_path.stat().st_size if directory.swap_path.exists() else 0
        atomic_file.remove(directory.swap_path)
    for directory in reversed(directories):  # the first directory has the manifests, so it is cleared last
        directory.remove_all()
    return freed


def remove_store_of(run: str, paths: Sequence[Path]) -> int:
    """Remove the files of a run's store, and return the bytes freed.

    Directories without a store, and directories with the store of another run, are unchanged.

    Args:
        run: id of the run.
        paths: directories, in the store's order.

    Raises:
        StoreLockedError: another process uses the store.
        SwapIOError: a file cannot be removed.
    """
    with contextlib.ExitStack() as held:
        directories = []
        for path in (each.expanduser() for each in paths):
            if (path / HEADER_NAME).exists():
                directory = SwapDirectory(path, create=False)
                held.callback(directory.close)
                if read_header(directory.header_path).run == run:
                    directories.append(directory)
        return sum(remove_store(directories).values())


def require_name(path: Path) -> Path:
    """Return `path` if it can name a directory and can be stored in a header. Raises ConfigError otherwise."""
    try:
        if "\0" not in str(path) and str(path).encode():
            return path
        problem = "a name without a NUL"
    except UnicodeEncodeError:
        problem = "a name in UTF-8"
    raise ConfigError(f"nvme.paths: {path}: the name of a swap directory must be {problem}. Choose another one.")


def require_place(path: Path) -> None:
    """Check that a swap directory exists and is writable, or that the directory can be made. No directory is made.

    Raises:
        ConfigError: the directory cannot be used; the message says why.
    """
    path = path.expanduser().absolute()
    try:
        _require_parent(path)
        there = path if os.path.lexists(path) else path.parent
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if os.statvfs(there).f_flag & os.ST_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _unusable(path, error) from error


def _require_parent(path: Path) -> None:
    """Check that the parent of a path exists.

    Raises:
        ConfigError: the parent does not exist, because the path is misspelled or the disk is not mounted.
    """
    if not path.parent.exists():
        raise ConfigError(
            f"nvme.paths: there is no directory {printable(path.parent)}, in which {printable(path)} would be created. "
            "Check the name, and that the disk is mounted; infinity creates only the last directory of a path."
        )


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"nvme.paths: cannot use {path}: {error.strerror}. Name a directory that you may write to.")


def _no_lock(path: Path) -> ConfigError:
    return ConfigError(
        f"nvme.paths: {path} is not a regular file with one name (it is a link, a FIFO, a device or a directory), and "
        "infinity would write its process id there. Remove it."
    )


def entries_of(path: Path) -> list[Path]:
    """Return the entries of a directory; [] if the directory does not exist.

    Raises SwapIOError if the directory cannot be read.
    """
    try:
        return list(path.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise SwapIOError("listing", path=str(path), errno=error.errno or 0) from error


def generations_in(path: Path) -> dict[int, Path]:
    """Return the manifests in a directory by their step, newest first."""
    found = {int(match[1]): entry for entry in entries_of(path) if (match := _GENERATION.fullmatch(entry.name))}
    return dict(sorted(found.items(), reverse=True))


def pinned_in(path: Path) -> list[Path]:
    """Return the manifests of pinned generations in a directory, including manifests of generations that were
    unpinned."""
    return sorted(entry for entry in entries_of(path) if PINNED.fullmatch(entry.name))


def ways_on(path: Path, *, folders: bool) -> str:
    """Return the sentences of a message that say how to resume from the generations in a directory.

    Args:
        path: the directory, in the form in which the user has named it.
        folders: whether checkpoint folders may pin the generations.
    """
    each = ", from one of the folders with folder=FOLDER or resume=FOLDER" if folders else ""
    ways = (
        "To resume it: in a loop of your own, infinity.resume(model, config) or infinity.load_pretrained(..., "
        f"resume=True){each}; for a run of infinity finetune, `infinity finetune --resume`"
    )
    if folders:
        return (
            f"{ways}; for a script under infinity run, `infinity run --resume FOLDER CONFIG SCRIPT`, or "
            "Lightning's ckpt_path=."
        )
    return (
        f"{ways}. No checkpoint folder names its generations, so no script under infinity run can resume it "
        "(with a smaller save_steps, a Trainer saves the first folder earlier). "
        f"`infinity checkpoint export {shlex.quote(str(path))} --output OUT` writes its weights and optimizer states: "
        "a script can start from OUT as a model (OUT has adapters under PEFT's names, which from_pretrained does not "
        "read)."
    )


def parts_text(path: Path) -> str:
    """Return the directories of the store that `path` belongs to, as arguments of the command that removes the store.

    If no header in `path` names the directories, the result has only `path`.
    """
    try:
        members = read_header(path / HEADER_NAME).members
    except ResumeError:
        members = []
    return shlex.join(members if str(path) in members else [str(path)])


def _pinned_for_messages(path: Path) -> str:
    """Return the names of the folders that pin generations in a directory, or the reason why these are unknown; "" if
    there are no such folders."""
    try:
        return pins_text(read_pins(path))
    except ManifestError as error:
        return printable(error)
