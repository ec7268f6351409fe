"""Who makes room, what is fetched next and when updates may begin, compared with the obvious way to say it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.plan.placement import Overlap
from infinity.plan.policy import (
    long_from_top,
    may_keep_slot,
    may_speculate,
    to_prefetch,
    unusual_from_top,
    update_order,
    victims,
    worth_speculating,
)
from infinity.plan.visit_trace import VisitTrace
from tests.tiers.fakes import few

COUNT = 6
UNITS = st.integers(0, COUNT - 1)
ORDER = st.lists(UNITS, min_size=1, max_size=12)


def after(order: list[int], visits: list[int]) -> VisitTrace:
    """Return a trace that expects an order, in an iteration that has made some visits."""
    trace = VisitTrace(order)
    for unit in visits:
        trace.visit(unit)
    return trace


@few
@given(st.lists(UNITS, unique=True), ORDER, st.lists(UNITS, max_size=6), st.none() | st.integers(0, 9))
def test_the_unit_with_the_farthest_next_use_goes_first(
    present: list[int], order: list[int], visits: list[int], distance: int | None
) -> None:
    trace = after(order, visits)
    remaining, expected = list(present), []
    if distance is not None:
        remaining = [unit for unit in present if trace.next_use(unit) > distance and unit not in visits[-1:]]
    while remaining:
        farthest = max(map(trace.next_use, remaining))
        expected.append(next(unit for unit in remaining if trace.next_use(unit) == farthest))
        remaining.remove(expected[-1])
    assert list(victims(present, trace, distance)) == expected


def test_for_a_unit_that_is_used_now_each_may_go_and_for_a_prefetch_those_that_are_used_later() -> None:
    trace = after([0, 1, 2, 3], [0])
    assert list(victims([1, 2, 3, 0], trace, None)) == [0, 3, 2, 1]
    assert list(victims([1, 2, 3, 0], trace, 1)) == [3]


def test_a_unit_that_was_released_meanwhile_is_seen() -> None:
    released = {0}
    coming = to_prefetch(VisitTrace([0, 1]), lambda unit: 1, 2, [], released.__contains__)
    assert next(coming) == (0, 0)
    released.add(1)
    assert next(coming) == (1, 1)


SIZES = st.lists(st.integers(0, 3), min_size=COUNT, max_size=COUNT)


@few
@given(ORDER, st.lists(UNITS, max_size=6), SIZES, st.integers(0, 9), st.sets(UNITS), st.sets(UNITS))
def test_released_units_are_fetched_as_long_as_all_that_come_before_fit_with_those_that_are_there(
    order: list[int], visits: list[int], sizes: list[int], room: int, there: set[int], released: set[int]
) -> None:
    trace, expected = after(order, visits), []
    upcoming = list(trace.upcoming())
    for distance, unit in enumerate(upcoming):
        if sum(sizes[each] for each in there | set(upcoming[: distance + 1])) > room:
            break
        if unit in released:
            expected.append((distance, unit))
    assert list(to_prefetch(trace, sizes.__getitem__, room, there, released.__contains__)) == expected


@few
@given(st.lists(UNITS), st.sets(UNITS))
def test_updates_go_in_the_order_of_the_next_forward(order: list[int], staying: set[int]) -> None:
    expected = [index for index in range(COUNT) if index in staying]
    expected += [index for index in dict.fromkeys(order) if index not in staying]
    expected += [index for index in range(COUNT) if index not in expected]
    made = update_order(COUNT, staying.__contains__, VisitTrace(order))
    first = [index for index in made if index in staying]
    assert made[: len(first)] == first
    assert [index for index in made if index not in staying] == [each for each in expected if each not in staying]
    assert sorted(made) == list(range(COUNT))


def test_long_slots_of_host_memory_come_from_the_top() -> None:
    from_top = long_from_top(100)
    assert [nbytes for nbytes in (1, 25, 26, 100) if from_top(nbytes)] == [26, 100]


def test_on_a_device_slots_of_the_size_that_most_have_come_from_the_bottom() -> None:
    from_top = unusual_from_top([1, 3, 3, 2, 2])
    assert [nbytes for nbytes in (1, 2, 3) if from_top(nbytes)] == [1, 2]
    assert unusual_from_top([])(1)


@pytest.mark.parametrize(
    ("overlap", "worth"),
    [("auto", [0.0, 0.3]), ("during_backward", [0.0, 0.3, 0.31, 1.0]), ("before_forward", []), ("off", [])],
)
def test_updates_speculate_while_few_steps_decide_otherwise(overlap: Overlap, worth: list[float]) -> None:
    assert [wrong for wrong in (0.0, 0.3, 0.31, 1.0) if worth_speculating(overlap, wrong)] == worth


@pytest.mark.parametrize("trained_whole", [False, True])
@pytest.mark.parametrize("weights_in_ram", [False, True])
@pytest.mark.parametrize("gradients_in_ram", [False, True])
def test_an_update_may_speculate_unless_it_waits_for_gradients_or_leaves_frozen_weights_behind(
    trained_whole: bool, weights_in_ram: bool, gradients_in_ram: bool
) -> None:
    leaves_behind = weights_in_ram and not trained_whole
    assert (gradients_in_ram and not leaves_behind) == may_speculate(
        trained_whole=trained_whole, weights_in_ram=weights_in_ram, gradients_in_ram=gradients_in_ram
    )


def test_updates_keep_a_quarter_of_the_slots_at_most() -> None:
    assert may_keep_slot(1, 1, 8)
    assert not may_keep_slot(1, 2, 8)
