"""Cheap facts of pyproject.toml about wheels and the source distribution. `make wheel-test` builds and installs."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from release.checks import LICENSES

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The files of the source distribution, without its top folder."""
    folder = tmp_path_factory.mktemp("sdist")
    code = f"from scikit_build_core.build import build_sdist; build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        return {name.split("/", 1)[1] for name in archive.getnames()}


def tracked(*folders: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}


def test_the_source_distribution_has_all_that_is_built(packed: set[str]) -> None:
    assert tracked("infinity", "csrc", "examples") <= packed
    assert {"CMakeLists.txt", "pyproject.toml", "README.md", *LICENSES} <= packed
    core = (ROOT / "CMakeLists.txt").read_text().split("if(INFINITY_TESTS)")[0]
    named = set(re.findall(r"csrc/[\w/]+\.cpp", core))
    assert named
    assert named <= packed


def test_the_source_distribution_has_nothing_that_only_lies_in_the_checkout(packed: set[str]) -> None:
    folders = {name.split("/")[0] for name in packed}
    files = {"CMakeLists.txt", "LICENSE", "PKG-INFO", "README.md", "constraints.txt", "pyproject.toml"}
    assert folders == {"csrc", "docs", "examples", "infinity", "release", *files}
    assert [name for name in packed if name.endswith((".so", ".pyc")) or "__pycache__" in name] == []


def test_the_notices_of_what_is_compiled_in_are_in_the_metadata(project: dict[str, Any]) -> None:
    found = {
        path.relative_to(ROOT).as_posix() for each in project["project"]["license-files"] for path in ROOT.glob(each)
    }
    assert found == set(LICENSES)
    for name, words in (("liburing", "MIT licence"), ("xxhash", "BSD 2-Clause"), ("pybind11", "neither the name of")):
        assert words.lower() in (ROOT / "release" / "licenses" / f"{name}.txt").read_text().lower()


def test_building_takes_neither_torch_nor_any_other_dependency(project: dict[str, Any]) -> None:
    names = {Requirement(each).name for each in project["build-system"]["requires"]}
    assert names == {"scikit-build-core", "pybind11"}


def test_the_commands_exist(project: dict[str, Any]) -> None:
    for target in project["project"]["scripts"].values():
        module, name = target.split(":")
        assert callable(getattr(import_module(module), name))


def test_wheels_are_built_for_every_python_that_is_supported(project: dict[str, Any]) -> None:
    pattern = project["tool"]["cibuildwheel"]["build"]
    found = re.fullmatch(r"cp3(\d)\{([\d,]+)\}-manylinux_\*", pattern)
    assert found is not None
    minors = [int(found[1] + digit) for digit in found[2].split(",")]
    supported = SpecifierSet(project["project"]["requires-python"])
    assert all(f"3.{minor}" in supported for minor in minors)
    assert f"3.{min(minors) - 1}" not in supported
    assert sys.version_info[1] in minors


def test_the_scripts_that_wheels_are_built_with_exist(project: dict[str, Any]) -> None:
    settings = project["tool"]["cibuildwheel"]
    commands = f"{settings['test-command']} {settings['linux']['before-all']}"
    scripts = re.findall(r"\{package\}/([\w/]+\.\w+)", commands)
    assert len(scripts) == 2
    assert all((ROOT / script).is_file() for script in scripts)


def test_the_pinned_versions_have_all_that_makes_wheels(project: dict[str, Any]) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {Requirement(line).name.lower().replace("_", "-") for line in lines if "==" in line}
    wanted = [*project["build-system"]["requires"], *project["project"]["optional-dependencies"]["dev"]]
    names = {Requirement(each).name.lower() for each in wanted} - {"infinity-offload"}
    assert {name.replace("_", "-") for name in names} <= pinned
