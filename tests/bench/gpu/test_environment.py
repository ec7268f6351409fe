"""Which Python the stages run in, and what is asked of the bundle."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from gpu import environment
from gpu.environment import TorchFacts, choose_python

_PYTHONS = {
    "bare": TorchFacts(Path("bare"), None, None, 0),
    "cpu": TorchFacts(Path("cpu"), "2.13.0+cpu", None, 0),
    "cpu with infinity": TorchFacts(Path("cpu with infinity"), "2.13.0+cpu", None, 0),
    "cuda without driver": TorchFacts(Path("cuda without driver"), "2.11.0+cu130", "13.0", 0),
    "cuda": TorchFacts(Path("cuda"), "2.11.0+cu130", "13.0", 1),
}


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        (["cpu with infinity", "cuda"], "cuda"),
        (["cuda without driver", "cuda"], "cuda"),
        (["cpu with infinity", "cuda without driver"], "cuda without driver"),
        (["cpu", "cpu with infinity"], "cpu with infinity"),
        (["bare", "cpu"], "cpu"),
        (["bare"], "bare"),
    ],
)
def test_the_python_whose_torch_sees_a_gpu_wins(
    candidates: list[str], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "probe_torch", lambda python: _PYTHONS[str(python)])
    monkeypatch.setattr(environment, "has_infinity", lambda python: str(python) == "cpu with infinity")
    assert str(choose_python([Path(each) for each in candidates]).python) == chosen


def test_what_is_missing_names_the_torch_and_its_cuda() -> None:
    said = [_PYTHONS[name].missing() for name in ("bare", "cuda without driver", "cuda")]
    assert said == [
        "needs a CUDA device: bare has no torch",
        "needs a CUDA device: torch 2.11.0+cu130 sees none (torch.version.cuda=13.0)",
        "",
    ]


def test_a_python_that_is_none_has_no_torch(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert environment.probe_torch(broken) == TorchFacts(broken, None, None, 0)


def test_a_checkout_that_was_never_built_has_no_python_for_it(tmp_path: Path) -> None:
    assert environment.prepared(tmp_path, Path(sys.executable)) is None


def test_bounds_come_from_the_project(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["pybind11>=2.12"]\n'
        '[project]\nname = "x"\ndependencies = ["pydantic-extra>=1", "pydantic>=2.7,<3"]\n'
        '[project.optional-dependencies]\ndev = ["pytest>=8"]\n'
    )
    found = {name: environment._requirement(tmp_path, name) for name in ("pybind11", "pydantic", "pytest", "ninja")}
    assert list(found.values()) == ["pybind11>=2.12", "pydantic>=2.7,<3", "pytest>=8", "ninja"]


def test_pip_asks_no_index_whatever_is_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    done = environment._pip(tmp_path, Path(sys.executable), "install", "no-such-distribution-anywhere")
    assert done.returncode != 0
    assert "No matching distribution found" in done.stdout + done.stderr
    assert "127.0.0.1" not in done.stdout + done.stderr
