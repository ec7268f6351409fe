"""Whatever happens in whatever order: who may not go stays, and the room knows who is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from infinity.errors import PlanError, SwapIOError
from infinity.sizes import PAGE_BYTES
from infinity.tiers.destination import StateDestination
from infinity.units.unit import OffloadedUnit
from infinity.units.update import UnitUpdate, UpdateState
from infinity.units.weights import Residency
from tests.tiers.fakes import UpdateFuture, few
from tests.units.fakes import (
    Slot,
    under_way,
    wanted,
)
from tests.units.rooms import BUDGET, INDEX, SIZES, STAYS, alone


class RoomMachine(RuleBasedStateMachine):
    @initialize(in_place=st.booleans())
    def offload(self, in_place: bool) -> None:
        self.fetcher, self.pool = alone(in_place=in_place)
        self.in_place = in_place
        self.units = self.fetcher.units
        self.uses = dict.fromkeys(range(len(SIZES)), 0)
        self.held: set[int] = set()
        self.views: list[Slot] = []
        room: Any = self.fetcher
        choose = room._victim
        room._victim = lambda distance: self._as_policy_says(distance, choose(distance))
        let_go = room._let_held_go
        room._let_held_go = lambda: self._let_held_go(let_go)

    # -- who goes -----------------------------------------------------------------------------------------------------

    def _stays(self, unit: OffloadedUnit) -> bool:
        """Whether nothing may send a unit away."""
        slot: Any = unit.weights.slot
        return (
            unit.weights.uses > 0  # in a forward, or while others move
            or unit.index in self.held
            or unit.index == STAYS
            or (slot is not None and slot.viewed)
            or unit.reads_slot()
        )

    def _as_policy_says(self, distance: int | None, chosen: OffloadedUnit | None) -> OffloadedUnit | None:
        """Search: of those that may go, the first with the farthest next use."""
        trace = self.fetcher._trace
        best = None
        for unit in self.units:
            if unit.weights.residency is Residency.RELEASED or self._stays(unit):
                continue
            if distance is not None:
                ready = unit.decided is None or unit.decided.reached("weights")
                if unit.weights.residency is Residency.FETCHING or not ready or trace.next_use(unit.index) <= distance:
                    continue
                if unit.index == trace.last:
                    continue
            if best is None or trace.next_use(unit.index) > trace.next_use(best.index):
                best = unit
        assert chosen is best
        return chosen

    def _let_held_go(self, let_go: Callable[[], bool]) -> bool:
        """Only where the others cannot make room."""
        assert self._needed_pages(self.wanted) + SIZES[self.wanted.index] > BUDGET
        found, self.held = bool(self.held), set()
        assert let_go() == found
        return found

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        """Who may not go has its slot afterwards; who is held may have been let go."""
        held = self.held
        before = [(unit, unit.weights.slot) for unit in self.units if self._stays(unit) and not unit.reads_slot()]
        before = [(unit, slot) for unit, slot in before if unit.weights.residency is Residency.RESIDENT]
        yield
        for unit, slot in before:
            if unit.index in held - self.held and not self._stays(unit):
                continue
            assert unit.weights.residency is Residency.RESIDENT
            viewed: Any = slot
            assert unit.weights.slot is slot or not viewed.viewed  # it had to move

    def _needed_pages(self, but: OffloadedUnit) -> int:
        """Return the number of pages that evictions cannot free."""
        staying = [unit for unit in self.units if unit is not but and self._stays(unit)]
        present = [unit for unit in staying if unit.weights.residency is not Residency.RELEASED]
        given_up: list[Any] = [slot for slot in self.fetcher._viewed if slot.outstanding()]
        pages_of = sum(SIZES[unit.index] for unit in present)
        return pages_of + sum(slot.tensor.numel() // PAGE_BYTES for slot in given_up)

    # -- what may happen ----------------------------------------------------------------------------------------------

    @rule(index=INDEX)
    def acquire(self, index: int) -> None:
        unit = self.units[index]
        unit.weights.use()
        self.uses[index] += 1
        if not self._bring(unit):
            unit.weights.unuse()
            self.uses[index] -= 1

    def _bring(self, unit: OffloadedUnit) -> bool:
        waits = not any(each.reads_slot() for each in self.units)
        self.wanted = unit
        try:
            with self._keeping():
                self.fetcher.fetch(unit)
        except SwapIOError:
            return False
        except PlanError:
            assert waits or not any(each.reads_slot() for each in self.units)
            assert self._needed_pages(unit) + SIZES[unit.index] > BUDGET
            return False
        assert unit.weights.residency is Residency.RESIDENT
        assert unit.views.open
        parameter = next(iter(unit.parameters.values()))
        assert (parameter == 1.0).all()
        return True

    @precondition(lambda self: any(self.uses.values()))
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        index = data.draw(st.sampled_from([index for index, uses in self.uses.items() if uses]))
        self.units[index].weights.unuse()
        self.uses[index] -= 1

    @rule(indices=st.sets(INDEX, max_size=2))
    def hold(self, indices: set[int]) -> None:
        self.fetcher.hold(sorted(indices))
        self.held = set(indices)
        for index in sorted(indices):
            if not self._bring(self.units[index]):
                self.forget_uses()
                return

    @rule()
    def forget_uses(self) -> None:
        self.fetcher.forget_uses()
        self.held, self.uses = set(), dict.fromkeys(self.uses, 0)

    @rule(training=st.booleans())
    def begin_pass(self, training: bool) -> None:
        self.fetcher.begin_pass(training=training)

    @rule()
    def end_iteration(self) -> None:
        self.fetcher.end_iteration()

    @rule()
    def prefetch(self) -> None:
        with suppress(SwapIOError), self._keeping():
            self.fetcher.prefetch()

    @rule()
    def finish_fetches(self) -> None:
        with suppress(SwapIOError):
            self.fetcher.finish_fetches()
            assert not self.fetcher._fetching

    @precondition(lambda self: self.fetcher._fetching)
    @rule(data=st.data())
    def a_fetch_will_fail(self, data: Any) -> None:
        unit = data.draw(st.sampled_from(sorted(self.fetcher._fetching)))
        fetch: Any = self.units[unit].weights.fetch
        fetch.fate = SwapIOError("read", path="/swap")

    @rule(index=INDEX)
    def somebody_takes_views(self, index: int) -> None:
        slot: Any = self.units[index].weights.slot
        if slot is not None and self.units[index].weights.residency is Residency.RESIDENT:
            slot.viewed = True
            self.views.append(slot)

    @rule()
    def nobody_holds_views(self) -> None:
        for slot in self.views:
            slot.viewed = False
        self.views.clear()

    @rule(index=INDEX, speculative=st.booleans())
    def an_update_begins(self, index: int, speculative: bool) -> None:
        unit = self.units[index]
        if unit.update is not None:
            return
        update = UnitUpdate(
            unit.name,
            wanted(unit.full),
            {0: {"weight": StateDestination(unit.homes.weights.groups[0], copy_index=1)}},
            committed=False,
            speculated=speculative,
            uses_slot=unit.weights.residency is Residency.RESIDENT,
        )
        update.transfers[0] = under_way(UpdateFuture())
        unit.begin_update(update)
        if not speculative and not self.uses[index] and index not in self.held:
            self.fetcher.update_decided(unit)

    @rule(index=INDEX)
    def a_step_decides(self, index: int) -> None:
        unit = self.units[index]
        if unit.speculative is not None and not self.uses[index] and index not in self.held:
            unit.speculative.to(UpdateState.DECIDED)
            self.fetcher.update_decided(unit)

    @rule(index=INDEX)
    def a_milestone_is_reached(self, index: int) -> None:
        update = self.units[index].update
        if update is not None and not update.reached("written"):
            future: Any = update.transfers[0].future
            future.advance()

    @rule(index=INDEX)
    def an_update_ends(self, index: int) -> None:
        unit = self.units[index]
        if unit.decided is not None:
            unit.finish_update()
        elif unit.update is not None:
            unit.update.wait("written")
            unit.undo_update()

    # -- what stays ---------------------------------------------------------------------------------------------------

    @invariant()
    def the_room_knows_who_is_there(self) -> None:
        residency = {unit.index: unit.weights.residency for unit in self.units}
        assert set(self.fetcher._present) == {
            index for index, each in residency.items() if each is not Residency.RELEASED
        }
        assert set(self.fetcher._fetching) == {index for index, each in residency.items() if each is Residency.FETCHING}
        assert {unit.index for unit in self.fetcher._held} >= self.held
        assert self.held == {unit.index for unit in self.units if unit.weights.held}

    @invariant()
    def every_slot_belongs_to_a_unit_or_to_whoever_views_it(self) -> None:
        slots = [unit.weights.slot for unit in self.units if unit.weights.slot is not None]
        fetching: list[Any] = [unit.weights.fetch for unit in self.units if unit.weights.fetch is not None]
        known = [*slots, *self.fetcher._viewed, *(fetch.slot for fetch in fetching)]
        assert sorted(map(id, known)) == sorted(self.pool.slots)
        found = {slot.tensor.untyped_storage()._cdata: unit for unit in self.units if (slot := unit.weights.slot)}
        assert self.fetcher._at == found

    @invariant()
    def who_is_away_may_not_be_read(self) -> None:
        for unit in self.units:
            assert unit.weights.residency is Residency.RESIDENT or not unit.views.open


TestRoom = RoomMachine.TestCase
TestRoom.settings = few
