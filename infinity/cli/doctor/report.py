"""The doctor's report: a verdict, and a table for people or JSON for programs.

[Note: the JSON]
`schema` and `version` name it; a version only ever gains keys. `rows` has an object for each row of the table, in its
order: section, what, finding, state ('ok', 'slower', 'missing' or 'unknown') and mend, a command or ''.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from infinity.cli.doctor.rows import Row, State
from infinity.errors import printable

SCHEMA, VERSION = "infinity-doctor", 1

_STATE_WIDTH, _WHAT_WIDTH = 9, 22
_FOUND_AT = 2 + _STATE_WIDTH + _WHAT_WIDTH
_WIDTH_MIN = _FOUND_AT + 30


def is_ready(rows: Sequence[Row]) -> bool:
    return not any(row.state == "missing" for row in rows)


def verdict(rows: Sequence[Row]) -> str:
    """One sentence: whether a run can work here, and what would be better."""
    missing, slower, unknown = (count(rows, state) for state in ("missing", "slower", "unknown"))
    parts = []
    if missing:
        parts.append(f"{missing} thing{_s(missing)} {'is' if missing == 1 else 'are'} missing")
    if slower:
        parts.append(f"{slower} {'make' if slower > 1 else 'makes'} it slower")
    if unknown:
        parts.append(f"{unknown} could not be found out")
    if missing:
        return f"not ready: {', '.join(parts)}"
    if parts:
        return f"ready: nothing is missing, {', '.join(parts)}"
    return f"ready: all {len(rows)} checks went well"


def count(rows: Sequence[Row], state: State) -> int:
    return sum(row.state == state for row in rows)


def ordered(rows: Sequence[Row]) -> list[Row]:
    """Rows of one section together, in the order of the sections' first rows."""
    sections = list(dict.fromkeys(row.section for row in rows))
    return sorted(rows, key=lambda row: sections.index(row.section))


def to_text(rows: Sequence[Row], width: int) -> str:
    """Args: width: of the terminal. Commands are longer if they must be, so that they can be copied."""
    lines = [verdict(rows)]
    for section, each in groupby(rows, key=lambda row: row.section):
        lines += ["", printable(section)]
        for row in each:
            lines += _lines(row, max(width, _WIDTH_MIN))
    return "\n".join(lines)


def _lines(row: Row, width: int) -> list[str]:
    name = f"{printable(row.what)} " if len(row.what) >= _WHAT_WIDTH else f"{printable(row.what):<{_WHAT_WIDTH}}"
    begin = f"  {row.state:<{_STATE_WIDTH}}{name}"
    lines = textwrap.wrap(
        printable(row.finding) or "-",
        width,
        initial_indent=begin,
        subsequent_indent=" " * _FOUND_AT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [*lines, f"{' ' * _FOUND_AT}→ {printable(row.mend)}"] if row.mend else lines


def to_json(rows: Sequence[Row], version: str) -> dict[str, Any]:
    """Args: version: of infinity."""
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "infinity": version,
        "verdict": verdict(rows),
        "ready": is_ready(rows),
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def _s(number: int) -> str:
    return "" if number == 1 else "s"
