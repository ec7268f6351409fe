"""Each of several ranks fetches and evicts as the visits alone imply. A single process follows its memory and its
updates."""

from __future__ import annotations

from typing import Any

import pytest

import infinity
from infinity.sharded.multi_rank_fetch_rules import MultiRankFetchRules
from infinity.sizes import PAGE_BYTES
from infinity.tiers.destination import StateDestination
from infinity.units.fetch_rules import FetchRules, SingleProcessFetchRules
from infinity.units.fetcher import Fetcher
from infinity.units.unit import OffloadedUnit
from infinity.units.update import UnitUpdate
from tests.tiers.fakes import UpdateFuture
from tests.units.fakes import under_way, wanted
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
