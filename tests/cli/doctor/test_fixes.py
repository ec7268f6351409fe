"""Commands for this machine, and for the container that it is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from infinity.cli.doctor.fixes import container_kind, pip_install, python, restarted
from tests.io.test_disks import write


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({}, ""),
        ({".dockerenv": ""}, "docker"),
        ({"run/.containerenv": ""}, "podman"),
        ({"proc/1/cgroup": "0::/kubepods/pod1"}, "kubernetes"),
        ({".dockerenv": "", "proc/1/cgroup": "0::/kubepods/pod1"}, "kubernetes"),
        ({"proc/1/cgroup": "0::/docker/abc"}, "docker"),
        ({"proc/1/cgroup": "0::/machine.slice/libpod-1"}, "podman"),
        ({"proc/1/cgroup": "0::/lxc/1"}, "lxc"),
        ({"proc/1/cgroup": "0::/system.slice/containerd"}, "another kind"),
    ],
)
def test_containers_are_known_by_their_traces(files: dict[str, str], kind: str, tmp_path: Path) -> None:
    write(tmp_path, files)
    assert container_kind(tmp_path) == kind
    command = f"{kind} run --gpus all …" if kind in ("docker", "podman") else ""
    assert restarted("--gpus all", tmp_path) == command


def test_python_is_called_by_its_name_only_where_the_shell_finds_this_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert python() == sys.executable
    (tmp_path / "python3").symlink_to(sys.executable)
    assert python() == sys.executable  # a link to the same program belongs to another environment
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    assert python() == "python3"
    assert pip_install("a>=1", "b") == "python3 -m pip install --upgrade 'a>=1' b"
