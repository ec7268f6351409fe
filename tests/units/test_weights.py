"""The life of a unit's weights: what the note lists happens, everything else raises, and the parameters go with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from infinity.base.timeline import Timeline
from infinity.errors import SwapIOError, SwapTimeoutError
from infinity.io.arena import PinnedArena
from infinity.tiers.slots import HostSlot
from infinity.units.weights import Residency, UnitWeights
from tests.tiers.fakes import few
from tests.units.fakes import Fetch, Slot, slot_of, unit_of

RELEASED, FETCHING, RESIDENT, UPDATING, STALE = Residency


class Views:
    """Fake of ParameterViews. Attributes: shown: the slot that the parameters are views of; None: they are
    placeholders."""

    def __init__(self) -> None:
        self.shown: Any = None
        self.saved = False

    def show(self, slot: Any) -> None:
        self.shown = slot

    def hide(self) -> None:
        self.shown = None

    def saved_by_autograd(self) -> bool:
        return self.saved


def made() -> UnitWeights:
    views: Any = Views()
    return UnitWeights(unit_of(0), views, Timeline())


def fetch() -> Any:
    return Fetch(slot_of(1.0, 4096))


STEPS: dict[str, Callable[[UnitWeights], object]] = {
    "begin_fetch": lambda weights: weights.begin_fetch(fetch()),
    "finish_fetch": lambda weights: weights.finish_fetch(),
    "update in the slot": lambda weights: weights.begin_update(writes_slot=True),
    "update elsewhere": lambda weights: weights.begin_update(writes_slot=False),
    "updated": lambda weights: weights.updated(),
    "leave": lambda weights: weights.release(),
}
WAY = {
    RELEASED: [],
    FETCHING: ["begin_fetch"],
    RESIDENT: ["begin_fetch", "finish_fetch"],
    UPDATING: ["begin_fetch", "finish_fetch", "update in the slot"],
    STALE: ["begin_fetch", "finish_fetch", "update elsewhere"],
}
NOTE = {
    (RELEASED, "begin_fetch"): FETCHING,
    (FETCHING, "finish_fetch"): RESIDENT,
    (RESIDENT, "update in the slot"): UPDATING,
    (RESIDENT, "update elsewhere"): STALE,
    (RESIDENT, "leave"): RELEASED,
    (UPDATING, "updated"): RESIDENT,
    (UPDATING, "leave"): RELEASED,
    (STALE, "leave"): RELEASED,
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("before", list(Residency), ids=lambda each: each.value)
def test_every_transition_of_the_note_and_no_other(before: Residency, step: str) -> None:
    weights = made()
    for each in WAY[before]:
        STEPS[each](weights)
    assert weights.residency is before
    if (before, step) in NOTE:
        STEPS[step](weights)
        assert weights.residency is NOTE[before, step]
    else:
        with pytest.raises(AssertionError, match="unit '0'"):
            STEPS[step](weights)


class WeightsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.views: Any = Views()
        self.timeline = Timeline()
        self.timeline.record()
        self.weights = UnitWeights(unit_of(0), self.views, self.timeline)
        self.version = 0
        self.fetches = 0

    def _is(self, *residencies: Residency) -> bool:
        return self.weights.residency in residencies

    @precondition(lambda self: self._is(RELEASED))
    @rule()
    def begin_fetch(self) -> None:
        self.weights.begin_fetch(fetch())

    @precondition(lambda self: self._is(FETCHING))
    @rule()
    def finish_fetch(self) -> None:
        running: Any = self.weights.fetch
        assert self.weights.finish_fetch() is running.slot
        assert running.waits
        self.fetches += 1

    @precondition(lambda self: self._is(FETCHING))
    @rule(given_up=st.booleans())
    def a_fetch_fails(self, given_up: bool) -> None:
        error = (SwapTimeoutError if given_up else SwapIOError)("read", path="/swap")
        running: Any = self.weights.fetch
        running.fate = error
        with pytest.raises(SwapIOError):
            self.weights.finish_fetch()
        assert self.weights.residency is (FETCHING if given_up else RELEASED)
        self.fetches += not given_up
        running.fate = None

    @precondition(lambda self: self._is(RESIDENT))
    @rule(writes_slot=st.booleans())
    def begin_update(self, writes_slot: bool) -> None:
        self.weights.begin_update(writes_slot=writes_slot)

    @precondition(lambda self: self._is(UPDATING))
    @rule()
    def updated(self) -> None:
        self.weights.updated()

    @precondition(lambda self: self._is(RESIDENT, UPDATING, STALE))
    @rule()
    def leave(self) -> None:
        slot: Any = self.weights.slot
        assert self.weights.release() is slot
        assert slot.expected == 0
        assert not slot.freed

    @rule()
    def bump(self) -> None:
        self.weights.bump()
        self.version += 1

    @rule()
    def rest(self) -> None:
        slot: Any = self.weights.slot
        if slot is not None:
            slot.rests = False
        self.weights.rest()
        if slot is not None:
            assert slot.rests == (self._is(RESIDENT) and not self.weights.in_use and not self.weights.referred_to())

    @invariant()
    def there_is_a_slot_and_a_fetch_where_the_note_has_one(self) -> None:
        assert (self.weights.slot is None) == self._is(RELEASED, FETCHING)
        assert (self.weights.fetch is None) == (not self._is(FETCHING))

    @invariant()
    def parameters_are_placeholders_unless_the_unit_is_resident(self) -> None:
        assert self.views.shown is (self.weights.slot if self._is(RESIDENT) else None)

    @invariant()
    def the_version_counts_the_updates(self) -> None:
        assert self.weights.version == self.version

    def teardown(self) -> None:
        if self._is(FETCHING):
            self.finish_fetch()
        assert [span.kind for span in self.timeline.stop().spans] == ["fetch"] * self.fetches


TestWeights = WeightsMachine.TestCase
TestWeights.settings = few


def test_a_forward_that_ends_more_often_than_it_began_is_none() -> None:
    weights = made()
    weights.unuse()
    weights.use()
    assert weights.in_use
    weights.unuse()
    assert not weights.in_use
    weights.hold(True)
    weights.use()
    weights.forget_uses()
    assert not weights.in_use


def test_who_refers_to_a_slot_keeps_it() -> None:
    views: Any = Views()
    weights = UnitWeights(unit_of(0), views, Timeline())
    assert not weights.referred_to()
    weights.begin_fetch(fetch())
    slot: Any = weights.finish_fetch()
    assert not weights.referred_to()
    slot.viewed = True
    assert weights.referred_to()
    slot.viewed = False
    views.saved = True
    assert weights.referred_to()


def test_an_update_finds_the_weights_where_they_are_used_unless_they_are_stale() -> None:
    lease = PinnedArena(4096).lease(4096, "a slot")
    slots: list[Any] = [HostSlot(lease.tensor(), lease), Slot(lease.tensor())]
    for slot, expected in zip(slots, (lease, None), strict=True):
        weights = made()
        assert weights.host_memory() is None
        running: Any = Fetch(slot)
        weights.begin_fetch(running)
        weights.finish_fetch()
        assert weights.host_memory() is expected
        weights.begin_update(writes_slot=False)
        assert weights.host_memory() is None
