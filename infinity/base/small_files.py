"""Small files of /sys and /proc.

Such files may be missing, unreadable or malformed: a value that cannot be read is None or ''.
"""

from __future__ import annotations

import os
from pathlib import Path

_BYTES_MAX = 8 << 20
"""Maximum size in bytes of a file that is read."""


def text_of(path: Path) -> str:
    """Return the content of a file without surrounding whitespace; '' if the file cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        with open(descriptor, "rb") as file:
            return file.read(_BYTES_MAX).decode(errors="replace").strip()
    except (OSError, ValueError):  # ValueError: the path contains a NUL
        return ""


def number_in(value: object, base: int = 10) -> int | None:
    """Convert a string or an integer to an integer; return None if the value is not an integer."""
    try:
        return int(value, base) if isinstance(value, str) else int(value) if isinstance(value, int) else None
    except ValueError:
        return None


def number_of(path: Path, unit: int = 1) -> int | None:
    """Return the number in a file, times `unit`; None if the file has no number, or a negative number."""
    number = number_in(text_of(path))
    return None if number is None or number < 0 else number * unit


def flag_of(path: Path) -> bool | None:
    number = number_of(path)
    return None if number is None else bool(number)


def chosen(text: str) -> str:
    """Return the word in brackets, which is the selected value: 'always [madvise] never' → 'madvise'."""
    _, bracket, rest = text.partition("[")
    return rest.partition("]")[0] if bracket else text


def fields(text: str) -> list[tuple[str, str]]:
    """Parse 'name: value' lines."""
    pairs = (line.partition(":") for line in text.splitlines())
    return [(name.strip(), value.strip()) for name, _, value in pairs]
