"""Contents of the bundle, and checks of its completeness and size that need neither pip nor a network."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from gpu.environment import BUILD, IMPORT

FOLDER = ".bundle"
LIMIT_BYTES = 64 << 20
"""Largest size of the bundle plus the working tree; both are sent to a machine without a network."""

PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(28, 4, -1)),
    "manylinux2014_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
)
"""Platform tags of the binary wheels that run with glibc 2.28 or newer."""

DEBIAN_FILES = {
    "libxxhash-dev": {"usr/include/xxhash.h": "include"},
    "liburing-dev": {
        "usr/include/liburing.h": "include",
        "usr/include/liburing/*.h": "include/liburing",
        "usr/lib/x86_64-linux-gnu/liburing.a": "lib",
    },
}
"""File patterns by Debian package, each with the folder of the bundle that its files are copied into."""

NATIVE_FILES = ("include/xxhash.h", "include/liburing.h", "include/liburing/io_uring.h", "lib/liburing.a")


class BundleError(RuntimeError):
    """The bundle lacks something that a machine without a network needs."""


def check(folder: Path, python: str, *, beside_bytes: int = 0) -> int:
    """Check whether a bundle is complete for one Python version.

    Args:
        folder: the bundle's folder.
        python: version, such as "3.12".
        beside_bytes: size of the files that are sent with the bundle.

    Returns:
        Size of the folder in bytes.

    Raises:
        BundleError: the bundle is incomplete or too large; the message names every missing file, every wheel that does
            not fit, or the size.
    """
    wheels = sorted((folder / "wheels").glob("*"))
    faults = [f"{name} is missing" for name in NATIVE_FILES if not (folder / name).is_file()]
    faults += _misfits(wheels, python)
    found = [_name_of(wheel) for wheel in wheels]
    faults += [f"no wheel of {name}" for name in (*BUILD, *IMPORT) if canonicalize_name(name) not in found]
    faults += [f"two wheels of {name}" for name in sorted({name for name in found if found.count(name) > 1})]
    nbytes = folder_bytes(folder)
    if nbytes + beside_bytes > LIMIT_BYTES:
        faults.append(
            f"{_mebibytes(nbytes)} and {_mebibytes(beside_bytes)} of working tree are more than "
            f"{_mebibytes(LIMIT_BYTES)}"
        )
    if faults:
        raise BundleError(f"{folder} for Python {python}: " + "; ".join(faults))
    return nbytes


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def tree_bytes(root: Path) -> int:
    """Return the total bytes of the files that are sent to the machine."""
    return sum((root / name).lstat().st_size for name in tree_files(root))


def tree_files(root: Path) -> list[str]:
    """Return the paths, relative to `root`, of the files that git tracks or does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    ).stdout
    names = [name.decode() for name in listed.split(b"\0") if name]
    return [name for name in names if (root / name).is_file()]


def _misfits(wheels: Iterable[Path], python: str) -> list[str]:
    """Return the reasons why wheels cannot be installed for a CPython of this version on x86-64 Linux."""
    major, minor = (int(part) for part in python.split("."))
    platforms = list(PLATFORMS)
    wanted = {*cpython_tags((major, minor), platforms=platforms), *compatible_tags((major, minor), platforms=platforms)}
    faults = []
    for wheel in wheels:
        try:
            tags = parse_wheel_filename(wheel.name)[3]
        except InvalidWheelFilename:
            faults.append(f"{wheel.name} is no wheel")
            continue
        if not tags & wanted:
            faults.append(f"{wheel.name} does not fit CPython {python} on x86-64 Linux with glibc 2.28")
    return faults


def _name_of(wheel: Path) -> str:
    try:
        return str(parse_wheel_filename(wheel.name)[0])
    except InvalidWheelFilename:
        return ""


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB"
