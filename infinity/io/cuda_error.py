"""The error that the CUDA runtime keeps for whoever asks next.

A call of the runtime that fails returns its error and leaves it pending, too: the next kernel's launch check finds it
and blames the kernel. torch's binding of `cudaHostRegister` leaves it there, and torch has no `cudaGetLastError`, which
takes it away. So it is called in the runtime that torch has loaded.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

_TAKES_ERROR = {"libcudart": "cudaGetLastError", "libamdhip64": "hipGetLastError"}
"""By the beginning of a runtime's file name, the function that returns the pending error and forgets it."""


def forget(device: torch.device, maps: Path = Path("/proc/self/maps")) -> None:
    """Forget the pending error of this thread: it was told.

    Each runtime that is loaded keeps an error of its own, and nobody says which runtime torch uses: all are asked.

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
    """Where the runtime is a part of torch's own library: the launch check of a kernel takes the error, and raises."""
    try:
        torch.zeros(1, device=device)
    except RuntimeError:
        return
