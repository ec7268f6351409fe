"""A GPU that is not there: `torch.cuda` as far as the stages of `make gpu-check` call it, over CPU tensors.

Every copy and kernel is done when it is queued, so nothing here says anything of order, lifetimes or speed: it runs the
stages' code where there is no GPU.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

_ALREADY_REGISTERED = 712


class Event:
    def __init__(self, **_: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class Stream:
    def __init__(self, *_: Any) -> None: ...
    def wait_event(self, event: Event) -> None: ...
    def wait_stream(self, stream: Stream) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self) -> Event:
        return Event()


class Runtime:
    """The calls of libcudart that torch binds."""

    def __init__(self) -> None:
        self._registered: set[int] = set()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        if address in self._registered:
            return _ALREADY_REGISTERED
        self._registered.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self._registered.discard(address)
        return 0


def install(patch: pytest.MonkeyPatch) -> None:
    runtime, stream = Runtime(), Stream()
    fakes: dict[str, Any] = {
        "Event": Event,
        "Stream": Stream,
        "cudart": lambda: runtime,
        "current_device": lambda: 0,
        "current_stream": lambda *_: stream,
        "empty_cache": lambda: None,
        "max_memory_reserved": lambda: 0,
        "memory_reserved": lambda: 0,
        "reset_peak_memory_stats": lambda: None,
        "stream": lambda _: contextlib.nullcontext(),
        "synchronize": lambda *_: None,
        "_sleep": lambda _: None,
    }
    for name, fake in fakes.items():
        patch.setattr(torch.cuda, name, fake)
    patch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
