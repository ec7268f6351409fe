"""Functions that format values from users and other libraries for messages. The text is shortened, and control
characters are escaped."""

from __future__ import annotations

import reprlib

from infinity.errors import StoreNotEmptyError, printable

_LIMIT = 80
"""Number of characters of a value that a message shows."""
_RAISED_LIMIT = 1000
"""Number of characters of another library's exception that a message shows. Such an exception may repeat a long
value."""


class _ShortRepr(reprlib.Repr):
    """Version of repr() with limits for depth, width and length, also for a value that contains itself."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 2, _LIMIT, _LIMIT
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 4

    def repr_int(self, value: int, level: int) -> str:
        return repr(value) if value.bit_length() < 256 else f"an integer of {value.bit_length()} bits"

    def repr_str(self, value: str, level: int) -> str:
        return quoted(value)


def quoted(value: object) -> str:
    """Return repr(value), in which each text is shortened to about 80 characters. The length of the text follows a
    shortened text.

    Characters that are not printable are escaped, so that a value cannot move the cursor, colour the terminal or begin
    a new line.
    """
    if not isinstance(value, str):
        return printable(_SHORT.repr(value))
    if len(value) <= _LIMIT:
        return repr(value)
    return f"{value[:_LIMIT]!r}… ({len(value)} characters)"


def one_line(text: object) -> str:
    """Return `text` as one printable line."""
    return printable(" ".join(line.strip() for line in str(text).splitlines()))


def with_ways(error: BaseException) -> str:
    """Return an error as a message: one printable line, or for a StoreNotEmptyError one line for each way to go on."""
    lines = str(error).splitlines() if isinstance(error, StoreNotEmptyError) else [str(error)]
    return "\n  ".join(map(one_line, lines))


def raised(error: BaseException) -> str:
    """Return an exception as one line for a message: its class and the first 1,000 characters of its text."""
    said = one_line(f"{type(error).__name__}: {error}")
    return said if len(said) <= _RAISED_LIMIT else f"{said[:_RAISED_LIMIT]}… ({len(str(error))} characters)"


_SHORT = _ShortRepr()
