"""What the disk gives in this very run: a small O_DIRECT probe, half reads, half writes, between the rounds."""

from __future__ import annotations

import mmap
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BLOCK_BYTES = 1 << 20


class MixedProbe:
    """Reads and writes the blocks of one fully written file in a shuffled order, every other one a write.

    Args:
        path: of the file to make.
        file_bytes: its size; every `measure` moves as many bytes.
        threads: blocks in flight.

    Raises:
        OSError: the disk is full, or its file system has no O_DIRECT.
    """

    def __init__(self, path: Path, file_bytes: int = 1 << 30, threads: int = 16) -> None:
        self.path = path
        self._threads = threads
        self._blocks = file_bytes // BLOCK_BYTES
        self._buffers = [mmap.mmap(-1, BLOCK_BYTES) for _ in range(threads)]
        for buffer in self._buffers:
            buffer.write(os.urandom(BLOCK_BYTES))
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        self._pool = ThreadPoolExecutor(threads)
        os.posix_fallocate(self._fd, 0, file_bytes)
        # Blocks never written are read back as zeros without asking the disk.
        self._run([(block, True) for block in range(self._blocks)])

    def measure(self) -> float:
        """Bytes per second, reads and writes together."""
        order = list(range(self._blocks))
        random.Random(0).shuffle(order)
        started = time.perf_counter()
        self._run([(block, index % 2 == 1) for index, block in enumerate(order)])
        return self._blocks * BLOCK_BYTES / (time.perf_counter() - started)

    def close(self) -> None:
        """Remove the file."""
        self._pool.shutdown()
        os.close(self._fd)
        self.path.unlink(missing_ok=True)

    def _run(self, transfers: list[tuple[int, bool]]) -> None:
        shares = [transfers[index :: self._threads] for index in range(self._threads)]
        for done in [self._pool.submit(self._move, *pair) for pair in zip(self._buffers, shares, strict=True)]:
            done.result()

    def _move(self, buffer: mmap.mmap, transfers: list[tuple[int, bool]]) -> None:
        for block, write in transfers:
            move = os.pwritev if write else os.preadv
            if move(self._fd, [buffer], block * BLOCK_BYTES) != BLOCK_BYTES:
                raise OSError(f"short transfer at block {block} of {self.path}")
