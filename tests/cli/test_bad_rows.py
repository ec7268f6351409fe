"""One error names the first rows of a file that cannot be used, and how many there are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infinity.cli.documents import documents
from infinity.errors import ConfigError

GOOD: dict[str, Any] = {"text": "a fox"}
BAD: dict[str, Any] = {"text": 3}


class _NoTemplate:
    chat_template = None


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        list(documents(path, _NoTemplate(), "answers", {}, lambda _: None))
    return str(raised.value)


def test_rows_with_the_same_reason_are_named_by_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [GOOD, BAD, GOOD, *[BAD] * 7, GOOD]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert refused(path) == (
        f"{path}:2: 'text' is a int; it must be a string. Of the next rows, 1000 at most, 7 more cannot be used: rows "
        "4, 5, 6, 7, 8 and 2 more for the same reason"
    )


def test_each_reason_is_named_with_its_rows_and_one_row_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{json.dumps(BAD)}\n{{"text": \n\n{json.dumps(GOOD)}\n[]\n')
    alone, several = path.with_name("one.jsonl"), refused(path)
    assert several.startswith(f"{path}:1: 'text' is a int; it must be a string. Of the next rows, 1000 at most, 2 more")
    assert "cannot be used: row 2: not valid JSON at character " in several
    assert "; row 5: a row needs a 'text' string, " in several
    alone.write_text(json.dumps(BAD) + "\n")
    assert refused(alone) == f"{alone}:1: 'text' is a int; it must be a string"


def test_after_the_first_bad_row_a_long_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(BAD)}\n" * 1500)
    assert refused(path).endswith("1000 more cannot be used: rows 2, 3, 4, 5, 6 and 995 more for the same reason")
