"""Stage 1: pinning of the arena as in infinity: the speed of pinning, and the state of the GPU after a refused
registration."""

from __future__ import annotations

import time
from typing import Any

import torch

from gpu.cuda import DEVICE, accelerator
from gpu.record import Options, Record, run
from infinity import _native
from infinity.io.arena import PinnedArena
from infinity.plan.machine_resources import available_host_bytes, usable_cores

GIB = 1 << 30
_SIZES_GIB = (4, 16, 64)
_RAM_KEPT_GIB = 12


def stage(record: Record, options: Options) -> None:
    """Run the stage. Settings: `sizes_gib`."""
    record.measure("first kernel", "seconds until the GPU answers at all", _first_kernel)
    record.measure(
        "a kernel after a refused registration",
        "the second registration is refused, with a reason, and the kernel succeeds",
        _after_refusal,
        good=lambda found: bool(found["refused"]) and found["kernel"] == 1024.0,
    )
    seconds_per_gib = 0.3
    for size in options.settings.get("sizes_gib", _SIZES_GIB):
        name, expected = f"register {size} GiB", "≥ 8 GB/s, its pages touched by all cores first"
        free = available_host_bytes() / GIB
        if size + _RAM_KEPT_GIB > free:
            record.skip(name, f"{free:.0f} GiB of RAM are free", expected=expected)
            continue
        found = record.measure(
            name,
            expected,
            lambda size=size: register(size * GIB, threads=usable_cores()),
            good=lambda found: found["gb_per_s"] >= 8,
            speed=True,
            least_s=size * seconds_per_gib + 3,
        )
        if found is not None:
            seconds_per_gib = (found["seconds"] + found["release_s"]) / size
        if size == _SIZES_GIB[0]:
            record.measure(
                f"register {size} GiB that nobody touched before",
                "noted: in one thread, as the runtime does it",
                lambda size=size: register(size * GIB, threads=0),
                least_s=5,
            )


def _first_kernel() -> float:
    began = time.perf_counter()
    torch.ones(1, device=DEVICE).sum().item()
    return round(time.perf_counter() - began, 2)


def _after_refusal() -> dict[str, Any]:
    arena = PinnedArena(64 << 20)
    first = arena.pin(accelerator())
    found: dict[str, Any] = {"first": first, "refused": arena.pin(accelerator())}
    found["kernel"] = torch.ones(1024, device=DEVICE).sum().item()
    torch.cuda.synchronize()
    return found


def register(nbytes: int, *, threads: int) -> dict[str, Any]:
    """Return the seconds to register and unregister an arena.

    `threads` threads first touch the pages, and the seconds include this; 0: no thread touches them.
    """
    arena = PinnedArena(nbytes)
    found: dict[str, Any] = {"huge_pages": arena.memory.huge_pages, "threads": threads}
    pool = _native.ThreadPool(threads) if threads else None
    began = time.perf_counter()
    refused = arena.pin(accelerator(), pool)
    seconds = time.perf_counter() - began
    if refused:
        raise RuntimeError(refused)
    found |= {"seconds": round(seconds, 3), "gb_per_s": round(nbytes / 1e9 / seconds, 2)}
    began = time.perf_counter()
    del arena  # unregisters
    return found | {"release_s": round(time.perf_counter() - began, 3)}


if __name__ == "__main__":
    run(stage)
