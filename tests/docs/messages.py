"""The messages that the sources can print, as templates: the literal parts of every string and f-string, in order."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

HOLE = "\0"
"""Stands for a value that is put into a message."""


def template(node: ast.expr) -> str | None:
    """The text of a string, an f-string or a sum of these, with a HOLE for each value; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(HOLE if isinstance(part, ast.FormattedValue) else str(part.value) for part in node.values)  # type: ignore[attr-defined]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = template(node.left), template(node.right)
        return None if sides == (None, None) else "".join(HOLE if side is None else side for side in sides)
    return None


def _strings(tree: ast.AST) -> Iterator[str]:
    """Of all strings but docstrings and those inside of other strings."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        found = template(node) if isinstance(node, ast.expr) else None
        if found is not None:
            yield found
        if isinstance(node, ast.JoinedStr):  # the values have strings of their own; its parts are in `found`
            for part in node.values:
                if isinstance(part, ast.FormattedValue):
                    yield from _strings(part)
        else:
            yield from _strings(node)


def templates(root: Path) -> list[str]:
    """Of all Python files below a directory."""
    return [found for path in sorted(root.rglob("*.py")) for found in _strings(ast.parse(path.read_text()))]
