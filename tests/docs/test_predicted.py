"""The page of predictions says what `infinity plan` says: some of its rows, each time others."""

from __future__ import annotations

import random
import re
from types import ModuleType

import pytest

from infinity.cli.main import main
from infinity.cli.planning.public_models import PRESETS
from tests import sampling
from tests.docs.pages import ROOT, tool

ROWS_DRAWN = 1


@pytest.fixture(scope="module")
def predicted() -> ModuleType:
    return tool("predicted")


def test_the_page_says_what_plans_say(predicted: ModuleType) -> None:
    text = predicted.PAGE.read_text()
    assert text.startswith(predicted.GENERATED)
    assert "Nothing here was measured" in text
    rows = [
        (title, preset, row.split(" | "))
        for title, table in re.findall(r"^## (.*)\n\n((?:\|.*\n)+)", text, re.MULTILINE)
        for preset, row in re.findall(r"^\| ([a-z0-9-]+) \| (.*) \|$", table, re.MULTILINE)
        if preset != "preset"
    ]
    assert [(title, preset) for title, preset, _ in rows] == [(t, p) for t in predicted.FORMS for p in PRESETS]
    chosen = rows if sampling.SHARE == 1 else random.Random(sampling.SEED).sample(rows, ROWS_DRAWN)
    for title, preset, cells in chosen:
        expected = [predicted.cell(preset, name, predicted.FORMS[title]) for name in predicted.ON]
        assert cells == expected, f"{preset}, {title}: run `make docs`"


def test_the_report_on_the_page_of_the_plan_is_what_its_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """But for what stands in brackets behind a rate."""
    page = (ROOT / "docs/plan.md").read_text()
    found = re.search(r"^What `infinity (plan [^`]*)` prints:\n\n```text\n(.*?)```", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    assert main(found[1].split()) == 0
    without = re.compile(r"\((?:…|bench/results[^)]*)\)")
    assert without.sub("", capsys.readouterr().out) == without.sub("", found[2])


def test_the_table_of_the_readme_says_what_plans_and_measurements_say(predicted: ModuleType) -> None:
    found = predicted.TABLE.search(predicted.README.read_text())
    rows = found[2].splitlines()[2:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == list(predicted.IN_README)
    chosen = rows if sampling.SHARE == 1 else random.Random(sampling.SEED).sample(rows, 1)
    for row in chosen:
        assert row == predicted.readme_row(row.split(" | ")[0].removeprefix("| ")), "run `make docs`"


def test_the_table_of_the_recipes_says_what_plans_say(predicted: ModuleType) -> None:
    rows = predicted.TABLE.search(predicted.RECIPES_PAGE.read_text())[2].splitlines()[2:]
    chosen = range(len(rows)) if sampling.SHARE == 1 else random.Random(sampling.SEED).sample(range(len(rows)), 1)
    for index in chosen:
        assert rows[index] == predicted.recipe_row(list(predicted.IN_RECIPES)[index]), "run `make docs`"
    assert len(rows) == len(predicted.IN_RECIPES)


def test_what_was_measured_is_of_every_run_that_has_the_row(predicted: ModuleType) -> None:
    assert predicted.measured("8.0 B, LoRA on NF4, 8,192 tokens, clipped") == "0.99 s"
    assert predicted.measured("no such row") == "not measured"
