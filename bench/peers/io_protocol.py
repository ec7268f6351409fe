"""Protocol of the workers of io_vs_peers. A worker is the process of one contender; it reads orders on stdin.

A worker gets JSON lines {"do": "prepare" | "configure" | "run" | "verify" | "quit", ...} and answers each with one JSON
line.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from peers.process import JsonWorker


@dataclass(frozen=True)
class Row:
    """A workload: `tensors` of `tensor_bytes` each, which are read or overwritten.

    In a mixed workload the first half is read and the second half is overwritten at the same time.

    Attributes:
        one_file: whether all tensors are in one file, at offsets, if the contender supports both; False: one file per
            tensor.
    """

    name: str
    direction: str
    tensors: int
    tensor_bytes: int
    one_file: bool = False

    @property
    def nbytes(self) -> int:
        return self.tensors * self.tensor_bytes


class Mover(Protocol):
    """A contender. It has the files of `row`, and a uint8 array as memory for all tensors of `row`."""

    memory: Any

    def configure(self, settings: dict[str, Any]) -> None:
        """Use these settings from now on; files and memory do not change."""

    def move(self, reads: range, writes: range) -> None:
        """Move these tensors, all at the same time, and return when all transfers are done.

        Raises an exception if a transfer failed.
        """

    def close(self) -> None: ...


Prepare = Callable[[Row, Path], Mover]


def _pattern(row: Row, tensor: int) -> Any:
    import numpy as np

    return np.random.default_rng(tensor).integers(0, 256, row.tensor_bytes, np.uint8)


def _fill(row: Row, mover: Mover) -> None:
    """Write every tensor once, so that later writes are overwrites."""
    for tensor in range(row.tensors):
        start = tensor * row.tensor_bytes
        mover.memory[start : start + row.tensor_bytes] = _pattern(row, tensor)
    mover.move(range(0), range(row.tensors))


def _verify(row: Row, mover: Mover) -> bool:
    """Return whether tensors read back from the disk have the values that were written."""
    import numpy as np

    mover.memory[:] = 0
    mover.move(range(row.tensors), range(0))
    step = max(row.tensors // 100, 1)
    return all(
        np.array_equal(mover.memory[tensor * row.tensor_bytes : (tensor + 1) * row.tensor_bytes], _pattern(row, tensor))
        for tensor in range(0, row.tensors, step)
    )


def _run(row: Row, mover: Mover) -> dict[str, float]:
    half = row.tensors // 2
    reads, writes = {
        "read": (range(row.tensors), range(0)),
        "write": (range(0), range(row.tensors)),
        "mixed": (range(half), range(half, row.tensors)),
    }[row.direction]
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    mover.move(reads, writes)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu_s": cpu_s}


def serve(prepare: Prepare) -> None:
    """Answer the driver's orders until the driver sends `quit`, or its process ends."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries' output must not be mixed with the answers
    row, mover = Row("", "read", 0, 0), None
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer: dict[str, Any] = {}
            if order["do"] == "quit":
                break
            if order["do"] == "prepare":
                if mover is not None:
                    mover.close()
                row = Row(**order["row"])
                mover = prepare(row, Path(order["directory"]))
                mover.configure(order["settings"])
                _fill(row, mover)
            elif mover is None:
                raise RuntimeError("not prepared")
            elif order["do"] == "configure":
                mover.configure(order["settings"])
            elif order["do"] == "run":
                answer = dict(_run(row, mover))
            elif order["do"] == "verify":
                answer = {"right": _verify(row, mover)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=channel)
    if mover is not None:
        mover.close()
    sys.stderr.flush()
    os._exit(0)  # extension modules that have threads may hang during the interpreter's shutdown


class IoWorker(JsonWorker):
    """The driver's side of one worker."""

    def prepare(self, row: Row, directory: Path, settings: dict[str, Any]) -> None:
        self.ask({"do": "prepare", "row": asdict(row), "directory": str(directory), "settings": settings})

    def configure(self, settings: dict[str, Any]) -> None:
        self.ask({"do": "configure", "settings": settings})

    def run(self) -> dict[str, float]:
        """Run the row once and return its `seconds` and `cpu_s`."""
        return self.ask({"do": "run"})

    def verify(self) -> bool:
        return bool(self.ask({"do": "verify"})["right"])
