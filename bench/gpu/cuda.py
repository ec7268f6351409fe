"""Helpers for GPUs that several stages use: kernels that sleep, timed copies, pinned memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from infinity.base.accelerator import TorchAccelerator
from infinity.io.arena import PinnedArena

DEVICE = "cuda"


class Sleeper:
    """Kernels that keep a stream busy for about the requested time."""

    _CYCLES = 20_000_000

    def __init__(self) -> None:
        torch.cuda._sleep(self._CYCLES)  # this raises the GPU's clock frequency before the measurement
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(self._CYCLES)
        end.record()
        end.synchronize()
        self._cycles_per_ms = self._CYCLES / begin.elapsed_time(end)

    def __str__(self) -> str:
        return f"{self._cycles_per_ms:.0f} cycles per ms"

    def sleep(self, ms: float) -> None:
        """Keep the current stream busy for about `ms` milliseconds."""
        torch.cuda._sleep(int(ms * self._cycles_per_ms))


def current_device() -> torch.device:
    """Return the GPU, with its index."""
    return torch.device(DEVICE, torch.cuda.current_device())


def accelerator() -> TorchAccelerator:
    return TorchAccelerator(current_device())


def pinned_arena(nbytes: int) -> PinnedArena:
    """Return a pinned arena. Raises RuntimeError if the memory cannot be registered."""
    arena = PinnedArena(nbytes)
    refused = arena.pin(accelerator())
    if refused:
        raise RuntimeError(refused)
    return arena


def milliseconds(work: Callable[[], None], *streams: torch.cuda.Stream) -> float:
    """Return the milliseconds between the first and last operation of `work` on the streams, by GPU events."""
    main = torch.cuda.current_stream()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record(main)
    for stream in streams:
        stream.wait_event(begin)
    work()
    for stream in streams:
        main.wait_stream(stream)
    end.record(main)
    end.synchronize()
    return begin.elapsed_time(end)
