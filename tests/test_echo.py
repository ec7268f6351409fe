"""What came from outside appears in messages in short, on one line and harmless."""

from __future__ import annotations

import pytest

from infinity.echo import printable, quoted


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("host", "'host'"),
        ("\x1b[31mred\r\n", r"'\x1b[31mred\r\n'"),
        ("\u202egnp.exe", r"'\u202egnp.exe'"),
        ("\udcff", r"'\udcff'"),
        ("x" * 100, f"'{'x' * 80}'… (100 characters)"),
        (10**400, "an integer of 1329 bits"),
        (None, "None"),
        ([1, [2, [3, [4]]]], "[1, [2, [...]]]"),
        (list(range(100)), "[0, 1, 2, 3, ...]"),
        ({"a": "y" * 1000}, f"{{'a': '{'y' * 80}'… (1000 characters)}}"),
    ],
)
def test_values_are_quoted(value: object, shown: str) -> None:
    assert quoted(value) == shown


def test_a_value_that_contains_itself_ends() -> None:
    circle: list[object] = []
    circle += [circle] * 4
    assert len(quoted(circle)) < 200


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, with äöü → and 💥", "plain, with äöü → and 💥"),
        ("two\n   lines\n", "two lines"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x9b31m", r"\x9b31m"),
        ("file\udcff", r"file\udcff"),
    ],
)
def test_lines_are_made_printable(text: str, shown: str) -> None:
    assert printable(text) == shown
