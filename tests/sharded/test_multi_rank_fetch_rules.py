"""Each of several ranks fetches and evicts as the visits alone imply. A single process follows its memory and its
updates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import infinity
from infinity.sharded.multi_rank_fetch_rules import MultiRankFetchRules
from infinity.sharded.slot_book import SlotBook
from infinity.sizes import PAGE_BYTES
from infinity.tiers.destination import StateDestination
from infinity.units.fetch_rules import FetchRules, SingleProcessFetchRules
from infinity.units.fetcher import Fetcher
from infinity.units.unit import OffloadedUnit
from infinity.units.update import UnitUpdate
from infinity.units.weights import Residency
from tests.tiers.fakes import UpdateFuture
from tests.units.fakes import under_way, unit_of, wanted
from tests.units.rooms import alone, brought, residencies


def agreed(pages: int) -> FetchRules:
    return MultiRankFetchRules(pages * PAGE_BYTES)


def decided(room: Fetcher) -> OffloadedUnit:
    """Return the first unit, whose update is not computed."""
    unit = room.units[0]
    places = {0: {"weight": StateDestination(unit.homes.weights.groups[0])}}
    update = UnitUpdate(unit.name, wanted(unit.full), places, committed=False)
    update.transfers[0] = under_way(UpdateFuture())
    unit.begin_update(update)
    return unit


@pytest.mark.parametrize(("policy", "left"), [(agreed(2), "released"), (SingleProcessFetchRules(), "resident")])
def test_ranks_fetch_into_the_bytes_that_are_planned_whatever_memory_is_free(policy: FetchRules, left: str) -> None:
    room, _ = alone(budget=4, sizes=(1, 1, 1), policy=policy)
    room.begin_pass(training=False)
    brought(room, 0, 1, 2)
    assert residencies(room)[0] == left


@pytest.mark.parametrize(("policy", "fetches"), [(agreed(2), True), (SingleProcessFetchRules(), False)])
def test_how_far_an_update_is_on_one_rank_does_not_change_what_ranks_fetch(policy: FetchRules, fetches: bool) -> None:
    room, _ = alone(budget=2, sizes=(1, 1), in_place=False, in_ram=(0,), policy=policy)
    decided(room)
    room.prefetch()
    assert (0 in room._fetching) == fetches


@pytest.mark.parametrize(("policy", "left"), [(agreed(2), "released"), (SingleProcessFetchRules(), "resident")])
def test_views_that_a_script_of_one_rank_holds_keep_no_unit_of_ranks(policy: FetchRules, left: str) -> None:
    room, _ = alone(budget=3, sizes=(1, 1, 1), policy=policy)
    room.begin_pass(training=False)
    brought(room, 0)
    slot: Any = room.units[0].weights.slot
    slot.viewed = True
    brought(room, 1, 2)
    assert residencies(room)[0] == left
    assert not slot.freed


@pytest.mark.parametrize(("policy", "left"), [(agreed(2), "released"), (SingleProcessFetchRules(), "resident")])
def test_an_update_of_other_ranks_slices_alone_voids_a_slot(policy: FetchRules, left: str) -> None:
    room, _ = alone(budget=2, sizes=(1, 1), policy=policy)
    brought(room, 0)
    room.update_decided(room.units[0])
    assert residencies(room)[0] == left


@pytest.mark.parametrize(("policy", "moves"), [(agreed(3), False), (SingleProcessFetchRules(), True)])
def test_ranks_move_no_unit_that_is_in_use(policy: FetchRules, moves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    room, _ = alone(budget=3, sizes=(2, 2), in_place=False, policy=policy)
    room.units[0].weights.use()
    brought(room, 0)
    asked: list[OffloadedUnit] = []
    monkeypatch.setattr(room, "_move_others", asked.append)
    with pytest.raises(infinity.PlanError):
        brought(room, 1)
    assert bool(asked) == moves


@pytest.mark.parametrize("policy", [agreed(2), SingleProcessFetchRules()])
def test_a_unit_whose_parameters_autograd_saved_stays(policy: FetchRules, monkeypatch: pytest.MonkeyPatch) -> None:
    room, _ = alone(budget=2, sizes=(1, 1, 1), policy=policy)
    room.begin_pass(training=False)
    brought(room, 0)
    monkeypatch.setattr(room.units[0].views, "saved_by_autograd", lambda: True)
    brought(room, 1, 2)
    assert residencies(room) == ["resident", "released", "resident"]


@pytest.mark.parametrize("policy", [agreed(1), SingleProcessFetchRules()])
def test_a_unit_on_its_way_makes_room_for_what_is_needed_now_only(policy: FetchRules) -> None:
    room, _ = alone(budget=1, sizes=(1, 1), policy=policy)
    room.prefetch()
    assert residencies(room) == ["fetching", "released"]
    assert not policy.may_evict(room.units[0], prefetch=True)
    assert policy.may_evict(room.units[0], prefetch=False)


def test_ranks_with_devices_evict_until_the_free_memory_is_in_one_piece() -> None:
    """Units of 2, 2 and 3 pages leave 1 page of 8. Without the first unit 3 pages are free, in two pieces."""
    sizes = (2, 2, 3, 3)
    units = [unit_of(index, (pages,)) for index, pages in enumerate(sizes)]
    book = SlotBook(8 * PAGE_BYTES, units)
    assert all(book.take(units[index], range(index)) for index in range(3))
    assert not book.take(units[3], {1, 2})
    assert book.take(units[3], {2})


def test_a_slot_that_no_eviction_makes_room_for_takes_memory_all_the_same() -> None:
    def unit(index: int, *, in_use: bool = True) -> Any:
        weights = SimpleNamespace(in_use=in_use, residency=Residency.RESIDENT)
        views = SimpleNamespace(saved_by_autograd=lambda: False)
        return SimpleNamespace(index=index, full=units[index], weights=weights, views=views)

    units = [unit_of(index, (pages,)) for index, pages in enumerate((2, 2, 3, 3))]
    policy = MultiRankFetchRules(8 * PAGE_BYTES, SlotBook(8 * PAGE_BYTES, units))
    for index in range(3):
        assert policy.fits(unit(index), [unit(other) for other in range(index)])
    assert not policy.fits(unit(3), [unit(0), unit(1), unit(2)]), "10 pages"
    assert policy.fits(unit(3), [unit(1), unit(2)]), "3 pages are free, in two pieces, and both units are in use"
    assert not policy.fits(unit(3), [unit(1), unit(2, in_use=False)]), "the unit of 3 pages may go"
