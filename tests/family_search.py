"""Search for families of transformers whose modules are not one list of blocks: `python -m tests.family_search`.

The search reads the modeling files without importing them. The search finds these shapes in a family's module classes:

    nested      a list (or dict) of modules inside another one, or a bare nn.Module() that holds other modules
    bare        a class that holds other modules and has no forward; its other methods are called
    parameters  a ParameterList or ParameterDict
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import transformers

_CONTAINERS = ("ModuleList", "ModuleDict")
_PARAMETERS = ("ParameterList", "ParameterDict")


def search() -> dict[str, set[str]]:
    """Return the families that have each shape."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        for shape in _shapes(ast.parse(path.read_text())):
            found[shape].add(path.parent.name)
    return found


def _shapes(tree: ast.Module) -> Iterator[str]:
    for owner in tree.body:
        if not isinstance(owner, ast.ClassDef):
            continue
        methods = {node.name: node for node in owner.body if isinstance(node, ast.FunctionDef)}
        bases = [ast.unparse(base) for base in owner.bases]
        if bases == ["nn.Module"] and "forward" not in methods and "__call__" not in methods:
            yield "bare"
        if "__init__" not in methods:
            continue
        lists = {
            target.id
            for node in ast.walk(methods["__init__"])
            if isinstance(node, ast.Assign) and any(_name(each) in _CONTAINERS for each in ast.walk(node.value))
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(methods["__init__"]):
            if isinstance(node, ast.Call):
                name = _name(node)
                if name in _PARAMETERS:
                    yield "parameters"
                inside = [each for argument in node.args for each in ast.walk(argument)]
                held = any(_name(each) in _CONTAINERS for each in inside) or any(
                    isinstance(each, ast.Name) and each.id in lists for each in node.args
                )
                if held and name in (*_CONTAINERS, "append"):
                    yield "nested"
            elif isinstance(node, ast.Assign) and _name(node.value) == "Module":
                yield "nested"


def _name(node: ast.AST) -> str:
    """Return the name of the called function."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


if __name__ == "__main__":
    for shape, families in sorted(search().items()):
        print(f"{shape}: {', '.join(sorted(families))}")
