"""Choice of a Python that runs infinity without a network: the given one, or a virtual environment on top of it.

The machine's own installation is not changed. The virtual environment sees the packages of the given Python. The
virtual environment adds the missing packages from the bundle, and infinity built from this checkout. This module uses
only the standard library.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENVIRONMENT = Path("build") / "gpu-venv"
"""Path of the virtual environment, relative to the checkout."""

BUILD = ("scikit-build-core", "pybind11", "cmake", "ninja")
"""Distributions that the build of infinity needs. cmake and ninja may be system programs instead."""
IMPORT = ("numpy", "pydantic", "pyyaml", "psutil")
"""Distributions, other than torch, that `import infinity` needs."""
TRAINER = ("trl", "datasets", "dill", "multiprocess", "xxhash")
"""Distributions, other than transformers, that `infinity finetune` needs, and their small dependencies."""
STAGES = (("pytest", "pytest-timeout", "hypothesis"), ("rich",), ("safetensors",), TRAINER, ("transformers",))
"""Groups of distributions that single stages need.

If a group is missing, the stage that needs it reports this; the other stages run.
"""

_PROGRAMS = ("cmake", "ninja")
_HAS_NATIVE = "from infinity import _native; import infinity; print(infinity.__file__)"
_TORCH = """
import json, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "devices": 0}
if torch.cuda.is_available():
    found |= {"devices": torch.cuda.device_count(), "gpu": torch.cuda.get_device_name(0)}
print(json.dumps(found))
"""
_SITES = "import json, sys; print(json.dumps([p for p in sys.path if p.endswith(('site-packages', 'dist-packages'))]))"


class PreparationError(RuntimeError):
    """No Python could be prepared to run infinity; the message says what is missing and what to do."""


@dataclass(frozen=True)
class TorchFacts:
    """Facts about torch under one Python.

    Attributes:
        cuda: the CUDA version that torch was built for; None if torch is missing or was built without CUDA.
        devices: number of GPUs that torch sees.
    """

    python: Path
    torch: str | None
    cuda: str | None
    devices: int
    gpu: str = ""

    def missing(self) -> str:
        """Return the reason why nothing can run on a GPU; '' when a GPU can be used."""
        if self.devices:
            return ""
        if self.torch is None:
            return f"needs a CUDA device: {self.python} has no torch"
        return f"needs a CUDA device: torch {self.torch} sees none (torch.version.cuda={self.cuda})"


def probe_torch(python: Path) -> TorchFacts:
    """Return the version of torch under a Python and the GPUs that torch sees. Both are read in a separate process."""
    asked = _run([python, "-c", _TORCH], check=False)
    try:
        found = json.loads(asked.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return TorchFacts(python, None, None, 0)
    return TorchFacts(python, found["torch"], found["cuda"], found["devices"], found.get("gpu", ""))


def choose_python(candidates: list[Path]) -> TorchFacts:
    """Choose the best candidate. If several are equally good, choose the first.

    From the best to the worst, candidates are: a Python whose torch sees a GPU, a Python whose torch was built for
    CUDA, a Python that has infinity, and a Python that has torch.
    """
    probed = [probe_torch(python) for python in candidates]
    for good in (
        lambda each: each.devices > 0,
        lambda each: each.cuda is not None,
        lambda each: each.torch is not None and has_infinity(each.python),
        lambda each: each.torch is not None,
    ):
        for each in probed:
            if good(each):
                return each
    return probed[0]


def has_infinity(python: Path, root: Path | None = None) -> bool:
    """Return whether infinity and its native core can be imported; with `root`, whether both belong to this
    checkout."""
    asked = _run([python, "-c", _HAS_NATIVE], check=False, cwd=Path("/"))
    if asked.returncode:
        return False
    return root is None or Path(asked.stdout.strip().splitlines()[-1]).resolve().is_relative_to(root.resolve())


def prepared(root: Path, python: Path) -> Path | None:
    """Return the Python that `prepare` would return, if it needs no installation and no build; else None."""
    candidates = (python, _environment_python(root))
    return next((each for each in candidates if each.exists() and has_infinity(each, root)), None)


def prepare(root: Path, python: Path) -> tuple[Path, dict[str, Any]]:
    """Prepare a Python that imports infinity from this checkout.

    Args:
        root: root of the checkout; its .bundle is used if it exists.
        python: a Python that has torch; the installed torch is used and not changed.

    Returns:
        The Python, and a record of the actions taken: installed distributions, and whether infinity was built.

    Raises:
        PreparationError: a required package is missing, also in the bundle; or the build failed.
    """
    if has_infinity(python, root):
        return python, {"python": str(python), "installed": [], "built": False}
    inside = _make_environment(root, python)
    installed = _install_missing(root, inside)
    _build(root, inside)
    if not has_infinity(inside, root):
        raise PreparationError(f"infinity was built, and {inside} cannot import it:\n{_why(inside)}")
    return inside, {"python": str(inside), "over": str(python), "installed": installed, "built": True}


def _environment_python(root: Path) -> Path:
    return root / ENVIRONMENT / "bin" / "python"


def _make_environment(root: Path, python: Path) -> Path:
    """Return an environment that sees the packages of `python`; the environment's own packages have precedence."""
    inside = _environment_python(root)
    has_pip = _run([python, "-m", "pip", "--version"], check=False).returncode == 0
    if not inside.exists() or not _same_version(inside, python):
        shutil.rmtree(root / ENVIRONMENT, ignore_errors=True)
        flags = ["--without-pip"] if has_pip else []
        done = _run([python, "-m", "venv", *flags, root / ENVIRONMENT], check=False)
        if done.returncode:
            raise PreparationError(f"no virtual environment can be made with {python}:\n{_words(done)}")
    sites = json.loads(_run([python, "-c", _SITES]).stdout)
    own = json.loads(_run([inside, "-c", "import json, site; print(json.dumps(site.getsitepackages()))"]).stdout)[0]
    (Path(own) / "preinstalled.pth").write_text("".join(f"{path}\n" for path in sites))
    return inside


def _same_version(*pythons: Path) -> bool:
    """Return whether code compiled for one of these Pythons fits the others."""
    ask = "import sys; print(sys.implementation.cache_tag)"
    return len({_run([python, "-c", ask], check=False).stdout for python in pythons}) == 1


def _install_missing(root: Path, inside: Path) -> list[str]:
    """Install the missing distributions, only from the bundle; return the distributions that were added.

    Raises:
        PreparationError: a distribution is missing that the build or the import needs.
    """
    before = _distributions(inside)
    needed = [*(name for name in BUILD if name not in _PROGRAMS or shutil.which(name) is None), *IMPORT]
    done = _pip(root, inside, "install", *(_requirement(root, name) for name in needed))
    if done.returncode:
        raise PreparationError(
            "what infinity needs is neither installed nor in the bundle; run `make gpu-bundle` where there is a "
            f"network and bring the folder .bundle along:\n{_words(done)}"
        )
    for group in STAGES:
        absent = [name for name in group if _normal(name) not in before]
        if (
            absent
            and (done := _pip(root, inside, "install", *(_requirement(root, name) for name in absent))).returncode
        ):
            print(f"not to be had, stages that need it will say so: {', '.join(absent)}", file=sys.stderr)
    return sorted(_distributions(inside) - before)


def _build(root: Path, inside: Path) -> None:
    arguments = ("--no-build-isolation", "--no-deps", "-e", str(root))
    done = _pip(root, inside, "install", *arguments)
    if done.returncode:
        raise PreparationError(f"building infinity failed:\n{_words(done)}")


def _pip(root: Path, inside: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pip without any index, whatever the machine's pip configuration says."""
    wheels = root / ".bundle" / "wheels"
    links = ["--find-links", str(wheels)] if wheels.is_dir() else []
    command, rest = arguments[0], arguments[1:]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    path = f"{inside.parent}{os.pathsep}{kept.get('PATH', os.defpath)}"
    return _run(
        [inside, "-m", "pip", command, "-q", "--no-index", *links, *rest],
        check=False,
        env={
            **kept,
            "PATH": path,
            "PIP_NO_INDEX": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_INPUT": "1",
            "PIP_CONFIG_FILE": os.devnull,
        },
    )


def _requirement(root: Path, name: str) -> str:
    """Return the distribution's name with the version bounds from pyproject.toml."""
    text = (root / "pyproject.toml").read_text()
    for requirement in json.loads(_run([sys.executable, "-c", _READ_TOML, "-"], feed=text).stdout):
        bare = requirement.split(";")[0].strip()
        if _normal(re.split(r"[^\w.-]", bare)[0]) == _normal(name):
            return bare
    return name


_READ_TOML = """
import json, sys
try:
    import tomllib
except ModuleNotFoundError:
    from pip._vendor import tomli as tomllib
project = tomllib.loads(sys.stdin.read())
extra = [each for group in project["project"].get("optional-dependencies", {}).values() for each in group]
print(json.dumps([*project["build-system"]["requires"], *project["project"]["dependencies"], *extra]))
"""


def _distributions(python: Path) -> set[str]:
    listed = _run(
        [python, "-c", "import importlib.metadata as m\nfor d in m.distributions(): print(d.metadata['Name'])"],
        cwd=Path("/"),
    )
    return {_normal(name) for name in listed.stdout.split()}


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _why(python: Path) -> str:
    return _words(_run([python, "-c", _HAS_NATIVE], check=False, cwd=Path("/")))


def _words(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stdout + done.stderr)[-3000:]


def _run(
    command: list[Any],
    *,
    check: bool = True,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    feed: str | None = None,
) -> subprocess.CompletedProcess[str]:
    source: dict[str, Any] = {"stdin": subprocess.DEVNULL} if feed is None else {"input": feed}
    return subprocess.run(
        [str(each) for each in command], capture_output=True, text=True, check=check, cwd=cwd, env=env, **source
    )
