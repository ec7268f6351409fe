"""The trace predicts the order of units from the last iteration."""

from __future__ import annotations

from infinity.units.trace import Trace


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
