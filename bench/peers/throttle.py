"""Limit on the bytes per second that some processes read and write; a control group sets the limit."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from peers.process import Worker

_CGROUP = Path("/sys/fs/cgroup/blkio/infinity-bench")


@contextmanager
def throttled(workers: Sequence[Worker], directory: Path, rate: float) -> Iterator[None]:
    """In this context, limit the bytes per second that these workers together read, and the bytes per second that they
    write.

    The workers must be running. Needs root.
    """
    if not workers:
        yield
        return
    device = os.stat(directory).st_dev
    _CGROUP.mkdir(exist_ok=True)
    for direction in ("read", "write"):
        limit = f"{os.major(device)}:{os.minor(device)} {int(rate)}"
        (_CGROUP / f"blkio.throttle.{direction}_bps_device").write_text(limit)
    for worker in workers:
        (_CGROUP / "cgroup.procs").write_text(str(worker.pid))
    try:
        yield
    finally:
        for pid in (_CGROUP / "cgroup.procs").read_text().split():
            (_CGROUP.parent / "cgroup.procs").write_text(pid)
        _CGROUP.rmdir()
