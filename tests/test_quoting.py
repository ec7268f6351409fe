"""Text from outside appears in messages shortened, on one line and harmless."""

from __future__ import annotations

import pytest

from infinity.quoting import one_line, quoted, raised


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


def test_lines_become_one() -> None:
    assert one_line("two\n   lines, \x1b[31mred\n") == r"two lines, \x1b[31mred"


def test_an_exception_that_repeats_a_long_value_is_cut() -> None:
    said = raised(ValueError("\x1b" + "y" * 100_000))
    assert said.startswith(r"ValueError: \x1byyy")
    assert said.endswith("yyy… (100001 characters)")
    assert len(said) < 1100
    assert raised(KeyError("short")) == "KeyError: 'short'"
