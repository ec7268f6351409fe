"""Whether a wheel is what it should be: portable, complete, and nothing in it that does not belong there."""

from __future__ import annotations

import io
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from packaging.utils import parse_wheel_filename

LICENSES = ("LICENSE", "release/licenses/liburing.txt", "release/licenses/pybind11.txt", "release/licenses/xxhash.txt")
"""infinity's own, and those of what is compiled into the core."""

SYSTEM = {"libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "libc.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2",
          "ld-linux-aarch64.so.1"}  # fmt: skip
"""Libraries of the system that the core may link: neither torch nor CUDA, neither liburing nor xxhash."""

STUBS = ("infinity/py.typed", "infinity/_native.pyi", "infinity/_native_codec.pyi", "infinity/_native_device.pyi")

_NATIVE = re.compile(r"infinity/_native\.[\w.-]+\.so")
_INSIDE = re.compile(rf"infinity/(?:[\w/]+\.pyi?|py\.typed)|{_NATIVE.pattern}|infinity_offload-[\w.]+\.dist-info/.+")


class WheelError(RuntimeError):
    """A wheel must not be given away; names everything that is wrong with it."""


@dataclass(frozen=True)
class Facts:
    """Facts about a correct wheel.

    Attributes:
        platforms: its tags, such as "manylinux_2_34_x86_64".
        linked: libraries of the system that the core needs.
    """

    nbytes: int
    native_bytes: int
    platforms: tuple[str, ...]
    linked: tuple[str, ...]


def check(wheel: Path, built_in: Path | None = None) -> Facts:
    """Check a repaired wheel.

    Args:
        wheel: the wheel's file.
        built_in: a folder whose path must not be in the core.

    Raises:
        WheelError: names every fault.
    """
    platforms = tuple(sorted(tag.platform for tag in parse_wheel_filename(wheel.name)[3]))
    faults = [f"its tag {tag} is for this machine alone" for tag in platforms if not tag.startswith("manylinux_")]
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        native = [name for name in names if _NATIVE.fullmatch(name)]
        core = archive.read(native[0]) if native else b""
    faults += [f"{name} does not belong there" for name in names if not _INSIDE.fullmatch(name)]
    faults += [f"{name} is missing" for name in STUBS if name not in names]
    faults += [f"the licence {each} is missing" for each in LICENSES if not _has_license(names, each)]
    if len(native) == 1:
        linked, more = _of_core(core, built_in)
        faults += more
    else:
        linked = ()
        faults.append(f"it has {len(native)} native cores")
    if faults:
        raise WheelError(f"{wheel}: " + "; ".join(faults))
    return Facts(wheel.stat().st_size, len(core), platforms, linked)


def _has_license(names: list[str], path: str) -> bool:
    return any(name.endswith(f".dist-info/licenses/{path}") for name in names)


def _of_core(core: bytes, built_in: Path | None) -> tuple[tuple[str, ...], list[str]]:
    """Return the libraries that the core links, and the faults that were found in it."""
    file = ELFFile(io.BytesIO(core))
    linked, faults = [], []
    for section in file.iter_sections():
        if section.name == ".symtab" or section.name.startswith(".debug"):
            faults.append(f"the core is not stripped: it has {section.name}")
        if not isinstance(section, DynamicSection):
            continue
        for tag in section.iter_tags():
            if tag.entry.d_tag == "DT_NEEDED":
                linked.append(tag.needed)
            elif tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH"):
                faults.append(f"the core has {tag.entry.d_tag[3:]} {getattr(tag, tag.entry.d_tag[3:].lower())!r}")
    faults += [f"the core links {name}" for name in linked if name not in SYSTEM]
    if b"built without liburing" in core:
        faults.append("the core has no io_uring")
    if built_in is not None and str(built_in).encode() in core:
        faults.append(f"the core names the folder it was built in, {built_in}")
    return tuple(sorted(linked)), faults
