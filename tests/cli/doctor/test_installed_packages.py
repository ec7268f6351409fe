"""Versions that fit, that do not, and that are not there."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from pathlib import Path

import pytest

from infinity.cli.doctor import fixes, installed_packages
from infinity.cli.doctor.installed_packages import imported, infinity_version, optional, required, system
from infinity.cli.doctor.probes import ProbeFinding

REQUIRES = ["torch>=2.6", "numpy>=1.26", "transformers>=4.56", 'peft>=0.21; extra == "hf"']


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The installed packages with their versions."""
    there = {"torch": "2.7.1+cu128", "numpy": "2.0", "transformers": "5.0", "peft": "0.22"}

    def version(name: str) -> str:
        if name not in there:
            raise metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda name: REQUIRES)
    monkeypatch.setattr(fixes, "python", lambda: "python")
    return there


def test_versions_within_their_ranges_are_good(installed: dict[str, str]) -> None:
    assert required() == ProbeFinding("ok", "torch 2.7.1+cu128, numpy 2.0, transformers 5.0")
    assert optional() == ProbeFinding("ok", "peft 0.22")


def test_required_libraries_that_are_too_old_or_not_there_are_missing(installed: dict[str, str]) -> None:
    installed["torch"] = "2.5.1+cpu"
    del installed["transformers"]
    found = required()
    assert found.state == "missing"
    assert found.finding == "torch 2.5.1+cpu (needed: >=2.6), numpy 2.0, transformers not installed (needed: >=4.56)"
    assert found.mend == "python -m pip install --upgrade 'torch>=2.6' 'transformers>=4.56'"


def test_an_optional_library_may_be_missing_and_should_not_be_old(installed: dict[str, str]) -> None:
    installed["peft"] = "0.1"
    found = optional()
    assert (found.state, found.finding) == ("slower", "peft 0.1 (needed: >=0.21)")
    assert found.mend == "python -m pip install --upgrade 'peft>=0.21'"
    del installed["peft"]
    assert optional() == ProbeFinding("ok", "none")


def test_infinity_is_what_a_script_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert imported() == ProbeFinding("ok", "finds infinity")


def test_another_infinity_that_a_script_would_import_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    there = installed_packages.infinity.__file__
    (tmp_path / "mine.py").touch()
    monkeypatch.setattr(installed_packages.infinity, "__file__", str(tmp_path / "mine.py"))
    found = imported()
    assert (found.state, found.mend) == ("missing", "")
    assert found.finding.startswith(f"`import infinity` finds {there} here, not this infinity: rename it")
    monkeypatch.setattr(sys, "executable", "true")
    assert imported().finding == "`import infinity` finds nothing here, not this infinity"


def test_the_other_package_of_that_name_is_told_by_its_version(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(installed_packages, "python", lambda: "python")
    installed["infinity"] = "1.5"
    found = imported()
    assert (found.state, found.mend) == ("slower", "python -m pip uninstall -y infinity")
    assert "PyPI's other package infinity 1.5 is installed as well" in found.finding
    (tmp_path / "infinity.py").touch()
    monkeypatch.setattr(installed_packages.infinity, "__file__", str(tmp_path / "infinity.py"))
    found = imported()
    assert found.state == "missing"
    assert found.mend == (
        "python -m pip uninstall -y infinity && python -m pip install --force-reinstall --no-deps infinity-offload"
    )


def test_infinity_that_is_not_installed_is_an_error_for_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    assert infinity_version().state == "ok"
    monkeypatch.setattr(installed_packages, "_DISTRIBUTION", "no-such-distribution")
    with pytest.raises(metadata.PackageNotFoundError):
        infinity_version()


@pytest.mark.parametrize(("kernel", "state"), [("Linux", "ok"), ("Darwin", "missing")])
def test_infinity_runs_on_linux(kernel: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: kernel)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    found = system()
    assert (found.state, found.finding.startswith(kernel), "no glibc" in found.finding) == (state, True, True)


def test_no_library_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(sys.modules)
    required()
    optional()
    assert not {"trl", "peft", "bitsandbytes", "datasets"} & (set(sys.modules) - before)
