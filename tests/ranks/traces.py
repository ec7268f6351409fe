"""Names and memory that ranks which share memory could leave behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_OTHERS_S = 10.0
"""Seconds for other tests, which run at the same time, to remove names of theirs."""


def names() -> set[str]:
    """Return all names in /dev/shm, and the names of infinity's sockets."""
    sockets = Path("/proc/net/unix").read_text()
    return {*os.listdir("/dev/shm"), *(word for word in sockets.split() if "infinity-" in word)}


def require_no_names_but(before: set[str]) -> None:
    """Require that there are no names but those of an earlier time."""
    end = time.monotonic() + _OTHERS_S
    while not (left := names()) <= before and time.monotonic() < end:
        time.sleep(0.1)
    assert left <= before


def users_of(inodes: Iterable[int]) -> list[str]:
    """Return the processes that have a memfd of infinity with one of these inodes open or mapped, as far as this user
    may look."""
    wanted = set(inodes)
    return [process.name for process in Path("/proc").iterdir() if process.name.isdigit() and _uses(process, wanted)]


def _uses(process: Path, inodes: set[int]) -> bool:
    found = set[int]()
    with suppress(OSError):  # the process belongs to another user, or has ended
        for line in (process / "maps").read_text().splitlines():
            if "/memfd:infinity" in line:
                found.add(int(line.split()[4]))
        for descriptor in (process / "fd").iterdir():
            with suppress(OSError):
                if os.readlink(descriptor).startswith("/memfd:infinity"):
                    found.add(descriptor.stat().st_ino)
    return bool(found & inodes)
