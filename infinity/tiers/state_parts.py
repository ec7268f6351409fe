"""Reads and writes of parts of a state, in RAM, on the device or in the store."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from infinity import _native
from infinity.io import extent_reading
from infinity.io.store import wait_all
from infinity.sizes import PAGE_BYTES, round_up
from infinity.tiers.home import StateHome
from infinity.tiers.resources import ModelResources

_CHUNK_BYTES = 4 << 20


def read_part(resources: ModelResources, home: StateHome, begin: int, nbytes: int) -> torch.Tensor:
    """Return bytes [begin, begin + nbytes) of a state, uint8."""
    if home.in_memory:
        return home.read(begin, nbytes)
    return extent_reading.read_part(resources.require_store(), home.stored(), begin, nbytes).clone()


def write_parts(resources: ModelResources, home: StateHome, parts: Mapping[int, torch.Tensor]) -> None:
    """Write parts of a state. The keys of `parts` are byte offsets in the state. All other bytes of the state are
    unchanged."""
    if home.in_memory:
        for begin, part in parts.items():
            home.write(begin, part)
        home.mark_changed()
        return
    store, extent = resources.require_store(), home.stored()
    copy = resources.copy_to_write(extent)
    start, end = 0, home.nbytes
    if copy == extent.newest_copy:  # the state is updated in place: only the pages that contain the parts are rewritten
        start = min(parts) // PAGE_BYTES * PAGE_BYTES
        end = round_up(max(begin + part.numel() for begin, part in parts.items()), PAGE_BYTES)
    memory = _native.Arena(min(_CHUNK_BYTES, end - start), huge_pages=False)
    for at in range(start, end, _CHUNK_BYTES):
        page = memory.view(0, min(_CHUNK_BYTES, end - at))
        wait_all([store.read(extent, page, at=at, io_class="states")])
        held = torch.frombuffer(page, dtype=torch.uint8)
        for begin, part in parts.items():
            first, last = max(begin, at), min(begin + part.numel(), at + len(page))
            if first < last:
                held[first - at : last - at].copy_(part[first - begin : last - begin])
        wait_all([store.write(extent, page, at=at, io_class="states", copy_index=copy)])
    home.mark_written(copy)
