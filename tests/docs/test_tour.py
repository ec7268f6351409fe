"""The tour for developers names files that exist, and what they define."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "developers.md").read_text()
SECTIONS = ("A tour: one step of one unit", "Where to change what")
MINIMUM = {SECTIONS[0]: 12, SECTIONS[1]: 25}
"""Rows: fewer mean that the test does not find the tables."""
OUTSIDE = {"optimizer.step()", "infinity.offload", "infinity plan", "infinity run", "commit_every: auto", "nvme"}
"""What users call."""


def rows_of(section: str) -> list[str]:
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    return [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|--")][1:]


@cache
def defined_in(file: Path) -> frozenset[str]:
    """Return the names of the functions and classes of a file, and `Class.method` for the methods."""
    if file.suffix != ".py":
        return frozenset()
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
            names |= {f"{node.name}.{each.name}" for each in ast.walk(node) if isinstance(each, ast.FunctionDef)}
    return frozenset(names)


def wrong_in(row: str) -> list[str]:
    """Return the files that a row of a table names and that do not exist, and the names that no file of their sentence
    defines."""
    wrong = []
    for sentence in re.split(r" → |; | \| ", row):
        files = []
        for span in re.findall(r"`([^`]+)`", sentence):
            if span in OUTSIDE:
                continue
            if "/" in span or span.endswith(".py"):
                path = ROOT / span if span.startswith(("csrc", "tests")) else ROOT / "infinity" / span
                places = [path, *path.parent.glob(f"*/{span}")]
                if not any(each.exists() for each in places):
                    wrong.append(span)
                files.append(path)
                continue
            among = [each for each in files if each.is_file()] or sorted((ROOT / "infinity").rglob("*.py"))
            if not any(span in defined_in(each) for each in among):
                wrong.append(span)
    return wrong


@pytest.mark.parametrize("section", SECTIONS)
def test_every_file_and_name_of_the_tour_exists(section: str) -> None:
    rows = rows_of(section)
    assert len(rows) >= MINIMUM[section]
    assert {row: wrong_in(row) for row in rows if wrong_in(row)} == {}


def test_a_file_or_name_that_went_is_found() -> None:
    assert wrong_in("| a | `units/gone.py`: `Fetcher.fetch` | `units/fetcher.py`: `Fetcher.gone` | `gone` |") == [
        "units/gone.py",
        "Fetcher.gone",
        "gone",
    ]
