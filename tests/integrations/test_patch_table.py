"""The table of patches: what infinity replaces in libraries is there, takes what infinity gives it, and is named where
it is gone."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.integrations.patch_table import ATTRIBUTES, POINTS, RUN, TABLE, TESTED
from infinity.integrations.patches import Patches, active
from tests.integrations.conftest import Launch

SOURCES = Path(infinity.__file__).parent / "integrations"


def found(where: str) -> tuple[Any, str]:
    """Return the class or module that has a function, and the function's name there."""
    owner, _, name = where.rpartition(".")
    parts = owner.split(".")
    for count in range(len(parts), 0, -1):
        try:
            held: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            held = getattr(held, part)
        return held, name
    raise ModuleNotFoundError(where)


def ours(theirs: Any, *args: Any, **kwargs: Any) -> Any:
    return theirs(*args, **kwargs)


@pytest.mark.parametrize("where", TABLE)
def test_a_point_is_there_and_takes_what_it_is_given(where: str) -> None:
    owner, name = found(where)
    with Patches() as patches:
        patches.wrap(owner, name, ours)
        assert where in active()
    taken = TABLE[where].takes
    if taken:
        parameters = [
            each for each in inspect.signature(getattr(owner, name)).parameters if each not in ("self", "cls")
        ]
        assert tuple(parameters[: len(taken)]) == taken


@pytest.mark.parametrize("where", TABLE)
def test_a_point_that_is_gone_is_named(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name = found(where)
    monkeypatch.delattr(owner, name)
    with pytest.raises(infinity.NotAvailableError, match=f"^{where} does not exist"), Patches() as patches:
        patches.wrap(owner, name, ours)
    assert active() == []


def test_the_launcher_names_a_point_that_is_gone_and_replaces_nothing(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = found("transformers.trainer.Trainer._load_from_checkpoint")
    monkeypatch.delattr(owner, name)
    with pytest.raises(infinity.NotAvailableError, match=f"Trainer.{name} does not exist.*==5"), launch():
        pass
    assert active() == []


def test_what_has_no_row_cannot_be_replaced() -> None:
    with pytest.raises(AssertionError, match=r"pathlib\.Path\.exists is replaced"), Patches() as patches:
        patches.wrap(Path, "exists", ours)


@pytest.mark.parametrize("where", TABLE)
def test_a_row_is_of_something_that_is_replaced(where: str) -> None:
    name = where.rpartition(".")[2]
    assert any(f'"{name}"' in file.read_text() for file in SOURCES.glob("*.py") if file.name != "patch_table.py")


OWN_ATTRIBUTES = [attribute for attribute, row in ATTRIBUTES.items() if RUN in row.who]
POSSIBLE_OWNERS = {"args", "accelerator"}


@pytest.mark.parametrize(("owner", "name"), OWN_ATTRIBUTES)
def test_an_attribute_is_one_of_theirs(owner: str, name: str) -> None:
    made, attribute = found(f"{owner}.{name}")
    assert f"self.{attribute} = " in inspect.getsource(made)


def test_private_attributes_of_arguments_and_accelerators_have_rows() -> None:
    used = set()
    for path in SOURCES.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                owner = node.value
                if (owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")) in POSSIBLE_OWNERS:
                    used.add(node.attr)
    assert used == {name for _, name in OWN_ATTRIBUTES}


def test_rows_say_what_and_why() -> None:
    assert all(point.does and point.why and point.breaks for point in POINTS)
    places = [where for point in POINTS if point.who == RUN for where in point.where]
    assert len(TABLE) == len(places)


def test_the_versions_are_those_of_the_constraints() -> None:
    pinned = dict(
        line.split("==") for line in (SOURCES.parents[1] / "constraints.txt").read_text().splitlines() if "==" in line
    )
    assert {name: pinned[name.replace("_", "-")] for name in TESTED} == TESTED
