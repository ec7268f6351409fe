"""Versions that fit, that do not, and that are not there."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from infinity.cli.doctor import mends, versions
from infinity.cli.doctor.versions import imported, infinity_version, kernel, library, others, python_version

REQUIRES = ["torch>=2.6", "numpy>=1.26", "transformers>=4.56", 'peft>=0.21; extra == "hf"']


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What is installed, by its version."""
    there = {"torch": "2.7.1+cu128", "numpy": "2.0", "transformers": "5.0", "peft": "0.22"}

    def version(name: str) -> str:
        if name not in there:
            raise metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda name: REQUIRES)
    monkeypatch.setattr(mends, "python", lambda: "python")
    return there


def test_a_version_within_the_range_is_good(installed: dict[str, str]) -> None:
    assert library("torch") == ("ok", "2.7.1+cu128", "", "")
    assert library("peft").state == "ok"


def test_a_required_library_that_is_too_old_is_missing(installed: dict[str, str]) -> None:
    installed["torch"] = "2.5.1+cpu"
    found = library("torch")
    assert (found.state, found.finding) == ("missing", "2.5.1+cpu; infinity needs >=2.6")
    assert found.mend == "python -m pip install --upgrade 'torch>=2.6'"


def test_a_required_library_that_is_not_there_is_missing(installed: dict[str, str]) -> None:
    del installed["transformers"]
    found = library("transformers")
    assert (found.state, found.mend) == ("missing", "python -m pip install --upgrade 'transformers>=4.56'")


def test_an_optional_library_may_be_missing_and_should_not_be_old(installed: dict[str, str]) -> None:
    assert library("bitsandbytes") == ("ok", "not installed; never needed", "", "")
    installed["peft"] = "0.1"
    assert (library("peft").state, library("peft").finding) == ("slower", "0.1; infinity needs >=0.21")


def test_requirements_without_a_row_share_one(installed: dict[str, str]) -> None:
    assert others() == ("ok", "numpy 2.0", "", "")
    del installed["numpy"]
    assert others() == ("missing", "numpy not installed", "python -m pip install --upgrade 'numpy>=1.26'", "")


def test_infinity_is_what_a_script_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert imported() == ("ok", "finds infinity", "", "")


def test_another_infinity_that_a_script_would_import_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    there = versions.infinity.__file__
    (tmp_path / "mine.py").touch()
    monkeypatch.setattr(versions.infinity, "__file__", str(tmp_path / "mine.py"))
    found = imported()
    assert (found.state, found.mend) == ("missing", "")
    assert found.finding.startswith(f"`import infinity` finds {there} here, and not this infinity: rename it")
    monkeypatch.setattr(sys, "executable", "true")
    assert imported().finding == "`import infinity` finds nothing here, and not this infinity"


def test_the_other_package_of_that_name_is_told_by_its_version(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(versions, "python", lambda: "python")
    installed["infinity"] = "1.5"
    found = imported()
    assert (found.state, found.mend) == ("slower", "python -m pip uninstall -y infinity")
    assert "PyPI's other package infinity 1.5 is installed as well" in found.finding
    (tmp_path / "infinity.py").touch()
    monkeypatch.setattr(versions.infinity, "__file__", str(tmp_path / "infinity.py"))
    found = imported()
    assert found.state == "missing"
    assert found.mend == (
        "python -m pip uninstall -y infinity && python -m pip install --force-reinstall --no-deps infinity-offload"
    )


def test_a_python_that_is_too_old_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert python_version().state == "ok"
    monkeypatch.setattr(versions, "_about", lambda: {"Requires-Python": ">=9"})
    assert python_version().state == "missing"
    assert python_version().finding.endswith("; infinity needs >=9")


def test_infinity_that_is_not_installed_is_an_error_for_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    assert infinity_version().state == "ok"
    monkeypatch.setattr(versions, "_DISTRIBUTION", "no-such-distribution")
    with pytest.raises(metadata.PackageNotFoundError):
        infinity_version()


@pytest.mark.parametrize(
    ("system", "release", "state"),
    [
        ("Linux", "6.8.0-45-generic", "ok"),
        ("Linux", "5.19", "ok"),
        ("Linux", "5.15.0", "slower"),
        ("Linux", "5.4.0-1", "slower"),
        ("Linux", "custom", "unknown"),
        ("Linux", "²²²²²²²²²²²².1", "unknown"),
        ("Darwin", "23.1", "missing"),
    ],
)
def test_a_kernel_is_judged_by_what_its_io_uring_has(system: str, release: str, state: str) -> None:
    assert kernel(system, release).state == state


def no_such_name(name: str) -> str:
    raise ValueError("unrecognized configuration name")


@pytest.mark.parametrize(
    ("told", "state"), [(lambda name: "glibc 2.36", "ok"), (lambda name: None, "unknown"), (no_such_name, "unknown")]
)
def test_the_c_library_is_named(told: Any, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "confstr", told)
    assert versions.c_library().state == state


def test_no_library_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(sys.modules)
    for probe in versions.versions().probes:
        probe.look()
    assert not {"trl", "peft", "bitsandbytes", "datasets"} & (set(sys.modules) - before)
