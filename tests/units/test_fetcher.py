"""Units on the device: which of them make room, and what becomes of those that are in use meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import infinity
from infinity.coordinator import registry
from infinity.coordinator.coordinator import Coordinator
from infinity.tiers.destination import StateDestination
from infinity.units.fetcher import Fetcher
from infinity.units.unit import OffloadedUnit
from infinity.units.update import UnitUpdate, UpdateState
from infinity.units.weights import Residency
from tests.tiers.fakes import UpdateFuture, few
from tests.units.fakes import (
    under_way,
    wanted,
)
from tests.units.rooms import STAYS, alone, brought, residencies

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
    coordinator.begin_use(0)
    coordinator.begin_use(1)
    coordinator.end_use(0)
    return coordinator, values


def weight(coordinator: Coordinator, index: int) -> torch.Tensor:
    return next(iter(coordinator.units[index].parameters.values()))


def test_a_unit_in_use_moves_where_the_room_is_not_in_one_piece(three: tuple[Coordinator, list[torch.Tensor]]) -> None:
    coordinator, values = three
    coordinator.begin_use(2)
    for index in (1, 2):
        assert torch.equal(weight(coordinator, index), values[index])
    assert coordinator.units[0].weights.slot is None
    coordinator.end_use(1)
    coordinator.begin_use(0)
    assert torch.equal(weight(coordinator, 0), values[0])


def test_a_unit_that_somebody_holds_views_of_stays_where_it_is(three: tuple[Coordinator, list[torch.Tensor]]) -> None:
    coordinator, values = three
    view = weight(coordinator, 1).detach().view(-1)
    with pytest.raises(infinity.PlanError, match="no room for unit '2'.* in use .1. take the 40.00 KiB"):
        coordinator.begin_use(2)
    assert torch.equal(view, values[1].view(-1))
    assert torch.equal(weight(coordinator, 1), values[1])
    del view
    coordinator.begin_use(2)
    for index in (1, 2):
        assert torch.equal(weight(coordinator, index), values[index])


def test_units_that_were_to_move_are_back_where_that_does_not_help(
    three: tuple[Coordinator, list[torch.Tensor]],
) -> None:
    coordinator, values = three
    coordinator.begin_use(0)
    with pytest.raises(infinity.PlanError, match=r"memory.device has no room for unit '2'.* in use \(0, 1\) take"):
        coordinator.begin_use(2)
    for index in (0, 1):
        assert torch.equal(weight(coordinator, index), values[index])
    coordinator.end_use(0)
    coordinator.begin_use(2)
    assert torch.equal(weight(coordinator, 2), values[2])


# -- alone, over slots and updates that are imitated ------------------------------------------------------------------


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
    assert residencies(room) == ["fetching", "released", "released", "fetching"]
    assert pool.fetches[0].slot is room.units[STAYS].weights.fetch.slot, "the first, so that it splits no room"
    brought(room, STAYS)
    assert residencies(room) == ["fetching", "released", "released", "resident"]
    assert [fetch.waits for fetch in pool.fetches] == [1, 0]


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
    room, _ = alone(budget=3, sizes=(1, 1, 1, 1))  # two, and the one that stays
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


def test_a_unit_whose_backward_was_announced_makes_room_when_nothing_else_does() -> None:
    room, _ = alone(budget=3, sizes=(2, 1, 2), in_place=False)
    room.units[1].weights.use()
    brought(room, 1)
    room.hold([0])
    brought(room, 0, 2)
    assert residencies(room) == ["released", "resident", "resident"]
    assert room.hold([2]) == [0]


def test_there_is_an_error_with_the_fix_when_nothing_helps() -> None:
    room, _ = alone(budget=3, sizes=(2, 2), in_place=False)
    room.units[0].weights.use()
    brought(room, 0)
    with pytest.raises(infinity.PlanError, match=r"memory.device has no room for unit '1' .* memory.device to 16384 B"):
        brought(room, 1)
    room.units[0].weights.unuse()
    brought(room, 1)
    assert residencies(room) == ["released", "resident"]


def test_who_needs_room_waits_for_updates_that_read_slots() -> None:
    room, _ = alone(budget=2, sizes=(2, 2))
    brought(room, 0)
    unit, future = room.units[0], UpdateFuture()
    update = UnitUpdate("0", wanted(unit.full), {}, committed=False, speculated=True, uses_slot=True)
    update.transfers[0] = under_way(future)
    unit.begin_update(update)
    brought(room, 1)
    assert future.computed.done()
    assert residencies(room) == ["released", "resident"]


def decided(room: Fetcher, index: int = 0) -> OffloadedUnit:
    """Return a unit whose update was decided."""
    unit = room.units[index]
    update = UnitUpdate(
        unit.name, wanted(unit.full), {0: {"weight": StateDestination(unit.homes.weights.groups[0])}}, committed=False
    )
    update.transfers[0] = under_way(UpdateFuture())
    unit.begin_update(update)
    room.update_decided(unit)
    return unit


def test_a_decided_update_bumps_the_version_of_the_weights() -> None:
    room, _ = alone(budget=4, sizes=(2, 2), in_place=False)
    brought(room, 0)
    assert decided(room).weights.version == 1


def test_a_unit_that_was_not_used_since_its_update_gives_up_its_slot_if_the_next_update_moves_its_weights() -> None:
    room, _ = alone(budget=4, sizes=(2, 2))
    brought(room, 0)
    unit = decided(room)
    unit.finish_update()
    assert unit.weights.residency is Residency.UPDATING
    update = UnitUpdate("0", wanted(unit.full), {}, committed=False, speculated=True)
    update.moves_weights = True
    update.transfers[0] = under_way(UpdateFuture())
    unit.begin_update(update)
    update.to(UpdateState.DECIDED)
    room.update_decided(unit)
    assert unit.weights.residency is Residency.RELEASED


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
