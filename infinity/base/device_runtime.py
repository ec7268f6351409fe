"""C functions of the device's runtime that torch does not bind, found in the library that torch has loaded.

A runtime call that fails returns its error and also leaves the error pending: the launch check of the next kernel finds
the error and blames the kernel. torch's binding of `cudaHostRegister` leaves the error pending, and torch has no
binding of `cudaGetLastError`, which clears it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from infinity.errors import ConfigError

_PREFIXES = {"libcudart": "cuda", "libamdhip64": "hip"}
"""Prefixes of a runtime's function names, by the beginning of the runtime's file name."""
_DELETED = " (deleted)"
"""Suffix that Linux adds to the path of a loaded file after the file was replaced, for example by a package upgrade."""
_MAPS = Path("/proc/self/maps")
_ADDRESS_BYTES = 32


def _loaded(maps: Path) -> list[tuple[Path, str]]:
    """Return the paths of the runtimes in this process, each with the prefix of its functions."""
    files = {Path(line.split(maxsplit=5)[-1]) for line in maps.read_text().splitlines()}
    return [
        (file, prefix)
        for file in sorted(files)
        for library, prefix in _PREFIXES.items()
        if file.name.startswith(library)
    ]


def _open(path: Path) -> ctypes.CDLL | None:
    """Open a loaded library.

    Returns None if the library's file was replaced and the linker does not know the library by name either. Opening the
    new file at this path would load a second runtime.
    """
    if not path.name.endswith(_DELETED):
        return ctypes.CDLL(str(path))
    path = path.with_name(path.name.removesuffix(_DELETED))
    names = [str(path), path.name]
    while names[-1].rpartition(".")[2].isdigit():  # the linker knows libcudart.so.12.4.127 as libcudart.so.12
        names.append(names[-1].rpartition(".")[0])
    for name in names:
        try:
            return ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        except OSError:
            continue
    return None


def forget_error(device: torch.device, maps: Path = _MAPS) -> None:
    """Clear the pending error of this thread, which the caller has reported.

    Each loaded runtime has its own pending error, and torch does not report which runtime it uses, so all pending
    errors are cleared.

    Args:
        device: the GPU that is used.
        maps: Linux's list of the files mapped into this process.
    """
    opened = [(_open(path), prefix) for path, prefix in _loaded(maps)]
    for library, prefix in opened:
        if library is not None:
            getattr(library, f"{prefix}GetLastError")()
    if not opened or any(library is None for library, _ in opened):
        _provoke(device)


def _provoke(device: torch.device) -> None:
    """Clear the error of a runtime inside torch's own library: launch a kernel, whose launch check raises the error."""
    try:
        torch.zeros(1, device=device)
    except RuntimeError:
        return


def addresses(names: Sequence[str], maps: Path = _MAPS) -> list[int] | None:
    """Return the addresses of functions of the loaded runtime.

    The result is None if the runtime is linked into torch's own library. If there are several CUDA runtimes, any of
    them can be used, because streams and events belong to the driver.

    Args:
        names: names of the functions without their prefix ("EventRecord").
        maps: Linux's list of the files mapped into this process.

    Raises:
        ConfigError: the runtime's file was replaced after it had been loaded, and the runtime's functions can no longer
            be found.
    """
    prefix = "cuda" if torch.version.hip is None else "hip"
    runtimes = [path for path, of in _loaded(maps) if of == prefix]
    if not runtimes:
        return None
    library = next((each for each in map(_open, runtimes) if each is not None), None)
    if library is None:
        raise ConfigError(
            f"{str(runtimes[0]).removesuffix(_DELETED)} was replaced by an upgrade after this process had loaded it, "
            "and its functions cannot be found any more. Start the process again."
        )
    found = [ctypes.cast(getattr(library, prefix + name), ctypes.c_void_p).value for name in names]
    return [address for address in found if address is not None]


def pci_address(index: int) -> str:
    """Return a device's address on the PCI bus, as /sys writes it ('0000:65:00.0'); '' if it is unknown."""
    found = addresses(("DeviceGetPCIBusId",))
    if not found:
        return ""
    ask = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_int)(found[0])
    text = ctypes.create_string_buffer(_ADDRESS_BYTES)
    return "" if ask(text, _ADDRESS_BYTES, index) != 0 else text.value.decode("ascii", "replace").lower()
