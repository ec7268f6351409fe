"""Sizes in bytes: reading, writing and rounding them."""

from __future__ import annotations

import re

PAGE_BYTES = 4096
"""Alignment of everything that goes to or comes from a swap file."""

_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_UNITS |= {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(value: object) -> object:
    """'64MiB', '2.5GB' or an integer number of bytes → int. Anything else raises ValueError."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value) if isinstance(value, str) else None
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{value!r} is not a size; write it like 64MiB or 20GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def format_bytes(nbytes: float) -> str:
    """1610612736 → '1.50 GiB'."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{int(nbytes)} B"


def exact_bytes(nbytes: int) -> str:
    """As a swap config takes it, in whole pages: 135168 → '132KiB', 2097152 → '2MiB'."""
    nbytes = round_up(nbytes, PAGE_BYTES)
    unit, size = next(
        (unit, size) for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)) if nbytes % size == 0
    )
    return f"{nbytes // size}{unit}"


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
