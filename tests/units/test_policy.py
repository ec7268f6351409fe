"""Who makes room, what is fetched next and in which order updates go, compared with the obvious way to say it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infinity.units import policy
from infinity.units.trace import Trace
from tests.tiers.fakes import few

COUNT = 6
UNITS = st.integers(0, COUNT - 1)
USES = st.lists(st.integers(0, 9), min_size=COUNT, max_size=COUNT)


@few
@given(st.lists(UNITS, unique=True), USES, st.integers(-1, 9))
def test_the_unit_with_the_farthest_next_use_goes_first(candidates: list[int], uses: list[int], beyond: int) -> None:
    remaining, expected = [index for index in candidates if uses[index] > beyond], []
    while remaining:
        farthest = max(uses[index] for index in remaining)
        expected.append(next(index for index in remaining if uses[index] == farthest))
        remaining.remove(expected[-1])
    assert list(policy.victims(candidates, uses.__getitem__, beyond)) == expected


def test_without_a_bound_every_candidate_may_go_and_whom_it_names_never() -> None:
    assert list(policy.victims([2, 0, 1], [0, 0, 5].__getitem__)) == [2, 0, 1]
    assert list(policy.victims([0, 1, 2], [3, 4, 5].__getitem__, 4)) == [2]


@few
@given(st.lists(UNITS), st.sets(UNITS))
def test_the_nearest_released_unit_is_fetched_first(upcoming: list[int], released: set[int]) -> None:
    expected = []
    for distance in range(len(upcoming)):
        if upcoming[distance] in released:
            expected.append((distance, upcoming[distance]))
    assert list(policy.to_prefetch(upcoming, released.__contains__)) == expected


def test_a_unit_that_was_released_meanwhile_is_seen() -> None:
    released = {0}
    coming = policy.to_prefetch([0, 1], released.__contains__)
    assert next(coming) == (0, 0)
    released.add(1)
    assert next(coming) == (1, 1)


@few
@given(st.lists(UNITS), st.sets(UNITS))
def test_updates_go_in_the_order_of_the_next_forward(order: list[int], staying: set[int]) -> None:
    expected = [index for index in range(COUNT) if index in staying]
    expected += [index for index in dict.fromkeys(order) if index not in staying]
    expected += [index for index in range(COUNT) if index not in expected]
    made = policy.update_order(COUNT, staying.__contains__, Trace(order))
    first = [index for index in made if index in staying]
    assert made[: len(first)] == first
    assert [index for index in made if index not in staying] == [each for each in expected if each not in staying]
    assert sorted(made) == list(range(COUNT))
