"""How what came from outside appears in a message: short, and without what a terminal would obey."""

from __future__ import annotations

import reprlib

from infinity.errors import printable

_LIMIT = 80
"""Characters of a value that a message shows."""


class _Short(reprlib.Repr):
    """Bounded in depth, width and length; a value that contains itself ends as well."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 2, _LIMIT, _LIMIT
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 4

    def repr_int(self, value: int, level: int) -> str:
        return repr(value) if value.bit_length() < 256 else f"an integer of {value.bit_length()} bits"

    def repr_str(self, value: str, level: int) -> str:
        return quoted(value)


def quoted(value: object) -> str:
    """repr(value), of at most about 80 characters of each text in it; of a longer text it says how long that is.

    What is not printable is escaped, so that a value cannot move the cursor, colour the terminal or begin a line.
    """
    if not isinstance(value, str):
        return printable(_SHORT.repr(value))
    if len(value) <= _LIMIT:
        return repr(value)
    return f"{value[:_LIMIT]!r}… ({len(value)} characters)"


def one_line(text: object) -> str:
    """`text` without line breaks, printable."""
    return printable(" ".join(line.strip() for line in str(text).splitlines()))


def raised(error: BaseException) -> str:
    """What foreign code raised, as a message has it."""
    return one_line(f"{type(error).__name__}: {error}")


_SHORT = _Short()
