"""Versions of Python, of infinity and of what it uses, read without importing any of it."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib import metadata
from typing import Any

import infinity
from infinity.cli.doctor.mends import pip_install, python
from infinity.cli.doctor.rows import Found, Probes

_DISTRIBUTION, _OTHER = "infinity-offload", "infinity"
_LIMIT_S = 20
_SHOWN = ("torch", "transformers", "accelerate", "safetensors")
_OPTIONAL = {
    "peft": "needed for LoRA only",
    "trl": "needed for scripts that use it only",
    "datasets": "needed for tables (.parquet, .csv) only",
    "bitsandbytes": "never needed",
}
_RINGS, _TABLES = (5, 6), (5, 19)
"""The first kernel whose io_uring infinity uses, and the first that registers buffers as infinity does."""


def versions() -> Probes:
    def libraries(names: Iterable[str]) -> dict[str, Callable[[], Found]]:
        return {name: partial(library, name) for name in names}

    rows = {"Python": python_version, "infinity": infinity_version, "import infinity": imported}
    rows |= libraries(_SHOWN) | {"other requirements": others} | libraries(_OPTIONAL)
    return Probes.of("versions", rows | {"kernel": kernel, "C library": c_library})


def python_version() -> Found:
    version = platform.python_version()
    asked = _about().get("Requires-Python", "")
    if _fits(version, asked):
        return Found("ok", version)
    return Found("missing", f"{version}; infinity needs {asked}")


def infinity_version() -> Found:
    return Found("ok", _about()["Version"])


def imported() -> Found:
    """What a script in this directory imports as infinity. PyPI has another package of that name: infinity.py."""
    asked = "import importlib.util as u; found = u.find_spec('infinity'); print(found.origin if found else '')"
    line = [sys.executable, "-c", asked]
    origin = subprocess.run(line, capture_output=True, text=True, timeout=_LIMIT_S, check=True).stdout.strip()
    again = pip_install(_DISTRIBUTION, how="--force-reinstall --no-deps")
    away = f"{python()} -m pip uninstall -y {_OTHER}"
    try:
        other = f"PyPI's other package {_OTHER} {metadata.version(_OTHER)} is installed"
    except metadata.PackageNotFoundError:
        other = ""
    if not os.path.exists(origin) or not os.path.samefile(origin, str(infinity.__file__)):
        said = f"`import infinity` finds {origin or 'nothing'} here, and not this infinity"
        if other:
            return Found("missing", f"{said}; {other}", f"{away} && {again}")
        return Found("missing", f"{said}: rename it, or start scripts elsewhere" if origin else said)
    if other:
        return Found(
            "slower", f"{other} as well: `import infinity` finds infinity, and what needs the other fails", away
        )
    return Found("ok", "finds infinity")


def library(name: str) -> Found:
    """A library that infinity needs, or that it can use."""
    each = {each.name: each for each in _requirements()}.get(name)
    asked, needed = ("", False) if each is None else (str(each.specifier), each.marker is None)
    mend = pip_install(f"{name}{asked}")
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        said = "not installed"
        return Found("missing", said, mend) if needed else Found("ok", f"{said}; {_OPTIONAL.get(name, 'not needed')}")
    if _fits(version, asked):
        return Found("ok", version)
    return Found("missing" if needed else "slower", f"{version}; infinity needs {asked}", mend)


def others() -> Found:
    """The libraries that infinity requires and that have no row of their own."""
    rest = [each for each in _requirements() if each.marker is None and each.name not in _SHOWN]
    found = {f"{each.name}{each.specifier}": library(each.name)._replace(name=each.name) for each in rest}
    lacking = {asked: each for asked, each in found.items() if each.state != "ok"}
    said = [f"{each.name} {each.finding}" for each in (lacking or found).values()]
    return Found("missing", "; ".join(said), pip_install(*lacking)) if lacking else Found("ok", ", ".join(said))


def kernel(system: str = "", release: str = "") -> Found:
    """Args: system, release: of the kernel, for tests."""
    system, release = system or platform.system(), release or platform.release()
    if system != "Linux":
        return Found("missing", f"{system} {release}; infinity runs on Linux")
    match = re.match(r"(\d{1,9})\.(\d{1,9})", release)
    if match is None:
        return Found("unknown", f"{release}: not a version")
    number = int(match[1]), int(match[2])
    if number < _RINGS:
        return Found("slower", f"{release}; from 5.6 on there is io_uring, which takes less processor time")
    if number < _TABLES:
        return Found("slower", f"{release}; from 5.19 on transfers with registered buffers take less processor time")
    return Found("ok", release)


def c_library() -> Found:
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION")
    except (OSError, ValueError):  # another library than glibc
        version = None
    return Found("ok", version) if version else Found("unknown", "it does not tell its version: it is not glibc")


# -- what infinity asks for --------------------------------------------------------------------------------------------


def _about() -> Any:
    """Raises PackageNotFoundError where infinity runs without being installed."""
    return metadata.metadata(_DISTRIBUTION)


def _requirements() -> list[Any]:
    from packaging.requirements import Requirement

    return [Requirement(line) for line in metadata.requires(_DISTRIBUTION) or []]


def _fits(version: str, asked: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(asked).contains(version, prereleases=True)
