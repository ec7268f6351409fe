"""Gradients that spill: what was brought last comes back, however late reads and writes end; one group always finds
room; and who needs gradients that were lost is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from infinity.errors import SwapIOError, SwapTimeoutError
from infinity.sizes import PAGE_BYTES
from infinity.tiers.landing_window import LandingWindow, SpilledGradients, _SpillState
from tests.tiers.fakes import TIMEOUT, Failure, Future, Store, Stream, extent, few, imitate_streams, pages

SIZES = (1, 2, 1, 2)
INDEX = st.integers(0, len(SIZES) - 1)


class WindowMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        imitate_streams(self.patch)
        self.store = Store()
        self.store.ended = self._ended

    @initialize(count=st.integers(max(SIZES), max(SIZES) + 2))
    def open(self, count: int) -> None:
        native: Any = self.store
        self.nbytes = count * PAGE_BYTES
        self.space = pages(count)
        self.landing = LandingWindow(self.space, native)
        self.spills = [self._spill(index, count) for index, count in enumerate(SIZES)]
        self.content: dict[int, int] = {}  # what was written to a spill's memory last
        self.lost: set[int] = set()

    def _spill(self, index: int, count: int) -> SpilledGradients:
        return SpilledGradients(extent(str(index), "grad", count=count, copies=1), self.landing, None)

    def _ended(self, extent: Any, failure: Failure | None) -> None:
        if failure is not None:
            self.lost.add(int(extent.unit))

    # -- what may happen ----------------------------------------------------------------------------------------------

    @rule(index=INDEX, value=st.integers(1, 250))
    def bring(self, index: int, value: int) -> None:
        spill = self.spills[index]
        for _ in SIZES:  # each failure of another's transfer is told once
            try:
                view = spill.load()
            except SwapIOError:
                assert self.lost
                if index in self.lost:
                    return
                continue
            break
        else:
            raise AssertionError("a group found no room")
        assert index not in self.lost
        assert view.nbytes == spill.nbytes
        if index in self.content:
            assert set(bytes(view)) == {self.content[index]}
        view[:] = bytes([value]) * view.nbytes
        self.content[index] = value

    @rule(index=INDEX, value=st.integers(1, 250))
    def spill(self, index: int, value: int) -> None:
        self.bring(index, value)
        self.leave(index)

    @rule(index=INDEX)
    def leave(self, index: int) -> None:
        self._unless_lost(index, self.spills[index].begin_spill)

    @rule(index=INDEX)
    def gone(self, index: int) -> None:
        self._unless_lost(index, self.spills[index].finish_spill)

    def _unless_lost(self, index: int, act: Any) -> None:
        try:
            act()
        except SwapIOError:
            assert index in self.lost

    @rule(index=INDEX)
    def announce(self, index: int) -> None:
        waits = [future.waits for future in self.store.under_way]
        self.spills[index].announce()
        assert [future.waits for future in self.store.under_way[: len(waits)]] == waits

    @rule(index=INDEX)
    def forget(self, index: int) -> None:
        self.spills[index].forget()
        self.lost.discard(index)
        self.content.pop(index, None)
        assert self.spills[index]._lease is None
        self.spills[index]._require_whole()

    @rule(index=INDEX)
    def stream(self, index: int) -> None:
        try:
            stream: Any = self.spills[index].stream()
        except SwapIOError:
            assert index in self.lost
            return
        assert index not in self.lost
        assert isinstance(stream, Stream)
        assert self.spills[index]._lease is None
        if index in self.content:
            assert set(self.store.stored[f"{index}.0.grad", 0]) == {self.content[index]}

    @rule()
    def clear(self) -> None:
        lost = set(self.lost)
        try:
            self.landing.clear()
        except SwapIOError:
            assert self.lost
        else:
            assert self.lost == lost
        for index in self.lost:
            with pytest.raises(SwapIOError):
                self.spills[index].load()
        assert self.space.free_bytes == self.nbytes
        assert not self.store.under_way

    @precondition(lambda self: self.store.under_way)
    @rule(data=st.data(), fails=st.booleans(), late=st.booleans())
    def a_transfer_ends(self, data: Any, fails: bool, late: bool) -> None:
        futures = range(len(self.store.under_way))
        future: Future = self.store.under_way[data.draw(st.sampled_from(futures))]
        if late:
            future.fate = Failure() if fails else None
        else:
            future.end(Failure() if fails else None)

    # -- what stays ---------------------------------------------------------------------------------------------------

    @invariant()
    def the_window_has_what_is_here_and_what_is_on_its_way(self) -> None:
        inside = [spill for spill in self.spills if spill._lease is not None]
        assert self.space.free_bytes + sum(spill.nbytes for spill in inside) == self.nbytes
        assert {id(spill) for spill in inside} == {
            id(spill) for spill in self._in(_SpillState.HERE, _SpillState.COMING, _SpillState.LEAVING)
        }

    @invariant()
    def the_window_knows_who_is_in_it(self) -> None:
        here, leaving = self.landing._here, self.landing._leaving
        assert {id(spill) for spill in here} == {id(spill) for spill in self._in(_SpillState.HERE, _SpillState.COMING)}
        assert {id(spill) for spill in leaving} == {id(spill) for spill in self._in(_SpillState.LEAVING)}
        assert (len(set(here)), len(set(leaving))) == (len(here), len(leaving))

    def _in(self, *places: _SpillState) -> list[SpilledGradients]:
        return [spill for spill in self.spills if spill._where in places]

    def teardown(self) -> None:
        self.patch.undo()


TestWindow = WindowMachine.TestCase
TestWindow.settings = few


def window(count: int, *sizes: int) -> tuple[LandingWindow, Store, list[SpilledGradients]]:
    store = Store()
    native: Any = store
    landing = LandingWindow(pages(count), native)
    spills = [
        SpilledGradients(extent(str(index), "grad", count=size, copies=1), landing, None)
        for index, size in enumerate(sizes)
    ]
    return landing, store, spills


def test_what_is_in_use_leaves_once_the_last_of_it_has_landed() -> None:
    landing, store, _ = window(2)
    landings = [Future(), Future()]
    down: Any = SimpleNamespace(landing_futures=lambda: landings)
    spill = SpilledGradients(extent("0", "grad", count=2, copies=1), landing, down)
    spill.load()[:] = b"\1" * (2 * PAGE_BYTES)
    spill.use(PAGE_BYTES)
    spill.begin_spill()
    spill.finish_spill()
    assert store.stored["0.0.grad", 0] == b"\1" * PAGE_BYTES
    assert [each.done() for each in landings] == [False, True]  # they land in the order in which they came


def test_writes_that_were_begun_first_are_waited_for_first() -> None:
    _, store, (first, second, third) = window(2, 1, 1, 1)
    for spill in (first, second):
        spill.load()
        spill.begin_spill()
    third.load()
    assert [spill._where for spill in (first, second, third)] == [
        _SpillState.AWAY,
        _SpillState.LEAVING,
        _SpillState.HERE,
    ]
    assert len(store.under_way) == 1


def test_what_others_brought_first_leaves_first() -> None:
    _, _, (first, second, third) = window(2, 1, 1, 1)
    for spill in (second, first, third):
        spill.load()
    assert [spill._where for spill in (first, second, third)] == [_SpillState.HERE, _SpillState.AWAY, _SpillState.HERE]


@pytest.mark.parametrize("coming", [False, True])
def test_whoever_needs_gradients_that_were_lost_is_told_until_they_are_forgotten(coming: bool) -> None:
    landing, store, (spill, other) = window(1, 1, 1)
    spill.load()
    spill.begin_spill()
    if coming:
        spill.finish_spill()
        spill.announce()
    store.under_way[0].fate = Failure()
    with pytest.raises(SwapIOError):
        other.load()  # the first who waits for it
    other.load()
    for _ in range(2):
        for needs in (spill.load, spill.stream):
            with pytest.raises(SwapIOError):
                needs()
    spill.announce()
    landing.clear()
    assert landing.space.free_bytes == PAGE_BYTES
    spill.forget()
    spill.load()


def test_what_was_only_read_is_not_written_again() -> None:
    _, store, (spill,) = window(1, 1)
    spill.load()
    spill.begin_spill()
    spill.finish_spill()
    spill.announce()
    spill.begin_spill()
    assert not store.under_way
    assert spill._lease is None


def test_nothing_is_announced_where_there_is_no_room() -> None:
    _, store, (first, second) = window(1, 1, 1)
    first.load()
    second.load()
    first.announce()
    assert not store.under_way
    assert first._lease is None


@pytest.mark.parametrize("coming", [False, True])
def test_memory_that_a_device_may_still_use_is_never_given_back(coming: bool) -> None:
    landing, store, (spill, other) = window(2, 1, 1)
    spill.load()
    spill.begin_spill()
    if coming:
        spill.finish_spill()
        spill.announce()
    store.under_way[0].fate = TIMEOUT
    other.load()
    with pytest.raises(SwapTimeoutError):
        landing.clear()
    with pytest.raises(SwapTimeoutError):
        spill.load()
    spill.forget()
    assert spill._lease is None
    landing.clear()
    assert landing.space.free_bytes == PAGE_BYTES


def test_a_group_that_the_window_was_not_made_for_is_a_bug_that_shows() -> None:
    _, _, (spill,) = window(1, 2)
    with pytest.raises(AssertionError, match="has no room for 8192"):
        spill.load()
