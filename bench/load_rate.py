#!/usr/bin/env python3
"""Rate of loading a checkpoint whose weights go to NVMe, beside a copy of the files by the same disk.

    python bench/load_rate.py                                 # as root: the page cache is emptied before each turn
    python bench/load_rate.py --parameters 0.2e9 --rounds 1   # a short run

The checkpoint is a mixture of experts in FP8 with a tensor for each expert, or in bf16 with --bf16. infinity keeps the
base in the form of the files. Only the filling of the store is timed: the time of imports, of building the model and of
the plan does not depend on the size. The copy reads and writes the same number of bytes with O_DIRECT in blocks of
8 MiB, in eight threads. Both write to a file whose space is allocated before. Each turn of infinity is a process of its
own.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from large_models.checkpoint import make_checkpoint, shape_of, tensor_bytes
from peers.process import BENCH_DIR
from peers.report import machine_facts, write_result

_BLOCK = 8 << 20
_THREADS = 8
_PAGE = 4096
_LAYER_EXPERTS = 64


def load(checkpoint: Path, swap: Path) -> float:
    """Load the checkpoint with a frozen base; return the seconds in which the store was filled."""
    import torch

    import infinity
    from infinity.access import opening

    seconds: list[float] = []
    ingest = opening.ingest

    def timed(*given: Any) -> None:
        began = time.perf_counter()
        ingest(*given)
        seconds.append(time.perf_counter() - began)

    opening.ingest = timed
    config = {
        "weights": "nvme",
        "optimizer": "nvme",
        "activations": "recompute",
        "memory": {"device": "1GB", "host": "2GB"},
        "nvme": {"paths": [str(swap)]},
        "commit_every": 0,
    }
    model = infinity.load_pretrained(checkpoint, config, dtype=torch.bfloat16, defer=True)
    model.requires_grad_(False)
    model.get_input_embeddings().requires_grad_(True)
    infinity.offload(model, config)
    infinity.close(model)
    return seconds[0]


def copy(sources: list[Path], target: Path) -> float:
    """Copy files to a single one with O_DIRECT; return the seconds."""
    mine = threading.local()

    def move(source: int, at: int, into: int) -> None:
        if not hasattr(mine, "block"):
            mine.block = mmap.mmap(-1, _BLOCK)
        nbytes = os.preadv(source, [mine.block], at)
        os.pwritev(target_file, [memoryview(mine.block)[: -(-nbytes // _PAGE) * _PAGE]], into)

    with ExitStack() as held:
        target_file = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
        held.callback(os.close, target_file)
        os.posix_fallocate(target_file, 0, sum(-(-path.stat().st_size // _BLOCK) * _BLOCK for path in sources))
        began, end, moves = time.perf_counter(), 0, []
        with ThreadPoolExecutor(_THREADS) as pool:
            for path in sources:
                source = os.open(path, os.O_RDONLY | os.O_DIRECT)
                held.callback(os.close, source)
                for at in range(0, os.fstat(source).st_size, _BLOCK):
                    moves.append(pool.submit(move, source, at, end))
                    end += _BLOCK
            for each in moves:
                each.result()
        seconds = time.perf_counter() - began
    target.unlink()
    return seconds


def empty_page_cache() -> None:
    """Write dirty pages, and empty the page cache. Raises OSError without root."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--parameters", type=float, default=3e9)
    add("--bf16", action="store_true")
    add("--rounds", type=int, default=5)
    add("--scratch", type=Path, default=BENCH_DIR.parent / "build", help="folder for checkpoint and swap file")
    add("--json", type=Path)
    add("--turn", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.turn is not None:
        print(load(options.turn, options.scratch / "swap"))
        return
    scratch = options.scratch.resolve() / f"load-rate-{os.getpid()}"
    scratch.mkdir(parents=True)
    made = scratch / "input"
    make_checkpoint(shape_of(options.parameters, 1, 64, _LAYER_EXPERTS), made, fp8=not options.bf16)
    checkpoint = made / "checkpoint"
    turn = [sys.executable, __file__, "--turn", str(checkpoint), "--scratch", str(scratch)]
    loads, copies = [], []
    for _ in range(options.rounds):
        empty_page_cache()
        loads.append(float(subprocess.run(turn, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1]))
        shutil.rmtree(scratch / "swap", ignore_errors=True)
        empty_page_cache()
        copies.append(copy(sorted(checkpoint.glob("*.safetensors")), scratch / "copy"))
        print(f"infinity {loads[-1]:.2f} s, copy {copies[-1]:.2f} s", flush=True)
    rate = statistics.median(theirs / ours for ours, theirs in zip(loads, copies, strict=True))
    nbytes = tensor_bytes(checkpoint)
    print(f"{nbytes / 1e9:.2f} GB; infinity loads at {rate:.2f} of the rate of a copy")
    facts = {"bytes": nbytes, "infinity_s": loads, "copy_s": copies, "ratio": rate, "machine": machine_facts(scratch)}
    if options.json:
        write_result(options.json, facts, {scratch: "scratch", BENCH_DIR.parent: "."})
    shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
