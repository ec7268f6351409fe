"""Rate of the disk during this run, measured in a contender's own swap files.

[Note: the same disk is not one speed]
Virtual disks have fast and slow regions: files with the same layout in one file system differed consistently by more
than 2×. A separate probe file would measure the region where the file is. The probe therefore reads blocks of the
contender's files and writes the same bytes back. At this time the contender waits for its turn and has no I/O in
flight.
"""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BLOCK_BYTES = 1 << 20


def mixed_rate(directory: Path, blocks: int = 512, threads: int = 16) -> float:
    """Return the bytes per second of O_DIRECT transfers of 1 MiB, half of them reads, in files under `directory`.

    Args:
        directory: the idle contender's swap directory, whose contents are the same afterwards.
        blocks: largest number of blocks to read and write back.
        threads: number of transfers in flight.

    Raises:
        ValueError: no file contains a complete block.
        OSError: a transfer failed, or the file system does not support O_DIRECT.
    """
    places = _places(directory)
    random.Random(0).shuffle(places)
    places = places[:blocks]
    if not places:
        raise ValueError(f"{directory} holds no file of at least {BLOCK_BYTES} bytes")
    files = {path: os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC) for path in {path for path, _ in places}}
    try:
        shares = [[(files[path], offset) for path, offset in places[index::threads]] for index in range(threads)]
        with ThreadPoolExecutor(threads) as pool:
            started = time.perf_counter()
            list(pool.map(_rewrite, shares))
            elapsed = time.perf_counter() - started
    finally:
        for file in files.values():
            os.close(file)
    return 2 * len(places) * BLOCK_BYTES / elapsed


def _places(directory: Path) -> list[tuple[Path, int]]:
    """Return the file and offset of every complete block."""
    found = sorted(path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
    ends = ((path, path.stat().st_size - BLOCK_BYTES) for path in found)
    return [(path, offset) for path, end in ends for offset in range(0, end + 1, BLOCK_BYTES)]


def _rewrite(places: Sequence[tuple[int, int]]) -> None:
    with mmap.mmap(-1, BLOCK_BYTES) as buffer:
        for file, offset in places:
            for move in (os.preadv, os.pwritev):
                if move(file, [buffer], offset) != BLOCK_BYTES:
                    raise OSError(f"short transfer at offset {offset}")
