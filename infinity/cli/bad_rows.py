"""The error about rows of a data file that cannot be used: one error for the first rows, with their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from infinity.errors import ConfigError

_CHECKED = 1000
"""Number of rows that are checked after the first row that cannot be used."""
_NAMED = 5
"""Maximum number of rows with the same reason, and maximum number of reasons, that the error names."""


class BadRows:
    """The rows of one file that cannot be used, each with the reason.

    A ConfigError about a row begins with the row's place, `file:number`.
    """

    def __init__(self) -> None:
        self._first = ""
        self._rows: dict[str, list[str]] = {}  # numbers of rows by reason

    def __bool__(self) -> bool:
        return bool(self._rows)

    def until_enough(self, rows: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yield the rows of a file. End early if a row cannot be used and enough further rows were checked."""
        for each in rows:
            yield each
            if self._rows:
                yield from islice(rows, _CHECKED)
                return

    def add(self, where: str, error: ConfigError) -> None:
        """Add a row at `where` that cannot be used because of `error`."""
        self._first = self._first or str(error)
        self._rows.setdefault(str(error).removeprefix(where), []).append(where.rpartition(":")[2])

    def refuse(self) -> None:
        """Raise ConfigError if there is a row that cannot be used."""
        if not self._rows:
            return
        (_, (_, *same)), *others = self._rows.items()
        parts = [f"{_numbers(same)} for the same reason"] if same else []
        parts += [f"{_numbers(numbers)}{reason}" for reason, numbers in others[:_NAMED]]
        if len(others) > _NAMED:
            parts.append(f"and rows with {len(others) - _NAMED} more reasons")
        more = sum(map(len, self._rows.values())) - 1
        also = f". Of the next rows, {_CHECKED} at most, {more} more cannot be used: {'; '.join(parts)}" if more else ""
        raise ConfigError(f"{self._first}{also}")


def _numbers(rows: list[str]) -> str:
    more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
    return f"row{'s' if len(rows) > 1 else ''} {', '.join(rows[:_NAMED])}{more}"
