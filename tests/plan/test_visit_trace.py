"""The trace predicts the order of units from the last iteration, compared with a search."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infinity.plan.visit_trace import VisitTrace
from tests.tiers.fakes import few


def visit(trace: VisitTrace, units: list[int]) -> None:
    for unit in units:
        trace.visit(unit)


def test_the_first_iteration_follows_the_prediction() -> None:
    trace = VisitTrace([0, 1, 2, 2, 1, 0])
    visit(trace, [0, 1])
    assert list(trace.upcoming()) == [2, 2, 1, 0]


def test_the_next_iteration_follows_what_was_seen() -> None:
    trace = VisitTrace([0, 1, 2, 2, 1, 0])
    visit(trace, [2, 0, 1, 0, 2])
    trace.close()
    trace.visit(2)
    assert list(trace.upcoming()) == [0, 1, 0, 2]


def test_it_finds_itself_again_after_something_was_skipped_or_repeated() -> None:
    trace = VisitTrace([0, 1, 2, 3])
    visit(trace, [0, 2])
    assert list(trace.upcoming()) == [3]
    trace.visit(1)
    assert list(trace.upcoming()) == [2, 3]
    trace.visit(9)
    assert list(trace.upcoming()) == [2, 3]


def test_the_next_use_may_be_in_the_next_iteration() -> None:
    trace = VisitTrace([0, 1, 2, 1])
    visit(trace, [0, 1])
    assert [trace.next_use(unit) for unit in (2, 1, 0, 7)] == [0, 1, 2, 9]


def test_an_iteration_without_visits_changes_nothing() -> None:
    trace = VisitTrace([0, 1])
    trace.close()
    assert list(trace.upcoming()) == [0, 1]


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
        """Return the number of visits until the next use, in the remaining iteration or the next one."""
        following = self.order[self.position :] + self.order
        return following.index(unit) if unit in following else 2 * len(self.order) + 1


COUNT = 6
UNITS = st.integers(0, COUNT - 1)


@few
@given(st.lists(UNITS), st.lists(st.none() | UNITS, max_size=40))
def test_it_expects_what_a_search_of_the_last_iteration_finds(order: list[int], visits: list[int | None]) -> None:
    trace, naive = VisitTrace(order), Naive(order)
    for unit in visits:
        if unit is None:
            trace.close(), naive.close()
        else:
            trace.visit(unit), naive.visit(unit)
        assert list(trace.upcoming()) == naive.order[naive.position :]
        for each in range(6):
            assert trace.next_use(each) == naive.next_use(each)
            known = each in naive.order
            assert trace.first_use(each) == (naive.order.index(each) if known else len(naive.order))


def test_an_expert_is_predicted_only_after_its_layer_or_an_iteration_with_all_experts() -> None:
    trace = VisitTrace([0, 1, 2, 3], routed=[1, 2])
    assert list(trace.upcoming()) == [0]  # unit 3 would have to make room for the experts before it
    trace.visit(0)
    trace.expect([2], among=[1, 2])
    assert list(trace.upcoming()) == [2, 3]
    assert trace.next_use(2) == 0
    for unit in (2, 3):
        trace.visit(unit)
    trace.close()
    assert list(trace.upcoming()) == [0]  # the last iteration did not visit unit 1
    for unit in (0, 1, 2, 3):
        trace.visit(unit)
    trace.close()
    assert list(trace.upcoming()) == [0, 1, 2, 3]
    trace.visit(0)
    trace.expect([1], among=[1, 2])
    assert list(trace.upcoming()) == [1, 3]


def test_the_experts_of_a_forward_say_nothing_about_those_of_its_backward() -> None:
    trace = VisitTrace([0, 1, 2, 1, 2, 1, 0], routed=[2, 3])
    trace.visit(0), trace.visit(1)
    trace.expect([2], among=[2, 3])
    assert list(trace.upcoming()) == [2, 1]
    trace.visit(2)
    assert list(trace.upcoming()) == [1]
    trace.visit(1)
    trace.expect([3], among=[2, 3])
    assert list(trace.upcoming()) == [3, 1, 0]
