"""Units on the device: which of them make room, and what becomes of those that are in use meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

import infinity
from infinity.base.timeline import Timeline
from infinity.coordinator import registry
from infinity.coordinator.coordinator import Coordinator
from infinity.errors import PlanError, SwapIOError
from infinity.sizes import PAGE_BYTES
from infinity.tiers.home import WeightsHome
from infinity.tiers.slots import Written
from infinity.units import room as room_module
from infinity.units.room import Room
from infinity.units.unit import OffloadedUnit
from infinity.units.update import UnitUpdate, UpdateState, WeightsPlace
from infinity.units.weights import Residency
from tests.tiers.fakes import UpdateFuture, few, pages
from tests.units.fakes import (
    Fetch,
    Slot,
    homes_of,
    no_shadows,
    offloaded,
    resources,
    slot_of,
    under_way,
    unit_of,
    wanted,
)

PAGES = (3, 3, 7)
"""Units of these many pages; two of them fit beside each other."""


@pytest.fixture
def three(offload: Any) -> tuple[Coordinator, list[torch.Tensor]]:
    """The first two are where no room in one piece is left for the third."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Linear(32, 32 * count, bias=False) for count in PAGES)
    values = [block.weight.detach().clone() for block in blocks]
    coordinator = registry.coordinator_of(offload(blocks, memory={"device": "40KiB", "host": "64MiB"}))
    assert coordinator.resources.plan.budgets.slot_bytes == 10 * 4096
    coordinator.acquire(0)
    coordinator.acquire(1)
    coordinator.release(0)
    return coordinator, values


def weight(coordinator: Coordinator, index: int) -> torch.Tensor:
    return next(iter(coordinator.units[index].parameters.values()))


def test_a_unit_in_use_moves_where_the_room_is_not_in_one_piece(three: tuple[Coordinator, list[torch.Tensor]]) -> None:
    coordinator, values = three
    coordinator.acquire(2)
    for index in (1, 2):
        assert torch.equal(weight(coordinator, index), values[index])
    assert coordinator.units[0].weights.slot is None
    coordinator.release(1)
    coordinator.acquire(0)
    assert torch.equal(weight(coordinator, 0), values[0])


def test_a_unit_that_somebody_holds_views_of_stays_where_it_is(three: tuple[Coordinator, list[torch.Tensor]]) -> None:
    coordinator, values = three
    view = weight(coordinator, 1).detach().view(-1)
    with pytest.raises(infinity.PlanError, match="no device memory for unit '2'.* in use .1. take the 40.00 KiB"):
        coordinator.acquire(2)
    assert torch.equal(view, values[1].view(-1))
    assert torch.equal(weight(coordinator, 1), values[1])
    del view
    coordinator.acquire(2)
    for index in (1, 2):
        assert torch.equal(weight(coordinator, index), values[index])


def test_units_that_were_to_move_are_back_where_that_does_not_help(
    three: tuple[Coordinator, list[torch.Tensor]],
) -> None:
    coordinator, values = three
    coordinator.acquire(0)
    with pytest.raises(infinity.PlanError, match=r"no device memory for unit '2'.* in use \(0, 1\) take"):
        coordinator.acquire(2)
    for index in (0, 1):
        assert torch.equal(weight(coordinator, index), values[index])
    coordinator.release(0)
    coordinator.acquire(2)
    assert torch.equal(weight(coordinator, 2), values[2])


# -- alone, over slots and updates that are imitated ------------------------------------------------------------------


class Pool:
    """Slots of so many pages together, as a SlotPool."""

    def __init__(self, budget: int, *, at_home: bool = True) -> None:
        self.budget = self.free_pages = budget
        self.at_home = at_home
        self.slots: dict[int, Slot] = {}
        self.fetches: list[Fetch] = []

    def start(self, home: WeightsHome, after: Written) -> Fetch | None:
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
    """As Updates, those that the units of a test have."""

    def __init__(self, units: Sequence[OffloadedUnit]) -> None:
        self._units = units

    def wait_for_readers(self) -> None:
        for unit in self._units:
            if unit.update is not None and unit.reads_slot():
                unit.update.wait("computed")


SIZES = (2, 1, 3, 1, 2)
BUDGET = 6
STAYS = 3
"""The unit that stays."""
INDEX = st.integers(0, len(SIZES) - 1)


def alone(
    budget: int = BUDGET, sizes: Sequence[int] = SIZES, *, in_place: bool = True, in_ram: Sequence[int] = ()
) -> tuple[Room, Pool]:
    """A room of units that are in the store, but for those that rest in RAM."""
    below, pool = resources(slot_pages=budget, in_place=in_place), Pool(budget, at_home=in_place)
    shadows = no_shadows(below.pipeline)
    made = [unit_of(index, (count,), stays=index == STAYS) for index, count in enumerate(sizes)]
    space = pages(sum(sizes))
    units = [offloaded(unit, homes_of(unit, space if unit.index in in_ram else None), shadows) for unit in made]
    updates: Any = NoUpdates(units)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room_module, "open_slots", lambda resources: pool)
        return Room(units, below, updates, Timeline()), pool


class RoomMachine(RuleBasedStateMachine):
    @initialize(in_place=st.booleans())
    def offload(self, in_place: bool) -> None:
        self.room, self.pool = alone(in_place=in_place)
        self.in_place = in_place
        self.units = self.room.units
        self.uses = dict.fromkeys(range(len(SIZES)), 0)
        self.held: set[int] = set()
        self.views: list[Slot] = []
        room: Any = self.room
        choose = room._victim
        room._victim = lambda distance: self._as_policy_says(distance, choose(distance))

    # -- who goes -----------------------------------------------------------------------------------------------------

    def _stays(self, unit: OffloadedUnit) -> bool:
        """Whether nothing may send a unit away."""
        slot: Any = unit.weights.slot
        return (
            self.uses[unit.index] > 0
            or unit.index in self.held
            or unit.index == STAYS
            or (slot is not None and slot.viewed)
            or unit.reads_slot()
        )

    def _as_policy_says(self, distance: int | None, chosen: OffloadedUnit | None) -> OffloadedUnit | None:
        """Search: of those that may go, the first with the farthest next use."""
        trace = self.room._trace
        best = None
        for unit in self.units:
            if unit.weights.residency is Residency.RELEASED or self._stays(unit):
                continue
            if distance is not None:
                ready = unit.decided is None or unit.decided.reached("weights")
                if unit.weights.residency is Residency.FETCHING or not ready or trace.next_use(unit.index) <= distance:
                    continue
            if best is None or trace.next_use(unit.index) > trace.next_use(best.index):
                best = unit
        assert chosen is best
        return chosen

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        """Who may not go has its slot afterwards."""
        before = [(unit, unit.weights.slot) for unit in self.units if self._stays(unit) and not unit.reads_slot()]
        before = [(unit, slot) for unit, slot in before if unit.weights.residency is Residency.RESIDENT]
        yield
        for unit, slot in before:
            assert unit.weights.residency is Residency.RESIDENT
            viewed: Any = slot
            assert unit.weights.slot is slot or not viewed.viewed  # it had to move

    def _needed_pages(self, but: OffloadedUnit) -> int:
        """What cannot be had by sending others away."""
        staying = [unit for unit in self.units if unit is not but and self._stays(unit)]
        present = [unit for unit in staying if unit.weights.residency is not Residency.RELEASED]
        given_up: list[Any] = [slot for slot in self.room._viewed if slot.outstanding()]
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
        try:
            with self._keeping():
                self.room.bring(unit)
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
        self.room.hold(sorted(indices))
        self.held = set(indices)
        for index in sorted(indices):
            if not self._bring(self.units[index]):
                self.forget_uses()
                return

    @rule()
    def forget_uses(self) -> None:
        self.room.forget_uses()
        self.held, self.uses = set(), dict.fromkeys(self.uses, 0)

    @rule(training=st.booleans())
    def begin_pass(self, training: bool) -> None:
        self.room.begin_pass(training=training)

    @rule()
    def end_iteration(self) -> None:
        self.room.end_iteration()

    @rule()
    def prefetch(self) -> None:
        with suppress(SwapIOError), self._keeping():
            self.room.prefetch()

    @rule()
    def finish_fetches(self) -> None:
        with suppress(SwapIOError):
            self.room.finish_fetches()
            assert not self.room._fetching

    @precondition(lambda self: self.room._fetching)
    @rule(data=st.data())
    def a_fetch_will_fail(self, data: Any) -> None:
        unit = data.draw(st.sampled_from(sorted(self.room._fetching)))
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
        slot: Any = unit.weights.slot if unit.weights.residency is Residency.RESIDENT else None
        update = UnitUpdate(unit.name, wanted(unit.unit), WeightsPlace(slot, speculative=speculative), committed=False)
        update.transfers[0] = under_way(UpdateFuture(), [(unit.homes.weights.groups[0], 1)])
        unit.begin_update(update)
        if not speculative and not self.uses[index] and index not in self.held:
            self.room.update_decided(unit)

    @rule(index=INDEX)
    def a_step_decides(self, index: int) -> None:
        unit = self.units[index]
        if unit.speculative is not None and not self.uses[index] and index not in self.held:
            unit.speculative.to(UpdateState.DECIDED)
            self.room.update_decided(unit)

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
        assert set(self.room._present) == {index for index, each in residency.items() if each is not Residency.RELEASED}
        assert set(self.room._fetching) == {index for index, each in residency.items() if each is Residency.FETCHING}
        assert {unit.index for unit in self.room._held} == self.held
        assert self.held == {unit.index for unit in self.units if unit.weights.held}

    @invariant()
    def every_slot_belongs_to_a_unit_or_to_whoever_views_it(self) -> None:
        slots = [unit.weights.slot for unit in self.units if unit.weights.slot is not None]
        fetching: list[Any] = [unit.weights.fetch for unit in self.units if unit.weights.fetch is not None]
        known = [*slots, *self.room._viewed, *(fetch.slot for fetch in fetching)]
        assert sorted(map(id, known)) == sorted(self.pool.slots)
        found = {slot.tensor.untyped_storage()._cdata: unit for unit in self.units if (slot := unit.weights.slot)}
        assert self.room._at == found

    @invariant()
    def who_is_away_may_not_be_read(self) -> None:
        for unit in self.units:
            assert unit.weights.residency is Residency.RESIDENT or not unit.views.open


TestRoom = RoomMachine.TestCase
TestRoom.settings = few


def brought(room: Room, *indices: int) -> None:
    for index in indices:
        room.bring(room.units[index])


def residencies(room: Room) -> list[str]:
    return [unit.weights.residency.value for unit in room.units]


def test_what_comes_next_is_fetched_ahead_and_what_comes_last_makes_room() -> None:
    room, _ = alone(budget=4, sizes=(1, 1, 1, 1, 1))
    room.begin_pass(training=False)  # in the order of the indices, but for the unit that stays
    room.units[0].weights.use()
    brought(room, STAYS, 0)
    assert residencies(room) == ["resident", "fetching", "fetching", "resident", "released"]
    room.units[0].weights.unuse()
    room.units[1].weights.use()
    brought(room, 1)
    assert residencies(room) == ["released", "resident", "fetching", "resident", "fetching"]


def test_a_prefetch_sends_nobody_away_who_is_needed_before() -> None:
    room, pool = alone(budget=2, sizes=(1, 1, 1))
    room.begin_pass(training=True)  # 0 1 2 2 1 0
    brought(room, 0, 1, 2)
    assert residencies(room) == ["released", "resident", "resident"]
    fetched = len(pool.fetches)
    room.prefetch()
    assert len(pool.fetches) == fetched


def test_a_prefetch_leaves_the_room_of_a_nearer_unit_whose_update_is_not_computed() -> None:
    room, pool = alone(budget=2, sizes=(1, 1, 1), in_place=False, in_ram=(0,))
    decided(room)
    room.prefetch()
    assert residencies(room) == ["released", "fetching", "released"]
    brought(room, 0)
    assert residencies(room) == ["resident", "fetching", "released"]
    assert [fetch.waits for fetch in pool.fetches] == [0, 1]  # for nothing that was to come later


def test_a_prefetch_leaves_the_room_of_a_unit_that_stays_and_has_to_come_again() -> None:
    room, pool = alone(budget=2, sizes=(1, 1, 1, 1))
    room.prefetch()
    assert residencies(room) == ["fetching", "released", "released", "released"]
    brought(room, STAYS)
    assert residencies(room) == ["fetching", "released", "released", "resident"]
    assert [fetch.waits for fetch in pool.fetches] == [0, 1]


def test_a_unit_whose_weights_are_used_where_they_rest_takes_no_room_while_its_update_is_computed() -> None:
    room, _ = alone(budget=2, sizes=(1, 1, 1), in_ram=(0,))
    decided(room)
    room.prefetch()
    assert residencies(room) == ["released", "fetching", "fetching"]


@few
@given(st.lists(st.integers(1, 3), min_size=2, max_size=6), st.sets(st.integers(0, 5)), st.integers(3, 9))
def test_how_far_updates_are_does_not_change_which_units_of_the_store_are_fetched(
    sizes: list[int], in_ram: set[int], budget: int
) -> None:
    fetched = []
    for computed in (False, True):
        room, _ = alone(budget, sizes, in_place=False, in_ram=sorted(in_ram))
        for unit in room.units:
            begun = decided(room, unit.index)
            if computed:
                begun.apply_update()
        room.prefetch()
        fetched.append([index for index in room._fetching if index not in in_ram])
    assert fetched[0] == fetched[1]


@pytest.mark.parametrize("why", ["used", "held", "viewed", "stays"])
def test_who_is_needed_does_not_go_though_its_next_use_is_the_farthest(why: str) -> None:
    room, _ = alone(budget=2, sizes=(1, 1, 1, 1))
    first = STAYS if why == "stays" else 0
    room.begin_pass(training=False)  # in the order of the indices, but for the unit that stays
    brought(room, first)
    unit = room.units[first]
    slot: Any = unit.weights.slot
    if why == "used":
        unit.weights.use()
    elif why == "held":
        room.hold([first])
    slot.viewed = why == "viewed"
    for index in (1, 2):
        brought(room, index)
        assert unit.weights.slot is slot
        assert room.units[index].weights.residency is Residency.RESIDENT


def test_there_is_an_error_with_the_fix_when_nothing_helps() -> None:
    room, _ = alone(budget=3, sizes=(2, 2), in_place=False)
    room.units[0].weights.use()
    brought(room, 0)
    with pytest.raises(infinity.PlanError, match=r"no device memory for unit '1' .* Raise memory.device to 32.00 KiB"):
        brought(room, 1)
    room.units[0].weights.unuse()
    brought(room, 1)
    assert residencies(room) == ["released", "resident"]


def test_who_needs_room_waits_for_updates_that_read_slots() -> None:
    room, _ = alone(budget=2, sizes=(2, 2))
    brought(room, 0)
    unit, future = room.units[0], UpdateFuture()
    slot: Any = unit.weights.slot
    update = UnitUpdate("0", wanted(unit.unit), WeightsPlace(slot, speculative=True), committed=False)
    update.transfers[0] = under_way(future)
    unit.begin_update(update)
    brought(room, 1)
    assert future.computed.done()
    assert residencies(room) == ["released", "resident"]


def decided(room: Room, index: int = 0) -> OffloadedUnit:
    """A unit whose update was decided."""
    unit = room.units[index]
    update = UnitUpdate(unit.name, wanted(unit.unit), WeightsPlace(), committed=False)
    update.transfers[0] = under_way(UpdateFuture())
    unit.begin_update(update)
    room.update_decided(unit)
    return unit


def test_a_decided_update_bumps_the_version_of_the_weights() -> None:
    room, _ = alone(budget=4, sizes=(2, 2), in_place=False)
    brought(room, 0)
    assert decided(room).weights.version == 1


def test_views_of_a_slot_that_was_given_up_keep_its_memory_until_they_are_gone() -> None:
    room, pool = alone(budget=4, sizes=(2, 2), in_place=False)
    brought(room, 0)
    slot = room.units[0].weights.slot
    viewed: Any = slot
    viewed.viewed = True
    assert decided(room).weights.slot is None
    assert id(slot) in pool.slots
    viewed.viewed = False
    room.prefetch()
    brought(room, 0, 1)
    assert viewed.freed
