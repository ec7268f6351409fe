"""Messages that the sources can print, and a check whether the sources can print a message of the documentation."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

HOLE = "\0"
"""Placeholder for a value inside a message."""
_SEGMENTS_MAX = 6
_LONG = 6
_LOGGED = re.compile(r"%[-#0-9.]*[sdgfrx]")


def template(node: ast.expr) -> str | None:
    """Return the text of a string, of an f-string, or of a sum of strings, with a HOLE for each value; None for any
    other expression.
    """
    if isinstance(node, ast.Constant):
        return _LOGGED.sub(HOLE, node.value) if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = template(node.left), template(node.right)
        return None if sides == (None, None) else "".join(HOLE if side is None else side for side in sides)
    return None


def _templates(tree: ast.AST) -> Iterator[str]:
    """Yield the templates of all strings except docstrings, including strings inside f-strings."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        found = template(node) if isinstance(node, ast.expr) else None
        if found is not None:
            yield found
        yield from _templates(node)


def chunks_of(source: str) -> set[str]:
    """Return the fixed texts between the values of all templates in a file."""
    return {chunk for each in _templates(ast.parse(source)) for chunk in each.split(HOLE) if chunk}


def chunks_below(root: Path) -> dict[Path, set[str]]:
    return {path: chunks_of(path.read_text()) for path in sorted(root.rglob("*.py"))}


def fixed_parts(message: str) -> list[str]:
    """Return the fixed parts of a message from the documentation, which has <placeholders> and line breaks."""
    return [part for part in re.split(r"<[^<>]*>", " ".join(message.split())) if part]


def can_print(chunks: set[str], part: str) -> bool:
    """Return whether chunks of one file can be joined so that they give the text `part`.

    The text may begin in the middle of a chunk and end in the middle of a chunk; each chunk in between is complete.
    Most of the text must be covered by chunks that are not short.
    """
    return _covers(chunks, part, 0, 0, 0)


def _covers(chunks: set[str], part: str, begin: int, count: int, said: int) -> bool:
    rest = part[begin:]
    if not rest:
        return 3 * said >= 2 * len(part) or len(part) < _LONG
    if count == _SEGMENTS_MAX:
        return False
    for chunk in chunks:
        if (rest in chunk) if begin == 0 else chunk.startswith(rest):
            long = len(rest) if len(rest) >= _LONG else 0
            if _covers(chunks, part, len(part), count + 1, said + long):
                return True
        for end in _ends(chunk, rest, anywhere=begin == 0):
            long = end if end >= _LONG else 0
            if _covers(chunks, part, begin + end, count + 1, said + long):
                return True
    return False


def _ends(chunk: str, rest: str, *, anywhere: bool) -> Iterator[int]:
    """Yield the length of each end of `chunk` with which `rest` begins. Without `anywhere`, only the complete chunk
    counts as an end.
    """
    at = chunk.find(rest[0])
    while at == 0 or (anywhere and at > 0):
        size = len(chunk) - at
        if size < len(rest) and rest.startswith(chunk[at:]):
            yield size
        at = chunk.find(rest[0], at + 1)


def is_printed(sources: dict[Path, set[str]], message: str) -> bool:
    """Return whether one of the files can print a message."""
    parts = sorted(fixed_parts(message), key=len, reverse=True)  # few files can print a long part
    assert len(parts[0]) > 8, f"{message}: nothing fixed in it"
    return any(all(can_print(chunks, part) for part in parts) for chunks in sources.values())
