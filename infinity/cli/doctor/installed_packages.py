"""Versions of Python, of infinity and of its dependencies, read without importing them."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from typing import TYPE_CHECKING

import infinity
from infinity.cli.doctor.fixes import pip_install, python
from infinity.cli.doctor.probes import ProbeFinding, State

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_DISTRIBUTION, _OTHER = "infinity-offload", "infinity"
_LIMIT_S = 20
_OPTIONAL = ("trl", "peft", "datasets", "lightning", "bitsandbytes")
"""Optional libraries that scripts and some commands use. infinity's extras name the required versions."""


def system() -> ProbeFinding:
    library = " ".join(filter(None, platform.libc_ver())) or "no glibc"
    said = f"{platform.system()} {platform.release()}, {library}, Python {platform.python_version()}"
    if platform.system() != "Linux":
        return ProbeFinding("missing", f"{said}; infinity runs on Linux")
    return ProbeFinding("ok", said)


def infinity_version() -> ProbeFinding:
    """Return infinity's version. Raise PackageNotFoundError if infinity is not installed."""
    return ProbeFinding("ok", metadata.version(_DISTRIBUTION))


def imported() -> ProbeFinding:
    """Return a row about the module that `import infinity` finds for a script in this directory.

    PyPI has another package with the module name "infinity": infinity.py.
    """
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
        said = f"`import infinity` finds {origin or 'nothing'} here, not this infinity"
        if other:
            return ProbeFinding("missing", f"{said}; {other}", f"{away} && {again}")
        return ProbeFinding("missing", f"{said}: rename it, or start scripts in another directory" if origin else said)
    if other:
        return ProbeFinding(
            "slower",
            f"{other} as well: `import infinity` finds infinity, and programs that need the other package fail",
            away,
        )
    return ProbeFinding("ok", "finds infinity")


def required() -> ProbeFinding:
    """Return a row about the libraries that infinity requires."""
    return _judged([each for each in _requirements() if each.marker is None], "missing")


def optional() -> ProbeFinding:
    """Return a row about the optional libraries, which scripts and some commands use, as far as they are installed."""
    there = {each.name: each for each in _requirements() if each.name in _OPTIONAL and _version(each.name)}
    return _judged(there.values(), "slower")


def _judged(asked: Iterable[Requirement], otherwise: State) -> ProbeFinding:
    """Return a row that says whether the installed libraries meet these requirements.

    `otherwise` is the state of the row if a required library is not installed or too old.
    """
    said, wrong = [], []
    for each in asked:
        version = _version(each.name)
        fits = version is not None and each.specifier.contains(version, prereleases=True)
        said.append(f"{each.name} {version or 'not installed'}{'' if fits else f' (needed: {each.specifier})'}")
        wrong += [] if fits else [f"{each.name}{each.specifier}"]
    return ProbeFinding(otherwise if wrong else "ok", ", ".join(said) or "none", pip_install(*wrong) if wrong else "")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _requirements() -> list[Requirement]:
    from packaging.requirements import Requirement

    return [Requirement(line) for line in metadata.requires(_DISTRIBUTION) or []]
