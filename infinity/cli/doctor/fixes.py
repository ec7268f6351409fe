"""Shell commands that repair the problems that the doctor finds on this machine."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from infinity.base.small_files import text_of

_ROOT = Path("/")


def pip_install(*requirements: str, how: str = "--upgrade") -> str:
    return f"{python()} -m pip install {how} {' '.join(map(shlex.quote, requirements))}"


def python() -> str:
    """Return the shell command that starts this Python interpreter."""
    for name in ("python", "python3"):
        found = shutil.which(name)
        if found is not None and os.path.abspath(found) == os.path.abspath(sys.executable):
            return name
    return shlex.quote(sys.executable or "python3")


def written(value: str, path: str) -> str:
    """Return the command that writes a kernel setting."""
    return f"echo {value} | sudo tee {shlex.quote(path)}"


def container_kind(root: Path = _ROOT) -> str:
    """Return 'docker', 'podman', 'kubernetes', 'lxc' or 'another kind'; '' outside a container."""
    if (root / "run/.containerenv").exists():
        return "podman"
    groups = text_of(root / "proc/1/cgroup") + text_of(root / "proc/self/cgroup")
    if "kubepods" in groups or (root / "var/run/secrets/kubernetes.io").exists():
        return "kubernetes"
    if (root / ".dockerenv").exists() or "docker" in groups:
        return "docker"
    for word, kind in (("libpod", "podman"), ("lxc", "lxc"), ("containerd", "another kind")):
        if word in groups:
            return kind
    return ""


def restarted(option: str, root: Path = _ROOT) -> str:
    """Return the command that starts this container again with a docker or podman option; '' elsewhere."""
    kind = container_kind(root)
    return f"{kind} run {option} …" if kind in ("docker", "podman") else ""
