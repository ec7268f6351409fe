"""One unit and its update: begun, decided, applied, finished or undone in any order that is allowed, and no other.

What counts meanwhile is what counted before; from its end on it is what was written. Memory adds up, gradients stay
where they are, and a decided update that fails is told to the health of the model.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from infinity.errors import SwapIOError
from infinity.io.arena import Lease
from infinity.ranks.world import SingleProcessWorld
from infinity.sizes import PAGE_BYTES
from infinity.tiers.destination import StateDestination
from infinity.tiers.home import StateHome
from infinity.units.health import ModelHealth
from infinity.units.speculative_update_buffers import SpeculativeUpdateBuffers
from infinity.units.unit import OffloadedUnit
from infinity.units.update import UnitUpdate, UpdateState
from tests.tiers.fakes import CANCELED, Failure, UpdateFuture, extent, few, nobody_waits, pages
from tests.units.fakes import Pipeline, homes_of, offloaded, under_way, unit_of, wanted

GROUPS = (1, 2)
PAGES = sum(GROUPS)
OLD, NEW = 1, 2


class UnitMachine(RuleBasedStateMachine):
    @initialize(in_ram=st.booleans(), states_in_ram=st.booleans())
    def offload(self, in_ram: bool, states_in_ram: bool) -> None:
        pipeline: Any = Pipeline()
        self.in_ram = in_ram
        self.resting_bytes = (PAGES * in_ram + 2 * PAGES * states_in_ram) * PAGE_BYTES
        self.space = pages(6 * PAGES)
        self.shadows = SpeculativeUpdateBuffers(self.space, pipeline, self.resting_bytes, [])
        self.health = ModelHealth(SingleProcessWorld())
        space = self.space
        self.homes = homes_of(unit_of(0, GROUPS), space if in_ram else None, space if states_in_ram else None)
        self.states = [home for home in self.homes.all_states() if home.in_memory]
        for home in self.states:
            self._fill(home.lease, OLD)
        self.unit = offloaded(unit_of(0, GROUPS), self.homes, self.shadows, self.health)
        self.is_in_pieces = False
        self.shadow: dict[StateHome, Lease] = {}
        self.gradients: Any = dict(self.unit.gradients.groups)
        self.futures: list[UpdateFuture] = []
        self._fill(self.homes.weights.lease, OLD)

    @staticmethod
    def _fill(lease: Any, value: int) -> None:
        if lease is not None:
            lease.view()[:] = bytes([value]) * lease.nbytes

    @property
    def update(self) -> UnitUpdate:
        assert self.unit.update is not None
        return self.unit.update

    def _state(self) -> UpdateState | None:
        return None if self.unit.update is None else self.unit.update.state

    def _failed(self) -> bool:
        return any(future.done() and future.failure() not in (None, CANCELED) for future in self.futures)

    # -- what may happen ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.unit.update is None)
    @rule(speculative=st.booleans(), in_slot=st.booleans())
    def begin(self, speculative: bool, in_slot: bool) -> None:
        self.shadow = {}
        if speculative and self.resting_bytes:
            shadow = self.shadows.try_shadow(self.homes.weights if self.in_ram else None, self.states)
            assert shadow is not None or self.is_in_pieces
            speculative, self.shadow = shadow is not None, dict(shadow or {})
        for lease in self.shadow.values():
            self._fill(lease, NEW)
        update = UnitUpdate(
            "0",
            wanted(self.unit.full),
            {group: self._destinations(group) for group in range(len(GROUPS))},
            committed=False,
            speculated=speculative,
            uses_slot=in_slot and not self.in_ram,
        )
        self.futures = [UpdateFuture(), UpdateFuture()]
        self.before = [(home, self._copy(home)) for home in self.homes]
        update.transfers = {group: under_way(future) for group, future in enumerate(self.futures)}
        self.unit.begin_update(update)

    def _destinations(self, group: int) -> dict[str, StateDestination]:
        return {
            state: StateDestination(
                home, self.shadow.get(home), copy_index=None if home.in_memory else 1 - home.stored().newest_copy
            )
            for state, home in self.homes.updated(group, None).items()
        }

    @staticmethod
    def _copy(home: StateHome) -> int | None:
        return None if home.in_memory else home.stored().newest_copy

    @precondition(lambda self: self._state() is UpdateState.SPECULATIVE)
    @rule(viewed=st.booleans())
    def decide(self, viewed: bool) -> None:
        self.update.to(UpdateState.DECIDED)
        if viewed and self.in_ram:
            self.update.keep_memory()
            self.is_in_pieces = True  # where weights stay and states do not, free memory is no one piece any more

    @precondition(lambda self: self.unit.update is not None)
    @rule(group=st.integers(0, len(GROUPS) - 1))
    def a_milestone_is_reached(self, group: int) -> None:
        if not self.futures[group].done():
            self.futures[group].advance()

    @precondition(lambda self: self.unit.update is not None)
    @rule(group=st.integers(0, len(GROUPS) - 1), late=st.booleans())
    def a_group_fails(self, group: int, late: bool) -> None:
        if late:
            self.futures[group].fate = Failure()
        else:
            self.futures[group].end(Failure())

    @rule()
    def apply(self) -> None:
        state = self._state()
        if self._told(self.unit.apply_update):
            assert self._state() is (UpdateState.APPLIED if state is UpdateState.DECIDED else state)

    @rule()
    def await_slot(self) -> None:
        if self._told(self.unit.await_slot):
            assert self.unit.at_rest
            assert not self.unit.writes_from_slot()

    @precondition(lambda self: self.unit.decided is not None)
    @rule()
    def finish(self) -> None:
        update = self.update
        if self._told(self.unit.finish_update):
            assert update.state is UpdateState.FINISHED
            assert self.unit.update is None
            for home, before in self.before:
                assert self._copy(home) == (None if before is None else 1 - before)
                assert home.dirty == home.in_memory
                home.mark_read()
            lease = self.homes.weights.lease
            for each in [lease, *(home.lease for home in self.states)]:
                assert each is None or set(bytes(each.view())) == {NEW if self.shadow else OLD}
                self._fill(each, OLD)

    def _told(self, act: Any) -> bool:
        """Whether it went well. It did not where a decided update failed, which the health of the model knows."""
        try:
            act()
        except SwapIOError as error:
            assert self._failed()
            assert self._state() in (UpdateState.DECIDED, UpdateState.APPLIED)
            assert self.health.failure is not None
            assert self.health.failure is error or isinstance(self.health.failure, SwapIOError)
            return False
        return True

    @precondition(lambda self: self.unit.update is None or self.unit.update.is_speculative)
    @rule()
    def undo(self) -> None:
        for future in self.futures:
            future.end(CANCELED)
        self.unit.undo_update()
        assert self.unit.update is None
        assert self.health.failure is None or self._failed()

    # -- what may not -------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.unit.update is not None)
    @rule()
    def a_second_update_is_refused(self) -> None:
        before = self.update
        with pytest.raises(AssertionError, match="has an unfinished update already"):
            self.unit.begin_update(before)
        assert self.unit.update is before

    @precondition(lambda self: self.unit.decided is None)
    @rule()
    def what_is_not_decided_does_not_finish(self) -> None:
        with pytest.raises(AssertionError, match="has no decided update"):
            self.unit.finish_update()

    @precondition(lambda self: self.unit.decided is not None)
    @rule()
    def what_is_decided_is_not_undone(self) -> None:
        with pytest.raises(AssertionError, match="cannot go from"):
            self.unit.undo_update()

    # -- what stays ---------------------------------------------------------------------------------------------------

    @invariant()
    def one_update_is_speculative_or_decided(self) -> None:
        both = (self.unit.speculative, self.unit.decided)
        assert [each for each in both if each is not None] == ([] if self.unit.update is None else [self.unit.update])

    @invariant()
    def the_store_counts_as_before_until_the_end(self) -> None:
        for home, before in self.before if self.unit.update is not None else ():
            assert self._copy(home) == before
            assert not home.dirty

    @invariant()
    def what_is_in_ram_is_the_old_until_it_is_applied(self) -> None:
        lease = self.homes.weights.lease
        applied = self._state() is UpdateState.APPLIED and self.shadow
        for each in [lease, *(home.lease for home in self.states)]:
            assert each is None or set(bytes(each.view())) == {NEW if applied else OLD}
        assert all(home.lease is lease for home in self.homes.weights.groups)

    @invariant()
    def the_bytes_of_the_shadows_add_up(self) -> None:
        update, used = self.unit.update, 0
        if update is not None and self.shadow:
            used = self.resting_bytes
            if update.state is UpdateState.APPLIED:
                used = PAGES * PAGE_BYTES if update.viewed else 0
        assert self.shadows.free_bytes == self.resting_bytes - used
        assert self.space.free_bytes == 6 * PAGES * PAGE_BYTES - self.resting_bytes - used

    @invariant()
    def gradients_stay_where_they_are(self) -> None:
        assert self.unit.gradients.groups == self.gradients

    @invariant()
    def asking_waits_for_nothing(self) -> None:
        with nobody_waits(*self.futures, *(future.computed for future in self.futures)):
            decided = self.unit.decided
            assert self.unit.at_rest == (decided is None or decided.reached("weights"))
            self.unit.reads_slot(), self.unit.writes_from_slot()
            assert (self.unit.weights_under_way() == {}) == (decided is None)


TestUnit = UnitMachine.TestCase
TestUnit.settings = few


def begun(unit: OffloadedUnit, *, speculative: bool = False) -> UpdateFuture:
    future = UpdateFuture()
    destinations = {0: {"weight": StateDestination(unit.homes.weights.groups[0], copy_index=1)}}
    update = UnitUpdate(unit.name, wanted(unit.full), destinations, committed=False, speculated=speculative)
    update.transfers[0] = under_way(future)
    unit.begin_update(update)
    return future


def small(*, in_ram: bool = False) -> tuple[OffloadedUnit, ModelHealth]:
    native: Any = Pipeline()
    space, health = pages(2), ModelHealth(SingleProcessWorld())
    shadows = SpeculativeUpdateBuffers(space, native, 0, [])
    homes = homes_of(unit_of(0), space if in_ram else None, kept=True)
    return offloaded(unit_of(0), homes, shadows, health), health


@pytest.mark.parametrize("act", ["apply_update", "await_slot", "finish_update"])
def test_a_decided_update_that_fails_is_told_to_health(act: str) -> None:
    unit, health = small()
    begun(unit).fate = Failure()
    with pytest.raises(SwapIOError) as caught:
        getattr(unit, act)()
    assert health.failure is caught.value
    assert unit.homes.weights.groups[0].stored().newest_copy == 0


@pytest.mark.parametrize("act", ["apply_update", "finish_update"])
def test_an_update_that_is_finished_while_somebody_waits_for_it_is_finished_once(act: str) -> None:
    """A signal's handler comes during a wait, and may commit."""
    machine = UnitMachine()
    machine.offload(in_ram=True, states_in_ram=True)
    machine.begin(speculative=True, in_slot=False)
    machine.decide(viewed=False)
    unit, update, home = machine.unit, machine.update, machine.homes.weights.lease
    shadow, waits = machine.shadow, []

    def wait(milestone: Any) -> None:
        waits.append(milestone)
        if len(waits) == 1:
            unit.finish_update()

    update.wait = wait  # type: ignore[method-assign]
    getattr(unit, act)()
    assert unit.update is None
    assert update.state is UpdateState.FINISHED
    assert machine.homes.weights.lease is shadow[machine.homes.weights.groups[0]] is not home
    assert [home.lease for home in machine.states] == [shadow[home] for home in machine.states]
    assert machine.shadows.free_bytes == machine.resting_bytes


def test_what_was_computed_is_applied_though_the_store_fails_later() -> None:
    unit, health = small()
    future = begun(unit)
    future.advance()
    future.end(Failure())
    unit.apply_update()
    assert health.failure is None
    with pytest.raises(SwapIOError):
        unit.finish_update()
    assert health.failure is not None


def test_weights_in_ram_are_fetched_once_they_are_computed_and_those_in_the_store_at_once() -> None:
    for in_ram in (False, True):
        unit, _ = small(in_ram=in_ram)
        assert unit.can_be_fetched()
        future = begun(unit)
        with nobody_waits(future):
            assert unit.can_be_fetched() is not in_ram
            future.advance()
            assert unit.can_be_fetched()
        assert (unit.update is not None and unit.update.state is UpdateState.APPLIED) == in_ram


def test_a_fetch_is_told_in_which_memory_new_weights_will_rest() -> None:
    machine = UnitMachine()
    machine.offload(in_ram=True, states_in_ram=True)
    machine.begin(speculative=True, in_slot=False)
    assert machine.unit.weights_under_way() == {}
    machine.decide(viewed=False)
    shadow = machine.shadow[machine.homes.weights.groups[0]]
    assert {new.rests_in for new in machine.unit.weights_under_way().values()} == {shadow}


def test_a_fetch_is_told_where_new_weights_go_and_when_they_are_there() -> None:
    unit, _ = small()
    assert unit.weights_under_way() == {}
    future = begun(unit)
    new = unit.weights_under_way()[0]
    assert (new.copy_index, new.memory) == (1, None)
    assert new.written is not None
    future.advance()
    assert not new.written.done()
    future.advance()
    assert new.written.done()
    unit.finish_update()
    begun(unit, speculative=True)
    assert unit.weights_under_way() == {}


def test_states_that_no_job_wrote_count_as_they_were_when_the_update_is_finished() -> None:
    """Submitting the second group's job failed, and the script went on."""
    unit, _ = small()
    future = begun(unit)
    assert unit.update is not None
    elsewhere = StateHome(None, 0, PAGE_BYTES, extent("0", "weight"))
    unit.update.destinations[1] = {"weight": StateDestination(elsewhere, copy_index=1)}
    future.reach(future)
    unit.finish_update()
    assert unit.homes.weights.groups[0].stored().newest_copy == 1
    assert elsewhere.stored().newest_copy == 0
