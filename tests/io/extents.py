"""Extents for stores without a plan."""

from __future__ import annotations

from infinity.io.store import Extent
from infinity.sizes import PAGE_BYTES, round_up


class ExtentMap:
    """Allocator of consecutive extents, used before the file exists."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.extents: list[Extent] = []

    def add(self, unit: str, state: str, nbytes: int, *, group: int = 0, copies: int = 1) -> Extent:
        nbytes = round_up(nbytes, PAGE_BYTES)
        offsets = tuple(self.nbytes + index * nbytes for index in range(copies))
        self.nbytes += copies * nbytes
        self.extents.append(Extent(unit, group, state, offsets, nbytes))
        return self.extents[-1]
