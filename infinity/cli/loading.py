"""Lines about the libraries and the model that a run loads before its first step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_LONG_S = 1.0
"""Seconds from which a line says how long loading took."""


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Print a line when the `with` block has loaded `what`, with the seconds if loading took long."""
    began = time.monotonic()
    yield
    seconds = time.monotonic() - began
    print(f"{what} loaded{f' in {seconds:.0f} s' if seconds >= _LONG_S else ''}", flush=True)
