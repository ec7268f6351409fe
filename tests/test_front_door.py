"""`import infinity`: all of it is there, and what takes seconds to import is not until it is used."""

from __future__ import annotations

import ast
import importlib
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import infinity

HEAVY = ("torch", "numpy", "transformers", "pydantic", "rich", "psutil", "matplotlib")


def imported_by(code: str) -> str:
    """Return the modules of HEAVY that a new process has imported after `code`."""
    ending = f"\nimport sys; print(*[name for name in {HEAVY} if name in sys.modules])"
    return subprocess.run([sys.executable, "-c", code + ending], capture_output=True, text=True, check=True).stdout


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert imported_by("import infinity").split() == []


@pytest.mark.long(kept="only here names are imported in a process that has imported nothing before")
def test_names_import_what_they_need() -> None:
    """In a new process, where no test has imported it before. The process has no optional libraries, which transformers
    would import for seconds.
    """
    without = "import sys; sys.modules.update(dict.fromkeys(('peft', 'datasets', 'bitsandbytes')))"
    needed = f"{without}; from infinity import AdamW; assert {{'torch', 'numpy'}} <= sys.modules.keys()"
    assert "transformers" in imported_by(f"{needed}; import infinity.hf").split()


def test_the_three_lists_of_public_names_agree() -> None:
    tree = ast.parse(Path(infinity.__file__).read_text())
    (checked,) = [node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name)]
    for_checkers = {alias.name: node.module for node in checked.body for alias in node.names}  # type: ignore[attr-defined]
    assert for_checkers == {name: f"infinity.{home}" for name, home in infinity._HOME_OF.items()}
    errors = {
        alias.name for node in tree.body if getattr(node, "module", "") == "infinity.errors" for alias in node.names
    }  # type: ignore[attr-defined]
    assert sorted(infinity.__all__) == sorted({*for_checkers, *errors})


@pytest.mark.parametrize("name", infinity.__all__)
def test_every_public_name_is_what_its_module_has(name: str) -> None:
    value = getattr(infinity, name)
    assert value is getattr(importlib.import_module(value.__module__), name)
    assert name in dir(infinity)


def test_a_star_imports_all_public_names() -> None:
    found: dict[str, object] = {}
    exec("from infinity import *", found)
    assert set(infinity.__all__) <= set(found)


@pytest.mark.parametrize("name", ["optim", "_native"])
def test_a_room_is_the_module_of_that_name(name: str) -> None:
    assert infinity.__getattr__(name) is importlib.import_module(f"infinity.{name}")


def test_the_package_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["infinity", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("infinity", run_name="__main__", alter_sys=True)
    assert not ended.value.code
    assert infinity.__version__ in capsys.readouterr().out


@pytest.mark.long
def test_rooms_are_there_after_the_package_was_imported() -> None:
    code = "import infinity; infinity.optim.adamw.AdamW; infinity.errors.InfinityError; infinity._native.Arena"
    assert "torch" in imported_by(code)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'infinity' has no attribute 'ofload'"):
        infinity.ofload  # type: ignore[attr-defined] # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'ofload'"):
        exec("from infinity import ofload")
