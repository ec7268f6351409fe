"""The list of mutants goes with the sources: what a mutant takes away is there, once, and so are the tests that must
find it. Whether they find it is for `make mutation-test` to say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mutation.mutant import Mutant
from tests.mutation.mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_made_and_has_its_tests(mutant: Mutant) -> None:
    assert (ROOT / mutant.path).read_text().count(mutant.old) == 1
    files = [test.split("::")[0] for test in mutant.tests if test.startswith("tests/")]
    assert files
    assert [file for file in files if not (ROOT / file).exists()] == []
    if "-k" in mutant.tests:
        words = set(re.findall(r"\w+", mutant.tests[mutant.tests.index("-k") + 1])) - {"and", "or", "not"}
        text = "".join(path.read_text() for file in files for path in _sources(ROOT / file))
        assert [word for word in sorted(words) if word not in text] == []


def _sources(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]
