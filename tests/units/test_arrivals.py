"""Which gradients have come: a unit is complete with the last piece it had in the pass before, and no other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.units.arrivals import BackwardPasses, GradientArrivals
from tests.tiers.fakes import few

NAMES = ["a", "b", "c"]


@few
@given(st.lists(st.lists(st.sampled_from(NAMES), max_size=8), max_size=4))
def test_a_unit_is_complete_when_it_has_what_it_had_in_the_pass_before(passes: list[list[str]]) -> None:
    arrivals, expected = GradientArrivals(NAMES), dict.fromkeys(NAMES, 1)
    for pieces in passes:
        complete = 0
        for number, name in enumerate(pieces):
            came = pieces[: number + 1]
            done = all(came.count(each) >= count for each, count in expected.items())
            last = came.count(name) == expected[name]
            assert arrivals.came(name) == (done and last)
            complete += done and last
        assert complete <= 1
        assert arrivals.any_came == bool(pieces)
        arrivals.end_pass()
        expected = {name: pieces.count(name) for name in NAMES}


def test_a_pass_that_was_interrupted_is_forgotten() -> None:
    arrivals = GradientArrivals(["a", "b"])
    assert not arrivals.came("a")
    arrivals.begin_pass()
    assert not arrivals.came("b")
    assert arrivals.came("a")


def passes_of(*counts: int) -> tuple[BackwardPasses, GradientArrivals]:
    """Return counters that have seen these numbers of passes before each step."""
    arrivals = GradientArrivals(["a"])
    passes = BackwardPasses([arrivals])
    for count in counts:
        for _ in range(count):
            run(passes, arrivals)
        passes.step_ended()
    return passes, arrivals


def run(passes: BackwardPasses, arrivals: GradientArrivals, *, empty: bool = False) -> None:
    passes.begin()
    if not empty:
        arrivals.came("a")
    passes.end()


def lasts(passes: BackwardPasses, arrivals: GradientArrivals, count: int, steps: int | None = None) -> list[bool]:
    """Do `count` passes, and return whether each was expected to be the last."""
    found = []
    for _ in range(count):
        found.append(passes.is_last(steps))
        run(passes, arrivals)
    return found


def test_the_first_pass_is_the_last_one_until_a_step_had_more() -> None:
    assert lasts(*passes_of(), 3) == [True, False, False]
    assert lasts(*passes_of(3), 4) == [False, False, True, False]
    assert lasts(*passes_of(3, 1), 2) == [True, False]


def test_what_the_user_says_counts_more_than_what_was_seen() -> None:
    assert lasts(*passes_of(3), 3, steps=2) == [False, True, False]


def test_a_pass_without_gradients_is_none() -> None:
    passes, arrivals = passes_of(2)
    run(passes, arrivals, empty=True)
    assert lasts(passes, arrivals, 2) == [False, True]


def test_gradients_that_were_dropped_were_of_no_step() -> None:
    passes, arrivals = passes_of(2)
    run(passes, arrivals)
    passes.forget()
    assert lasts(passes, arrivals, 2) == [False, True]


@pytest.mark.parametrize("steps", [None, 1, 4])
def test_outside_of_no_sync_passes_are_the_last_ones(steps: int | None) -> None:
    passes, arrivals = passes_of(3)
    with passes.accumulating():
        assert lasts(passes, arrivals, 2, steps) == [False, False]
        with passes.accumulating():
            assert not passes.is_last(steps)
        assert not passes.is_last(steps)
    assert passes.is_last(steps)
    run(passes, arrivals)
    passes.step_ended()
    assert lasts(passes, arrivals, 3) == [False, False, True]


def test_a_step_inside_no_sync_does_not_end_it() -> None:
    passes, arrivals = passes_of()
    with passes.accumulating():
        run(passes, arrivals)
        passes.step_ended()
        run(passes, arrivals)
    assert passes.is_last(9)
