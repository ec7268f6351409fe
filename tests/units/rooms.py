"""A Fetcher with fakes of slots and updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from infinity.base.timeline import Timeline
from infinity.sizes import PAGE_BYTES
from infinity.tiers.destination import Written
from infinity.tiers.home import WeightsHome
from infinity.units.fetch_rules import FetchRules, SingleProcessFetchRules
from infinity.units.fetcher import Fetcher
from infinity.units.unit import OffloadedUnit
from tests.tiers.fakes import pages
from tests.units.fakes import (
    Fetch,
    Slot,
    homes_of,
    no_shadows,
    offloaded,
    resources,
    slot_of,
    unit_of,
)


class Pool:
    """Counterpart of SlotPool with `budget` pages in total."""

    def __init__(self, budget: int, *, at_home: bool = True) -> None:
        self.budget = self.free_pages = budget
        self.at_home = at_home
        self.slots: dict[int, Slot] = {}
        self.fetches: list[Fetch] = []

    def start(self, home: WeightsHome, after: Written, version: int) -> Fetch | None:
        count = home.nbytes // PAGE_BYTES
        if count > self.free_pages:
            return None
        self.free_pages -= count
        fetch = _PoolFetch(self, slot_of(1.0, home.nbytes, at_home=self.at_home))
        self.slots[id(fetch.slot)] = fetch.slot
        self.fetches.append(fetch)
        return fetch

    def free(self, slot: Slot) -> None:
        assert not slot.viewed
        self.give_back(slot)
        slot.free()

    def give_back(self, slot: Slot) -> None:
        del self.slots[id(slot)]
        self.free_pages += slot.tensor.numel() // PAGE_BYTES

    def waits(self, home: WeightsHome) -> bool:
        return False

    def changed(self, home: WeightsHome, version: int, after: Written) -> None:
        return

    def counts(self, home: WeightsHome) -> bool:
        return home.lease is None or not self.at_home


class _PoolFetch(Fetch):
    def __init__(self, pool: Pool, slot: Slot) -> None:
        super().__init__(slot)
        self._pool = pool

    def finish(self) -> Slot:
        if self.fate is not None:
            self._pool.give_back(self.slot)
        return super().finish()


class NoUpdates:
    """Counterpart of Updates that knows the updates of a test's units."""

    def __init__(self, units: Sequence[OffloadedUnit]) -> None:
        self._units = units

    def wait_for_readers(self) -> None:
        for unit in self._units:
            if unit.update is not None and unit.reads_slot():
                unit.update.wait("computed")


SIZES = (2, 1, 3, 1, 2)
BUDGET = 6
STAYS = 3
"""Index of the unit that stays on the device."""
INDEX = st.integers(0, len(SIZES) - 1)


def alone(
    budget: int = BUDGET,
    sizes: Sequence[int] = SIZES,
    *,
    in_place: bool = True,
    in_ram: Sequence[int] = (),
    policy: FetchRules | None = None,
) -> tuple[Fetcher, Pool]:
    """Return a Fetcher and its pool. The homes of the units `in_ram` are in RAM, and the other homes are in the store.
    `policy` None: the rules of a single process.
    """
    below, pool = resources(slot_pages=budget, in_place=in_place), Pool(budget, at_home=in_place)
    shadows = no_shadows(below.pipeline)
    made = [unit_of(index, (count,), stays=index == STAYS) for index, count in enumerate(sizes)]
    space = pages(sum(sizes))
    units = [offloaded(unit, homes_of(unit, space if unit.index in in_ram else None), shadows) for unit in made]
    updates: Any = NoUpdates(units)
    return Fetcher(units, below, updates, Timeline(), pool, policy or SingleProcessFetchRules()), pool


def brought(room: Fetcher, *indices: int) -> None:
    for index in indices:
        room.fetch(room.units[index])


def residencies(room: Fetcher) -> list[str]:
    return [unit.weights.residency.value for unit in room.units]
