"""Clearing the pending error of the CUDA runtime.

A runtime call that fails returns its error and also leaves the error pending: the launch check of the next kernel finds
it and blames the kernel. torch's binding of `cudaHostRegister` leaves the error pending, and torch has no binding of
`cudaGetLastError`, which clears it. So this module calls `cudaGetLastError` in the runtime that torch has loaded.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

_TAKES_ERROR = {"libcudart": "cudaGetLastError", "libamdhip64": "hipGetLastError"}
"""The function that returns the pending error and clears it, by the beginning of the runtime's file name."""


def forget(device: torch.device, maps: Path = Path("/proc/self/maps")) -> None:
    """Clear the pending error of this thread, which the caller has reported.

    Each loaded runtime has a pending error of its own, and torch does not say which runtime it uses: all are cleared.

    Args:
        device: the GPU that is used.
        maps: what is loaded into this process, as Linux lists it.
    """
    loaded = {Path(line.split(maxsplit=5)[-1]) for line in maps.read_text().splitlines()}
    runtimes = [
        (path, function)
        for path in sorted(loaded)
        for library, function in _TAKES_ERROR.items()
        if path.name.startswith(library)
    ]
    for path, function in runtimes:
        getattr(ctypes.CDLL(str(path)), function)()
    if not runtimes:
        _provoke(device)


def _provoke(device: torch.device) -> None:
    """Clear the error where the runtime is linked into torch's own library: the launch check of a kernel raises it."""
    try:
        torch.zeros(1, device=device)
    except RuntimeError:
        return
