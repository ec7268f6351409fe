"""Every message of the page is one that the sources print, and every class of errors has an entry."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import infinity
from infinity import errors
from tests.docs.messages import can_print, chunks_below, chunks_of, is_printed
from tests.docs.pages import ROOT, Block, blocks

PAGE = "docs/troubleshooting.md"
MESSAGES = [block for block in blocks("text") if block.page == PAGE]


@pytest.fixture(scope="module")
def sources() -> dict[Path, set[str]]:
    return chunks_below(Path(infinity.__file__).parent)


@pytest.mark.parametrize("block", MESSAGES, ids=str)
def test_a_message_of_the_page_is_one_that_the_sources_print(block: Block, sources: dict[Path, set[str]]) -> None:
    assert is_printed(sources, block.text), block.text


def test_every_class_of_errors_has_a_section() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / PAGE).read_text(), re.MULTILINE)
    named = {name for heading in headings for name in re.findall(r"\w+Error", heading)}
    classes = {name for name, each in inspect.getmembers(errors, inspect.isclass) if each.__module__ == errors.__name__}
    assert named == classes


def test_every_section_has_a_message() -> None:
    sections = re.split(r"^## ", (ROOT / PAGE).read_text(), flags=re.MULTILINE)[1:]
    assert [each.splitlines()[0] for each in sections if "```text" not in each] == []


def test_no_message_names_a_file_of_the_documentation(sources: dict[Path, set[str]]) -> None:
    """A wheel does not have these files; messages name the page instead."""
    found = [chunk for chunks in sources.values() for chunk in chunks if re.search(r"\bdocs/", chunk)]
    assert found == []


SOURCE = '''
"""Docstrings are not printed: unit is lost."""
def fail(unit, step, paths):
    when = f" at step {step}" if step else ""
    raise ValueError(f"reading of unit '{unit}' failed{when}: {', '.join(paths)}. " "Check the disk.")
'''


@pytest.mark.parametrize(
    ("text", "can"),
    [
        ("reading of unit '", True),
        ("' failed at step ", True),
        ("' failed: ", True),
        (". Check the disk.", True),
        ("' failed at a step ", False),
        ("Check the disks.", False),
        ("unit is lost", False),
        ("failed Check the disk.", False),
    ],
)
def test_only_texts_that_the_source_can_join_are_messages(text: str, can: bool) -> None:
    assert can_print(chunks_of(SOURCE), text) is can
