"""The pages for developers name files that exist, and names that these files define."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MINIMUM = {
    ("developers.md", "A tour: one step of one unit"): 12,
    ("developers.md", "Where to change what"): 25,
    ("glossary.md", "Glossary for developers"): 30,
}
"""Rows of each table, by page and heading. With fewer rows the test has not found the table."""
OUTSIDE = {"optimizer.step()", "infinity.offload", "infinity plan", "infinity run", "commit_every: auto"} | {
    *("infinity finetune", "global_step"),
    *("weight", "residual", "exp_avg", "exp_avg_sq", "grad"),
    *("device", "host", "nvme", "split16"),
}
"""Names that users call or write."""


def rows_of(page: str, heading: str) -> list[str]:
    text = (DOCS / page).read_text().split(f"# {heading}\n")[1].split("\n## ")[0]
    return [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|--")][1:]


@cache
def defined_in(file: Path) -> frozenset[str]:
    """Return the names of the functions and classes of a file, and `Class.method` for the methods.

    Of a file of C++ return all names that it contains.
    """
    if file.suffix != ".py":
        return frozenset(re.findall(r"[A-Za-z_](?:\w|::)*", file.read_text()))
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


@pytest.mark.parametrize(("page", "heading"), MINIMUM)
def test_every_file_and_name_of_the_tour_and_the_glossary_exists(page: str, heading: str) -> None:
    rows = rows_of(page, heading)
    assert len(rows) >= MINIMUM[page, heading]
    assert {row: wrong_in(row) for row in rows if wrong_in(row)} == {}


def test_every_word_that_a_page_links_to_is_in_the_glossary() -> None:
    words = re.findall(r"\{ #([\w-]+) \}", (DOCS / "glossary.md").read_text())
    linked = {word for page in DOCS.rglob("*.md") for word in re.findall(r"glossary\.md#([\w-]+)", page.read_text())}
    assert linked
    assert linked <= set(words)
    assert len(words) == len(set(words))


def test_a_file_or_name_that_went_is_found() -> None:
    assert wrong_in("| a | `units/gone.py`: `Fetcher.fetch` | `units/fetcher.py`: `Fetcher.gone` | `gone` |") == [
        "units/gone.py",
        "Fetcher.gone",
        "gone",
    ]
    assert wrong_in("| a | `csrc/aio/swap_file.cpp`: `SwapFile::check`, `SwapFile::gone` |") == ["SwapFile::gone"]
