"""Reading a generation as a whole: the queue stays full whatever the extents' sizes, and damage is named exactly."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infinity import _native
from infinity.errors import SwapIOError
from infinity.io.directory import SWAP_NAME
from infinity.io.generation_scan import verify
from infinity.io.manifest import ExtentRecord, Manifest
from infinity.io.store import Extent, SwapStore
from tests.io.extents import ExtentMap

PAGE = 4096


def memory_of(nbytes: int) -> memoryview:
    return _native.Arena(nbytes, huge_pages=False).view(0, nbytes)


class Written:
    """A store with extents of `pages` pages each, and the manifest of what is in them."""

    def __init__(self, directory: Path, pages: list[int], faults: tuple[_native.Fault, ...] = ()) -> None:
        extents = ExtentMap()
        self.extents = [extents.add(f"unit{index}", "weight", count * PAGE) for index, count in enumerate(pages)]
        self.engine = _native.IOEngine(faults=list(faults))
        self.store = SwapStore([directory], extents.nbytes, self.engine)
        for index, extent in enumerate(self.extents):
            memory = memory_of(max(extent.nbytes, PAGE))[: extent.nbytes]
            np.frombuffer(memory, np.uint8)[:] = np.random.default_rng(index).integers(0, 256, extent.nbytes, np.uint8)
            if extent.nbytes:
                self.store.write(extent, memory).result()
        sums = b"".join(self.store.file.block_sums(extent.offset, extent.nbytes) for extent in self.extents)
        records = [ExtentRecord(e.unit, e.group, e.state, 0, e.offset, e.nbytes) for e in self.extents]
        self.manifest = Manifest(run="", step=1, created="", extents=records, sums=sums, facts={}, body={})
        self.file = directory / SWAP_NAME

    def damage(self, index: int, page: int) -> None:
        with self.file.open("r+b") as raw:
            raw.seek(self.extents[index].offset + page * PAGE)
            raw.write(b"damaged")

    def verify(self, memory: memoryview) -> list[tuple[str, int, int]]:
        found = verify(self.store, self.extents, self.manifest, memory)
        return [(damage.extent.unit, damage.offset, damage.nbytes) for damage in found]


@pytest.fixture
def stores() -> Iterator[list[Written]]:
    made: list[Written] = []
    yield made
    for each in made:
        each.engine.close()
        each.store.close()


class Flight:
    """Counts the reads of a store that were begun and not waited for, and their bytes."""

    def __init__(self, store: SwapStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at_waits: list[int] = []
        self.bytes_max = self._count = self._bytes = 0
        self.interrupt_at: int | None = None
        self._read = store.read
        monkeypatch.setattr(store, "read", self.read)

    def read(self, extent: Extent, into: memoryview, **options: Any) -> Any:
        self._count, self._bytes = self._count + 1, self._bytes + len(into)
        self.bytes_max = max(self.bytes_max, self._bytes)
        transfer = self._read(extent, into, **options)
        finish = transfer.result

        def result() -> None:
            self.at_waits.append(self._count)
            if len(self.at_waits) == self.interrupt_at:
                raise KeyboardInterrupt
            finish()
            self._count, self._bytes = self._count - 1, self._bytes - len(into)

        object.__setattr__(transfer, "result", result)
        return transfer


def test_small_extents_are_read_beside_each_other(
    stores: list[Written], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores.append(Written(tmp_path / "swap", [1] * 100))
    flight = Flight(stores[0].store, monkeypatch)
    assert stores[0].verify(memory_of(32 * PAGE)) == []
    assert flight.at_waits == [32] * 69 + list(range(31, 0, -1)), "the queue is drained once, at the end"


def test_extents_of_any_sizes_keep_the_queue_full(
    stores: list[Written], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(0)
    pages = [rng.choice([1, 2, 3, 40, 100]) for _ in range(60)]
    stores.append(Written(tmp_path / "swap", pages))
    flight = Flight(stores[0].store, monkeypatch)
    memory = memory_of(32 * PAGE)
    assert stores[0].verify(memory) == []
    assert flight.bytes_max <= len(memory)
    assert set(flight.at_waits[:-31]) == {32}, "the queue is drained once, at the end"


@pytest.mark.parametrize("seed", range(8))
def test_damage_is_named_exactly_and_in_order(seed: int, stores: list[Written], tmp_path: Path) -> None:
    rng = random.Random(seed)
    pages = [rng.choice([0, 1, 2, 63, 64, 65, 130]) for _ in range(30)]
    stores.append(Written(tmp_path / "swap", pages))
    written = stores[0]
    wrong = sorted((index, rng.randrange(pages[index])) for index in rng.sample(range(30), 10) if pages[index])
    for index, page in wrong:
        written.damage(index, page)
    expected = []
    for index, page in wrong:  # in blocks of 256 KiB
        begin, extent = page // 64 * 64 * PAGE, written.extents[index]
        expected.append((extent.unit, extent.offset + begin, min(64 * PAGE, extent.nbytes - begin)))
    assert written.verify(memory_of(rng.choice([1, 7, 16, 100]) * PAGE)) == expected


def test_an_extent_that_cannot_be_read_is_one_damage_and_the_others_are_checked(
    stores: list[Written], tmp_path: Path
) -> None:
    begin = 10 * PAGE
    fault = _native.Fault(0, "error", 5, repeat=1000, operation="read", begin=begin, end=begin + 40 * PAGE)
    stores.append(Written(tmp_path / "swap", [1] * 10 + [40] + [1] * 10, (fault,)))
    stores[0].damage(20, 0)
    found = list(verify(stores[0].store, stores[0].extents, stores[0].manifest, memory_of(32 * PAGE)))
    assert [(damage.extent.unit, isinstance(damage.error, SwapIOError)) for damage in found] == [
        ("unit10", True),
        ("unit20", False),
    ]


def test_an_interrupt_leaves_no_read_in_flight(
    stores: list[Written], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores.append(Written(tmp_path / "swap", [1] * 100))
    flight = Flight(stores[0].store, monkeypatch)
    flight.interrupt_at = 40
    with pytest.raises(KeyboardInterrupt):
        stores[0].verify(memory_of(32 * PAGE))
    assert len(flight.at_waits) > 40, "the interrupted one was waited for again"
    assert flight._count == 0


def test_memory_is_free_again_for_whoever_stops_in_the_middle(
    stores: list[Written], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores.append(Written(tmp_path / "swap", [1] * 100))
    stores[0].damage(0, 0)
    flight = Flight(stores[0].store, monkeypatch)
    found = verify(stores[0].store, stores[0].extents, stores[0].manifest, memory_of(32 * PAGE))
    assert next(found).extent.unit == "unit0"
    found.close()  # type: ignore[attr-defined]
    assert flight._count == 0
