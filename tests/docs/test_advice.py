"""Advice in messages is followed by tests: every command, option or call that a message names is in one table."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import infinity
from tests.docs.advice import FOLLOWED, advice_below, advice_in
from tests.docs.advice_open import OPEN
from tests.docs.messages import HOLE

TESTS = Path(__file__).parents[1]
SHARE = 0.97
WAYS = [(name, part, test) for name, parts in FOLLOWED.items() for part, test in parts.items()]


@cache
def found() -> dict[str, list[str]]:
    """Return the messages of all sources, by file. Reading them takes seconds, which collecting tests need not."""
    return advice_below(Path(infinity.__file__).parent)


def listed(name: str, text: str) -> list[str]:
    return [part for part in (*FOLLOWED.get(name, ()), *OPEN.get(name, ())) if part in text.replace(HOLE, "<>")]


def test_every_message_that_names_a_way_on_is_followed_by_a_test_or_listed_as_one_that_is_not_yet() -> None:
    """For a new one: let a test do what it says, and name the test in FOLLOWED."""
    missing = [f"{name}: {text}" for name, texts in found().items() for text in texts if not listed(name, text)]
    assert missing == []


def test_nothing_is_listed_that_no_message_says_or_twice() -> None:
    said = {name: " | ".join(texts).replace(HOLE, "<>") for name, texts in found().items()}
    parts = [(name, part) for table in (FOLLOWED, OPEN) for name, each in table.items() for part in each]
    assert [(name, part) for name, part in parts if part not in said.get(name, "")] == []
    assert len(parts) == len(set(parts))


@pytest.mark.parametrize("file", sorted({test.partition("::")[0] for _, _, test in WAYS}))
def test_the_tests_that_follow_are_there(file: str) -> None:
    there = {node.name for node in ast.parse((TESTS / file).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert {name for _, _, test in WAYS for of, _, name in [test.partition("::")] if of == file} <= there


def test_the_share_that_is_followed_does_not_fall() -> None:
    count = sum(map(len, found().values()))
    followed = sum(
        any(part in text.replace(HOLE, "<>") for part in FOLLOWED.get(name, ()))
        for name in found()
        for text in found()[name]
    )
    assert followed / count > SHARE


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("'there is no room: give a smaller --batch-size'", True),
        ("f'go on with `infinity finetune --resume {place}`, or not'", True),
        ("'call infinity.resume(model, config) where it ended'", True),
        ("'--batch-size: a whole number belongs there'", False),
        ("'infinity has AdamW, Adam, Lion, Adagrad and SGD'", False),
    ],
)
def test_what_is_advice(text: str, is_one: bool) -> None:
    assert (list(advice_in(f"raise ValueError({text})")) != []) is is_one
