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
_ADDRESS_BYTES = 32


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

    None where the runtime is linked into torch's own library. Of several CUDA runtimes any one will do: streams and
    events are the driver's.
    """
    prefix = "cuda" if torch.version.hip is None else "hip"
    runtimes = [runtime for runtime in _loaded(maps) if runtime[1] == prefix]
    if not runtimes:
        return None
    library = ctypes.CDLL(str(runtimes[0][0]))
    found = [ctypes.cast(getattr(library, prefix + name), ctypes.c_void_p).value for name in names]
    return [address for address in found if address is not None]


def pci_address(index: int) -> str:
    """Where a device is on the PCI bus, as /sys writes it ('0000:65:00.0'); '' where the runtime does not tell."""
    found = addresses(("DeviceGetPCIBusId",))
    if not found:
        return ""
    ask = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_int)(found[0])
    text = ctypes.create_string_buffer(_ADDRESS_BYTES)
    return "" if ask(text, _ADDRESS_BYTES, index) != 0 else text.value.decode("ascii", "replace").lower()
