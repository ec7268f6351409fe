"""The table of what is used of a Trainer that no documentation promises: it is there, takes what it is given, is named
where it is gone, and nothing else is used."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from trl import SFTTrainer

import infinity
from infinity.cli.trainer_points import ATTRIBUTES, POINTS, require_points

SOURCES = Path(infinity.__file__).parent / "cli"
OF_TRAINERS = [
    SOURCES / f"{name}.py" for name in ("samples", "step_watch", "trackers", "trainer", "trainers", "training")
]
TABLE = {where.rpartition(".")[2]: point for point in POINTS for where in point.where}


@pytest.mark.parametrize("name", TABLE)
def test_a_point_is_there_and_takes_what_it_is_given(name: str) -> None:
    taken = TABLE[name].takes
    parameters = [each for each in inspect.signature(getattr(SFTTrainer, name)).parameters if each != "self"]
    assert tuple(parameters[: len(taken)]) == taken
    require_points()


@pytest.mark.parametrize("name", TABLE)
def test_a_point_that_is_gone_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = TABLE[name].where[0]
    module, kind, _ = place.rsplit(".", 2)
    monkeypatch.delattr(getattr(importlib.import_module(module), kind), name)
    with pytest.raises(infinity.NotAvailableError, match=rf"^{re.escape(place)} is not .*=="):
        require_points()


@pytest.mark.parametrize(("owner", "name"), ATTRIBUTES)
def test_an_attribute_is_one_of_theirs(owner: str, name: str) -> None:
    module, _, made = owner.rpartition(".")
    assert f"self.{name} = " in inspect.getsource(getattr(importlib.import_module(module), made))


def private_names(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Those that a module uses of any object, and those that it defines."""
    used, own = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            sets = isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"
            (own if sets else used).add(node.attr)
        elif isinstance(node, ast.FunctionDef):
            own.add(node.name)
    return ({each for each in names if each.startswith("_") and not each.startswith("__")} for names in (used, own))


def test_nothing_else_is_used() -> None:
    listed = {*TABLE, *(name for _, name in ATTRIBUTES)}
    theirs: dict[str, Any] = {}
    for path in OF_TRAINERS:
        used, own = private_names(ast.parse(path.read_text()))
        theirs |= dict.fromkeys((used - own) | {name for name in own if hasattr(SFTTrainer, name)}, path.name)
    assert {name: file for name, file in theirs.items() if name not in listed} == {}
    assert listed <= theirs.keys()
