"""Sizes in bytes: parsing, formatting and rounding."""

from __future__ import annotations

import re
from fractions import Fraction

from infinity.quoting import quoted

PAGE_BYTES = 4096
"""Bytes to which every transfer to or from a swap file is aligned."""

SIZE_MAX = 1 << 60
"""Largest size that a config or an option may have, in bytes."""

THREADS_MAX = 1024
"""Largest number of compute threads that a config or an option may have."""

_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_UNITS |= {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SHOWN = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_SIZE = re.compile(r"\s*((?:0|[1-9][0-9]{0,18})(?:\.[0-9]{1,18})?)\s*([A-Za-z]{0,3})\s*")


def parse_bytes(value: object) -> object:
    """Convert a size such as "64MiB", "2.5GB" or an integer to a number of bytes. None is returned unchanged.

    Raises ValueError for any other value, and for sizes above 1 EiB.
    """
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        nbytes = value
    else:
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(f"{quoted(value)} is not a size; write it like 64MiB or 20GiB")
        nbytes = int(Fraction(match[1]) * _UNITS[match[2].upper()])
    if nbytes > SIZE_MAX:
        raise ValueError(f"{quoted(value)} is more than 1 EiB")
    return nbytes


def format_bytes(nbytes: float) -> str:
    """Format a size for messages: 1610612736 → '1.50 GiB'."""
    for unit, size in _SHOWN:
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{int(nbytes)} B"


def exact_bytes(nbytes: int) -> str:
    """Format a size for a swap config, rounded up to a multiple of the page size: 135168 → '132KiB', 2097152 →
    '2MiB'."""
    nbytes = round_up(nbytes, PAGE_BYTES)
    unit, size = next((unit, size) for unit, size in _SHOWN if nbytes % size == 0)
    return f"{nbytes // size}{unit}"


def enough_bytes(nbytes: int) -> str:
    """Format a size for a swap config, rounded up to a number with few digits: 109797944 KiB → '105GiB'."""
    unit, size = next(((unit, size) for unit, size in _SHOWN if nbytes >= 10 * size), _SHOWN[-1])
    return f"{-(-nbytes // size)}{unit}"


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
