"""The reference pages are those that the script would write from the code."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from infinity.config import SwapConfig, _known_keys
from tests.docs.pages import ROOT, tool


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return tool("reference")


@pytest.mark.parametrize("name", ["config.md", "commands.md", "trainers.md"])
def test_a_page_is_what_the_code_says(name: str, reference: ModuleType) -> None:
    pages: dict[Path, str] = reference.pages()
    assert (ROOT / "docs/reference" / name).read_text() == pages[ROOT / "docs/reference" / name], "run `make docs`"


def test_every_key_is_in_the_table_and_says_something(reference: ModuleType) -> None:
    rows = dict(re.findall(r"^\| `([a-z_.]+)` \| .* \| (.*) \|$", reference.config_page(), re.MULTILINE))
    sections = {key.partition(".")[0] for key in _known_keys(SwapConfig) if "." in key}
    assert set(rows) == set(_known_keys(SwapConfig)) - sections
    assert all(len(told) > 20 for told in rows.values())


def test_values_that_are_not_built_yet_are_said_to_be_refused(reference: ModuleType) -> None:
    table, _, refused = reference.config_page().partition("\nKnown to the schema")
    assert "`gradients: device`" in refused
    assert "`device`" in next(line for line in table.splitlines() if line.startswith("| `weights`"))
    assert "`device`" not in next(line for line in table.splitlines() if line.startswith("| `gradients`"))


def test_every_option_of_every_command_is_in_the_page(reference: ModuleType) -> None:
    page = reference.commands_page()
    for line, parser, _ in reference.parsers():
        section = page.split(f"\n## {line}\n", 1)[1].split("\n## ", 1)[0]
        for action in parser._actions:
            if action.dest != "help":
                assert all(f"`{name}" in section or f", {name}" in section for name in action.option_strings), line


def test_text_is_escaped_and_code_is_not(reference: ModuleType) -> None:
    assert reference.escaped("a_b `c_d|e` <f>") == r"a\_b `c_d\|e` \<f\>"
