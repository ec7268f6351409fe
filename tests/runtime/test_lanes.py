"""Calls in threads of their own, which run from one place where they park to the next."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from infinity.runtime.lanes import Lane, Surroundings


class Parking:
    """A lane whose call notes where it is, and parks in between.

    Attributes:
        seen: what the call has noted.
        lane: that it runs in.
    """

    def __init__(self, call: Callable[[Parking], object]) -> None:
        self.seen: list[str] = []
        self.lane = Lane(lambda: call(self), Surroundings(None))

    def end(self) -> None:
        """End the lane, which must not take long."""
        ending = threading.Thread(target=self.lane.end, daemon=True)
        ending.start()
        ending.join(20)
        assert not ending.is_alive()


def in_two_parts(of: Parking) -> str:
    try:
        of.seen.append("first")
        of.lane.park()
        of.seen.append("second")
        return "result"
    finally:
        of.seen.append("left")


def test_a_call_goes_on_from_where_it_has_parked() -> None:
    of = Parking(in_two_parts)
    assert of.seen == []
    of.lane.resume()
    assert (of.seen, of.lane.over) == (["first"], False)
    of.lane.resume()
    assert (of.seen, of.lane.over) == (["first", "second", "left"], True)
    assert of.lane.take_result() == "result"
    assert of.lane.take_result() is None
    of.end()


def test_what_is_behind_the_place_where_a_call_has_parked_does_not_run_once_nobody_wants_it() -> None:
    of = Parking(in_two_parts)
    of.lane.resume()
    of.end()
    assert (of.seen, of.lane.over) == (["first", "left"], True)


def test_a_call_that_never_began_does_not_begin_at_its_end() -> None:
    of = Parking(in_two_parts)
    of.end()
    assert of.seen == []


def test_what_a_call_raises_comes_out_of_resume_once() -> None:
    def fail(of: Parking) -> None:
        raise ArithmeticError("of the call")

    of = Parking(fail)
    with pytest.raises(ArithmeticError, match="of the call"):
        of.lane.resume()
    assert of.lane.over
    of.end()
