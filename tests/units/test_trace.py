"""The trace predicts the order of units from the last iteration; who makes room, what is fetched next and in which
order updates go, compared with the obvious way to say it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infinity.units.trace import Trace, side_by_side, to_prefetch, update_order, victims
from tests.tiers.fakes import few


def visit(trace: Trace, units: list[int]) -> None:
    for unit in units:
        trace.visit(unit)


def test_the_first_iteration_follows_the_prediction() -> None:
    trace = Trace([0, 1, 2, 2, 1, 0])
    visit(trace, [0, 1])
    assert list(trace.upcoming()) == [2, 2, 1, 0]


def test_the_next_iteration_follows_what_was_seen() -> None:
    trace = Trace([0, 1, 2, 2, 1, 0])
    visit(trace, [2, 0, 1, 0, 2])
    trace.close()
    trace.visit(2)
    assert list(trace.upcoming()) == [0, 1, 0, 2]


def test_it_finds_itself_again_after_something_was_skipped_or_repeated() -> None:
    trace = Trace([0, 1, 2, 3])
    visit(trace, [0, 2])
    assert list(trace.upcoming()) == [3]
    trace.visit(1)
    assert list(trace.upcoming()) == [2, 3]
    trace.visit(9)
    assert list(trace.upcoming()) == [2, 3]


def test_the_next_use_may_be_in_the_next_iteration() -> None:
    trace = Trace([0, 1, 2, 1])
    visit(trace, [0, 1])
    assert [trace.next_use(unit) for unit in (2, 1, 0, 7)] == [0, 1, 2, 9]


def test_an_iteration_without_visits_changes_nothing() -> None:
    trace = Trace([0, 1])
    trace.close()
    assert trace.order == (0, 1)


class Naive:
    """A trace that searches."""

    def __init__(self, order: list[int]) -> None:
        self.order, self.position, self.seen = order, 0, list[int]()

    def _find(self, unit: int, start: int) -> int | None:
        return self.order.index(unit, start) if unit in self.order[start:] else None

    def visit(self, unit: int) -> None:
        if self.seen[-1:] == [unit]:
            return
        self.seen.append(unit)
        for start in (self.position, 0):
            found = self._find(unit, start)
            if found is not None:
                self.position = found + 1
                return

    def close(self) -> None:
        self.order, self.seen, self.position = self.seen or self.order, [], 0

    def next_use(self, unit: int) -> int:
        """Of the rest of this iteration, and the next one."""
        following = self.order[self.position :] + self.order
        return following.index(unit) if unit in following else 2 * len(self.order) + 1


COUNT = 6
UNITS = st.integers(0, COUNT - 1)


@few
@given(st.lists(UNITS), st.lists(st.none() | UNITS, max_size=40))
def test_it_expects_what_a_search_of_the_last_iteration_finds(order: list[int], visits: list[int | None]) -> None:
    trace, naive = Trace(order), Naive(order)
    for unit in visits:
        if unit is None:
            trace.close(), naive.close()
        else:
            trace.visit(unit), naive.visit(unit)
        assert list(trace.order) == naive.order
        assert list(trace.upcoming()) == naive.order[naive.position :]
        for each in range(6):
            assert trace.next_use(each) == naive.next_use(each)
            known = each in naive.order
            assert trace.first_use(each) == (naive.order.index(each) if known else len(naive.order))


USES = st.lists(st.integers(0, 9), min_size=COUNT, max_size=COUNT)


@few
@given(st.lists(UNITS, unique=True), USES, st.integers(-1, 9))
def test_the_unit_with_the_farthest_next_use_goes_first(candidates: list[int], uses: list[int], beyond: int) -> None:
    remaining, expected = [index for index in candidates if uses[index] > beyond], []
    while remaining:
        farthest = max(uses[index] for index in remaining)
        expected.append(next(index for index in remaining if uses[index] == farthest))
        remaining.remove(expected[-1])
    assert list(victims(candidates, uses.__getitem__, beyond)) == expected


def test_without_a_bound_every_candidate_may_go_and_whom_it_names_never() -> None:
    assert list(victims([2, 0, 1], [0, 0, 5].__getitem__)) == [2, 0, 1]
    assert list(victims([0, 1, 2], [3, 4, 5].__getitem__, 4)) == [2]


@few
@given(st.lists(UNITS), st.sets(UNITS))
def test_the_nearest_released_unit_is_fetched_first(upcoming: list[int], released: set[int]) -> None:
    expected = []
    for distance in range(len(upcoming)):
        if upcoming[distance] in released:
            expected.append((distance, upcoming[distance]))
    assert list(to_prefetch(upcoming, released.__contains__)) == expected


def test_a_unit_that_was_released_meanwhile_is_seen() -> None:
    released = {0}
    coming = to_prefetch([0, 1], released.__contains__)
    assert next(coming) == (0, 0)
    released.add(1)
    assert next(coming) == (1, 1)


SIZES = st.lists(st.integers(0, 3), min_size=COUNT, max_size=COUNT)


@few
@given(st.lists(UNITS), SIZES, st.integers(0, 9), st.sets(UNITS))
def test_units_follow_as_long_as_all_that_come_before_fit_with_those_that_are_there(
    upcoming: list[int], sizes: list[int], room: int, there: set[int]
) -> None:
    expected = []
    for distance in range(len(upcoming)):
        if sum(sizes[index] for index in there | set(upcoming[: distance + 1])) > room:
            break
        expected.append(upcoming[distance])
    assert list(side_by_side(upcoming, sizes.__getitem__, room, there)) == expected


@few
@given(st.lists(UNITS), st.sets(UNITS))
def test_updates_go_in_the_order_of_the_next_forward(order: list[int], staying: set[int]) -> None:
    expected = [index for index in range(COUNT) if index in staying]
    expected += [index for index in dict.fromkeys(order) if index not in staying]
    expected += [index for index in range(COUNT) if index not in expected]
    made = update_order(COUNT, staying.__contains__, Trace(order))
    first = [index for index in made if index in staying]
    assert made[: len(first)] == first
    assert [index for index in made if index not in staying] == [each for each in expected if each not in staying]
    assert sorted(made) == list(range(COUNT))
