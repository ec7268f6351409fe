"""Worker of io_vs_peers that uses infinity's engine: one swap file, an extent per tensor, a future per request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from infinity import _native
from peers.io_protocol import Row, serve


class InfinityMover:
    def __init__(self, row: Row, directory: Path) -> None:
        self._row = row
        self._path = directory / "infinity.swap"
        self._file = _native.File(str(self._path), create=True)
        self._file.preallocate(row.nbytes)
        self._engine: _native.IOEngine | None = None
        self._view = _native.Arena(row.nbytes).view(0, row.nbytes)
        self.memory = np.frombuffer(self._view, np.uint8)

    def configure(self, settings: dict[str, Any]) -> None:
        self._close_engine()
        self._engine = _native.IOEngine("auto", **settings)
        self._engine.register_memory(self._view)

    def move(self, reads: range, writes: range) -> None:
        if self._engine is None:
            raise RuntimeError("not configured")
        size = self._row.tensor_bytes
        futures = []
        for tensor in reads:
            at = tensor * size
            futures.append(self._engine.read(self._file, at, self._view[at : at + size]))
        for tensor in writes:
            at = tensor * size
            futures.append(self._engine.write(self._file, at, self._view[at : at + size], "states"))
        for future in reversed(futures):  # one long wait, so that the thread does not wake up for each future
            future.wait()
            failure = future.failure()
            if failure is not None:
                raise OSError(failure.message)

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def close(self) -> None:
        self._close_engine()
        self._file.close()
        self._path.unlink()


if __name__ == "__main__":
    serve(InfinityMover)
