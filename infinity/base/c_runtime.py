"""The device's runtime as C functions, found in the library that torch has loaded: torch has no binding of some.

A runtime call that fails returns its error and also leaves the error pending: the launch check of the next kernel finds
it and blames the kernel. torch's binding of `cudaHostRegister` leaves the error pending, and torch has no binding of
`cudaGetLastError`, which clears it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

_PREFIXES = {"libcudart": "cuda", "libamdhip64": "hip"}
"""What the runtime's functions begin with, by the beginning of its file name."""
_MAPS = Path("/proc/self/maps")


def _loaded(maps: Path) -> list[tuple[Path, str]]:
    """The runtimes in this process, and what their functions begin with."""
    files = {Path(line.split(maxsplit=5)[-1]) for line in maps.read_text().splitlines()}
    return [
        (file, prefix)
        for file in sorted(files)
        for library, prefix in _PREFIXES.items()
        if file.name.startswith(library)
    ]


def forget_error(device: torch.device, maps: Path = _MAPS) -> None:
    """Clear the pending error of this thread, which the caller has reported.

    Each loaded runtime has a pending error of its own, and torch does not say which runtime it uses: all are cleared.

    Args:
        device: the GPU that is used.
        maps: what is loaded into this process, as Linux lists it.
    """
    runtimes = _loaded(maps)
    for path, prefix in runtimes:
        getattr(ctypes.CDLL(str(path)), f"{prefix}GetLastError")()
    if not runtimes:
        _provoke(device)


def _provoke(device: torch.device) -> None:
    """Clear the error where the runtime is linked into torch's own library: the launch check of a kernel raises it."""
    try:
        torch.zeros(1, device=device)
    except RuntimeError:
        return


def addresses(names: Sequence[str], maps: Path = _MAPS) -> list[int] | None:
    """The addresses of functions of the loaded runtime, by their names without the prefix ("EventRecord").

    None where the runtime is linked into torch's own library. Of several that are loaded any one will do: streams and
    events are the driver's.
    """
    runtimes = _loaded(maps)
    if not runtimes:
        return None
    path, prefix = runtimes[0]
    library = ctypes.CDLL(str(path))
    found = [ctypes.cast(getattr(library, prefix + name), ctypes.c_void_p).value for name in names]
    return [address for address in found if address is not None]
