"""Slots in host memory: fetches come and go in any order, and what is free of the arena is the budget."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from infinity.errors import SwapIOError, SwapTimeoutError
from infinity.sizes import PAGE_BYTES
from infinity.tiers.accelerator import Slot
from infinity.tiers.home import WeightsHome
from infinity.tiers.slots import Fetch, HostSlots
from tests.tiers.fakes import TIMEOUT, Failure, Future, Store, few, pages, transfer
from tests.units.fakes import homes_of, unit_of

PAGES = 8
GROUPS = [(1,), (2, 1), (1, 1), (4,)]


def pool_of(arena: Any) -> tuple[HostSlots, Store]:
    store = Store()
    below: Any = SimpleNamespace(arena=arena, require_store=lambda: store)
    return HostSlots(below), store


class SlotsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.arena = pages(PAGES)
        self.pool, self.store = pool_of(self.arena)
        self.homes = [homes_of(unit_of(index, groups)).weights for index, groups in enumerate(GROUPS)]
        for index, groups in enumerate(GROUPS):
            for group, count in enumerate(groups):
                self.store.stored[f"{index}.{group}.weight", 0] = bytes([16 * index + group]) * count * PAGE_BYTES
        self.fetches: list[tuple[int, Fetch]] = []
        self.slots: list[tuple[int, Slot]] = []

    @rule(index=st.integers(0, len(GROUPS) - 1))
    def start(self, index: int) -> None:
        before = self.arena.free_bytes
        fetch = self.pool.start(self.homes[index], {})
        if fetch is not None:
            self.fetches.append((index, fetch))
        else:
            longest = max((view.nbytes for view in self.arena.free_views()), default=0)
            assert longest < self.homes[index].nbytes
            assert self.arena.free_bytes == before

    @precondition(lambda self: self.store.under_way)
    @rule(data=st.data(), fails=st.sampled_from([False, False, True]))
    def a_read_ends(self, data: Any, fails: bool) -> None:
        data.draw(st.sampled_from(self.store.under_way)).end(Failure() if fails else None)

    @precondition(lambda self: self.fetches)
    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        index, fetch = self.fetches.pop(data.draw(st.integers(0, len(self.fetches) - 1)))
        fetch.advance()
        fetch.wait()
        try:
            slot = fetch.finish()
        except SwapIOError:
            return
        expected = [bytes([16 * index + group]) * count * PAGE_BYTES for group, count in enumerate(GROUPS[index])]
        assert slot.tensor.numpy().tobytes() == b"".join(expected)
        self.slots.append((index, slot))

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def free(self, data: Any) -> None:
        _, slot = self.slots.pop(data.draw(st.integers(0, len(self.slots) - 1)))
        self.pool.free(slot)

    @invariant()
    def what_is_free_is_the_budget(self) -> None:
        used = sum(self.homes[index].nbytes for index, _ in [*self.fetches, *self.slots])
        assert self.arena.free_bytes == PAGES * PAGE_BYTES - used

    @invariant()
    def slots_are_apart(self) -> None:
        ranges = sorted((slot.tensor.data_ptr(), slot.tensor.numel()) for _, slot in self.slots)
        for (first, nbytes), (second, _) in itertools.pairwise(ranges):
            assert first + nbytes <= second


TestSlots = SlotsMachine.TestCase
TestSlots.settings = few


def home_of(index: int, count: int) -> WeightsHome:
    return homes_of(unit_of(index, (count,))).weights


def brought(pool: HostSlots, home: WeightsHome) -> Any:
    fetch = pool.start(home, {})
    assert fetch is not None
    return fetch.finish()


def test_weights_in_ram_are_used_where_they_are_and_never_given_back() -> None:
    space, arena = pages(2), pages(1)
    pool, _ = pool_of(arena)
    home = homes_of(unit_of(0, (2,)), space).weights
    slot = brought(pool, home)
    assert slot.tensor.numel() == 2 * PAGE_BYTES
    assert not pool.counts(home)
    pool.free(slot)
    assert (space.free_bytes, arena.free_bytes) == (0, PAGE_BYTES)
    assert pool.counts(home_of(1, 1))


def test_long_units_come_from_the_top_so_that_they_do_not_break_up_the_space_of_short_ones() -> None:
    pool, _ = pool_of(pages(8))
    short, long = brought(pool, home_of(0, 2)), brought(pool, home_of(1, 3))
    assert (short.lease.offset, long.lease.offset) == (0, 5 * PAGE_BYTES)


def test_memory_that_a_device_may_still_write_to_is_never_given_back() -> None:
    arena = pages(2)
    pool, store = pool_of(arena)
    fetch = pool.start(home_of(0, 1), {})
    assert fetch is not None
    store.under_way[0].fate = TIMEOUT
    with pytest.raises(SwapTimeoutError):
        fetch.finish()
    assert arena.free_bytes == PAGE_BYTES


def test_a_fetch_waits_for_all_its_groups_and_tells_the_failure_of_any() -> None:
    arena = pages(2)
    pool, store = pool_of(arena)
    fetch = pool.start(homes_of(unit_of(0, (1, 1))).weights, {})
    assert fetch is not None
    first, second = store.under_way
    first.fate = Failure("corruption")
    with pytest.raises(SwapIOError):
        fetch.finish()
    assert first.done()
    assert second.done()
    assert arena.free_bytes == 2 * PAGE_BYTES


def test_new_weights_are_read_from_where_they_go_once_they_are_there() -> None:
    pool, store = pool_of(pages(1))
    store.stored["0.0.weight", 0], written = b"\1" * PAGE_BYTES, Future()
    written._at_end = lambda failure: store.stored.update({("0.0.weight", 1): b"\2" * PAGE_BYTES})
    fetch = pool.start(home_of(0, 1), {0: (1, transfer(written))})
    assert fetch is not None
    assert set(fetch.finish().tensor.tolist()) == {2}
    assert written.done()
