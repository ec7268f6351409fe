"""Protocol of the workers of adam_vs_peers. A worker is the process of one contender; it reads orders on stdin.

A worker gets JSON lines {"do": "run", "row": NAME} or {"do": "quit"} and answers each run with {"seconds": …, "check":
…}. The check is the sum of the first weights after the step, which proves that the step was executed.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LR, BETAS, EPS, WEIGHT_DECAY = 1e-4, (0.9, 0.999), 1e-8, 0.01
MAX_GRAD_NORM, LOSS_SCALE = 1.0, 1024.0
_HUGE_PAGE = 2 << 20


def huge_tensor(numel: int, dtype: Any) -> Any:
    """Return a 2 MiB-aligned array of zeros in huge pages, so that all contenders have the same kind of memory."""
    import torch

    nbytes = numel * dtype.itemsize
    memory = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    skip = -whole.data_ptr() % _HUGE_PAGE
    return whole[skip : skip + nbytes].view(dtype).zero_()


def fill(tensor: Any, scale: float) -> None:
    """Fill an array with random numbers that are the same for all contenders."""
    import torch

    part = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * scale
    for at in range(0, tensor.numel(), part.numel()):
        chunk = tensor[at : at + part.numel()]
        chunk.copy_(part[: chunk.numel()])


def serve(make: Callable[[int, int], dict[str, Callable[[], None]]], weights: Callable[[], Any]) -> None:
    """Answer the driver's orders until the driver sends `quit`, or its process ends.

    Args:
        make: function from (numel, threads) to the rows, by name; a row is a function that does its work once.
        weights: function that returns the weights of the row that ran last.
    """
    numel, threads = int(sys.argv[1]), int(sys.argv[2])
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries' output must not be mixed with the answers
    rows = make(numel, threads)
    print(json.dumps({"rows": sorted(rows)}), file=channel)
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "quit":
            break
        began = time.perf_counter()
        rows[order["row"]]()
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "check": float(weights()[: 1 << 16].double().sum())}), file=channel)
    os._exit(0)  # extension modules that have threads may hang during the interpreter's shutdown


def peers_environment() -> None:
    """Set the environment in which DeepSpeed's operator is built."""
    environment = Path(sys.prefix)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(environment / "torch_extensions"))
    os.environ["PATH"] = f"{environment / 'bin'}:{os.environ['PATH']}"
