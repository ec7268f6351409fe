"""The house rule that what an object knows is passed to it: no attribute is set from outside on an object of another
module of infinity."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import infinity

ROOT = Path(infinity.__file__).parent
_OF_TORCH = ("grad", "data", "_parameters", "__class__")


def targets(node: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the attributes that a statement sets or deletes."""
    given: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        given = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.comprehension | ast.NamedExpr):
        given = [node.target]
    elif isinstance(node, ast.withitem) and node.optional_vars:
        given = [node.optional_vars]
    for target in given:
        yield from (part for part in ast.walk(target) if isinstance(part, ast.Attribute) and not _is_read(part))


def _is_read(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Load)


def classes(tree: ast.Module) -> dict[str, set[str]]:
    """Return the attributes that each class has or sets on itself."""
    found: dict[str, set[str]] = {}
    for made in ast.walk(tree):
        if isinstance(made, ast.ClassDef):
            names = {
                target.attr for node in ast.walk(made) for target in targets(node) if _name(target.value) == "self"
            }
            names |= {_name(node.target) for node in made.body if isinstance(node, ast.AnnAssign)}
            found[made.name] = names
    return found


def _name(node: ast.AST | None) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def types(function: ast.FunctionDef) -> dict[str, set[str]]:
    """Return the classes that a local name may have: those of its annotation, or none if it is constructed in the
    function."""
    found = {
        argument.arg: _names(argument.annotation)
        for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        if argument.annotation is not None
    }
    for node in ast.walk(function):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = _names(node.annotation)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made = ast.unparse(node.value.func).rpartition(".")[2]
            if made == "__new__" or made[:1].isupper():
                found |= {_name(target): set() for target in node.targets}
    return found


def _names(annotation: ast.expr) -> set[str]:
    return {_name(node) for node in ast.walk(annotation)}


def set_from_outside() -> dict[str, list[str]]:
    """Return the attributes that each file sets from outside, as `x.attr`: of an x that is not self, was not
    constructed by the function, and whose class may be one of another module of infinity."""
    trees = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
    own = {path: classes(tree) for path, tree in trees.items()}
    attributes = {name for defined in own.values() for names in defined.values() for name in names}
    found: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        here = {name for names in own[path].values() for name in names}
        others = {name for defined in own.values() for name in defined} - own[path].keys()
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            known = types(function)
            for target in (target for node in ast.walk(function) for target in targets(node)):
                base = _name(target.value)
                if base in ("self", "cls") or target.attr not in attributes or target.attr in _OF_TORCH:
                    continue
                if known[base] & others if base in known else target.attr not in here:
                    found[path].add(ast.unparse(target))
    return {path: sorted(names) for path, names in found.items()}


@pytest.mark.long
def test_no_attribute_is_set_on_an_object_of_another_module() -> None:
    assert set_from_outside() == {}


PARTS = (
    "resources",
    "health",
    "readers",
    "optimizers",
    "commits",
    "masters",
    "passes",
    "update_queue",
    "speculation_choice",
    "fetcher",
    "pump",
    "gradients",
    "shards",
)
"""Attributes that the coordinator uses, and nobody above it."""


_PARTS_OF_UNIT = ("homes", "views", "weights", "gradients", "update")
"""Attributes that a unit uses. Its description (`unit.full`, `unit.local`, `unit.shard`) is a value that anybody may
read."""


def test_use_cases_hooks_and_optimizers_reach_nothing_beneath_the_coordinator() -> None:
    """They ask the unit for facts about a unit."""
    of_coordinator = re.compile(rf"coordinator(_of\([^)]*\))?\.({'|'.join(PARTS)})\b")
    of_unit = re.compile(
        r"coordinator\.units\[[^]]*(\[[^]]*\])?[^]]*\]\.\w+\.\w+"
        rf"|(?<![.\w])unit\.({'|'.join(_PARTS_OF_UNIT)})\b"
    )
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for room in ("access", "runtime", "optim")
        for path in sorted((ROOT / room).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if of_coordinator.search(line) or of_unit.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("file", "owner", "parts"),
    [
        ("coordinator/coordinator.py", "Coordinator", PARTS),
        ("units/unit.py", "OffloadedUnit", _PARTS_OF_UNIT),
    ],
)
def test_the_parts_are_attributes(file: str, owner: str, parts: tuple[str, ...]) -> None:
    """A part that was renamed would otherwise be looked for under its old name."""
    assert set(parts) <= classes(ast.parse((ROOT / file).read_text()))[owner]
