"""What the stages of `make gpu-check` call of `torch.cuda` beside streams and events, where there is no GPU.

Every copy and kernel is done when it is queued, so nothing here says anything of order, lifetimes or speed: it runs the
stages' code.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infinity.base import c_runtime
from tests.imitation import pretend

_ALREADY_REGISTERED = 712


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
    pretend(patch, lag=0)
    runtime = Runtime()
    fakes: dict[str, Any] = {
        "cudart": lambda: runtime,
        "empty_cache": lambda: None,
        "max_memory_reserved": lambda: 0,
        "memory_reserved": lambda: 0,
        "reset_peak_memory_stats": lambda: None,
        "_sleep": lambda _: None,
    }
    for name, fake in fakes.items():
        patch.setattr(torch.cuda, name, fake)
    patch.setattr(c_runtime, "forget_error", lambda device: None)
    patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
