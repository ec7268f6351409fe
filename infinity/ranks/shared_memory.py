"""Memory that all ranks of one machine have mapped: a memfd, which rank 0 passes to the other ranks.

The memfd has no name in any file system. It goes over an abstract Unix socket, which has no name there either, so
nothing is left behind when a process is killed. Both ends of the socket check the user of the other end. Before the
memory is used, its size is sealed, because a mapping beyond the end of a file would kill the process that reads it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
import threading
from contextlib import ExitStack, closing, suppress
from typing import Any

from infinity.base.memfd import make_memfd
from infinity.errors import NotAvailableError
from infinity.ranks.world import World
from infinity.sizes import format_bytes

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_CONNECT_S = 10.0
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemory:
    """A memfd that all ranks of this machine have open.

    Life cycle: open_shared_memory() → size() → Arena.shared(fileno()) → close(). The mapping stays when it is closed.
    """

    def __init__(self, fd: int, world: World) -> None:
        self._fd = fd
        self._world = world

    def fileno(self) -> int:
        return self._fd

    def size(self, nbytes: int) -> None:
        """Give the memory its size, once. All ranks call this with the same size.

        Raises:
            InfinityError: the memory cannot have this size. All ranks raise this error.
            PeerError: another rank failed.
        """

        def grow() -> None:
            try:
                os.ftruncate(self._fd, nbytes)
                fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)
            except OSError as error:
                raise NotAvailableError(
                    f"the ranks cannot share {format_bytes(nbytes)} of memory ({error.strerror}). Set ranks.wire: gloo."
                ) from error

        self._world.once("making the shared memory", grow)

    def close(self) -> None:
        """Close this process's file. A second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def open_shared_memory(world: World) -> tuple[SharedMemory | None, str]:
    """Open a memfd on all ranks. All ranks, which must be on one machine, call this.

    Returns:
        The memory, and ""; or None, and the reason why a rank could not open it. The result is the same on all ranks.

    Raises:
        PeerError: another rank failed.
    """
    with ExitStack() as opened:
        made = _make() if world.leads else None
        if isinstance(made, int):
            memory = opened.enter_context(closing(SharedMemory(made, world)))
        passing = opened.enter_context(_Passing(made if isinstance(made, int) else None))
        address = world.tell("sharing memory", passing.address if made is None or isinstance(made, int) else [made])[0]
        if isinstance(address, list):
            return None, f"rank 0 could not make shared memory ({address[0]})"
        if made is None:
            received = _receive(address)
            if isinstance(received, int):
                memory = opened.enter_context(closing(SharedMemory(received, world)))
        else:
            received = made
        told = world.tell("opening the shared memory", received if isinstance(received, str) else "")
        refused = next((rank for rank, reason in enumerate(told) if reason), None)
        if refused is not None:
            return None, f"rank {refused} could not be given the shared memory ({told[refused]})"
        return SharedMemory(os.dup(memory.fileno()), world), ""


def _make() -> int | str:
    """Return a new memfd, or the reason why there is none."""
    try:
        return make_memfd()
    except OSError as error:
        return f"memfd_create: {error.strerror}"


class _Passing:
    """Context in which a thread passes a file to the processes of the same user that ask for it.

    Attributes:
        address: name of the abstract socket; "" if there is no file to pass.
    """

    def __init__(self, fd: int | None) -> None:
        self.address = ""
        self._fd = fd

    def __enter__(self) -> _Passing:
        if self._fd is not None:
            self.address = f"infinity-{os.getpid()}-{secrets.token_hex(8)}"
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.bind(f"\0{self.address}")
            self._socket.listen()
            self._thread = threading.Thread(target=self._serve, args=(self._fd,), name="infinity-memfd", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._fd is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # ends `accept`
            self._thread.join()
            self._socket.close()

    def _serve(self, fd: int) -> None:
        while True:
            try:
                connected, _ = self._socket.accept()
            except OSError:
                return
            with connected, suppress(OSError):
                if _user_of(connected) == os.getuid():
                    socket.send_fds(connected, [b"m"], [fd])


def _receive(address: str) -> int | str:
    """Return the file that rank 0 passes, or the reason why it cannot be had."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(_CONNECT_S)
            asking.connect(f"\0{address}")
            if _user_of(asking) != os.getuid():
                return "rank 0 belongs to another user"
            _, files, _, _ = socket.recv_fds(asking, 1, 1, socket.MSG_CMSG_CLOEXEC)
    except ConnectionRefusedError:
        return "it cannot reach rank 0: another network namespace, as in another container"
    except OSError as error:
        return str(error.strerror or error)
    if not files:
        return "rank 0 belongs to another user, or it may not pass files"
    return files[0]


def _user_of(connected: socket.socket) -> int:
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])
