"""Worker of io_vs_peers that uses DeepSpeed's async_io: with a file per tensor, as in DeepSpeed's swapper, or with one
file and offsets.

All requests are queued, followed by one wait. Simultaneous reads and writes use one handle each, as in DeepSpeed's
swapper.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from peers.io_protocol import Row, serve

_PAGE = 4096


def _builder() -> Any:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    environment = Path(sys.prefix)
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(environment / "torch_extensions"))
    os.environ["PATH"] = f"{environment / 'bin'}:{os.environ['PATH']}"  # lets the build of the operator find ninja
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return AsyncIOBuilder().load(verbose=False)


class DeepSpeedMover:
    def __init__(self, row: Row, directory: Path) -> None:
        import torch

        self._row = row
        self._directory = directory / "deepspeed"
        self._directory.mkdir()
        self._aio = _builder()
        self._reader, self._writer = self._aio.aio_handle(), self._aio.aio_handle()
        # DeepSpeed's own pinned buffer: page-aligned and locked.
        self._owner = self._aio.aio_handle()
        self._buffer = self._owner.new_cpu_locked_tensor(row.nbytes, torch.empty(0, dtype=torch.uint8))
        if self._buffer.data_ptr() % _PAGE:
            raise RuntimeError("the locked tensor is not aligned to a page")
        self.memory: np.ndarray[Any, Any] = self._buffer.numpy()
        self._tensors = self._buffer.split(row.tensor_bytes)
        names = ["all"] if row.one_file else [f"tensor{index}" for index in range(row.tensors)]
        self._paths = [str(self._directory / name) for name in names]
        for path in self._paths:
            with open(path, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, row.nbytes // len(self._paths))

    def configure(self, settings: dict[str, Any]) -> None:
        self._reader, self._writer = (
            self._aio.aio_handle(single_submit=False, overlap_events=True, **settings) for _ in range(2)
        )

    def _place(self, tensor: int) -> tuple[str, int]:
        if self._row.one_file:
            return self._paths[0], tensor * self._row.tensor_bytes
        return self._paths[tensor], 0

    def move(self, reads: range, writes: range) -> None:
        for tensor in reads:
            path, offset = self._place(tensor)
            self._reader.async_pread(self._tensors[tensor], path, offset)
        for tensor in writes:
            path, offset = self._place(tensor)
            self._writer.async_pwrite(self._tensors[tensor], path, offset)
        done = (self._reader.wait() if len(reads) else 0) + (self._writer.wait() if len(writes) else 0)
        if done != len(reads) + len(writes):
            raise OSError(f"{done} of {len(reads) + len(writes)} requests completed")

    def close(self) -> None:
        for path in self._paths:
            os.unlink(path)
        self._directory.rmdir()
        self._owner.free_cpu_locked_tensor(self._buffer)


if __name__ == "__main__":
    serve(DeepSpeedMover)
