"""Whether updates speculate: as the plan has it, and with auto as long as it has turned out right."""

from __future__ import annotations

import logging

import pytest

from infinity.plan.placement import Overlap
from infinity.units.speculation_choice import SpeculationChoice, TimedSpeculationChoice, UpdateCounts

NONE: set[int] = set()


def step(speculation: SpeculationChoice, *, wrong: bool, clipped: bool = False) -> None:
    speculation.step_decided({0} - ({0} if wrong else NONE), {0} if wrong else NONE, {0, 1}, clipped=clipped)


def test_the_mode_decides_and_what_was_seen_only_with_auto() -> None:
    expected = {"auto": (True, False), "during_backward": (True, True)}
    expected |= {"before_forward": (False, False), "off": (False, False)}
    modes: list[SpeculationChoice] = [SpeculationChoice("auto"), SpeculationChoice("during_backward")]
    modes += [SpeculationChoice("before_forward"), SpeculationChoice("off")]
    for speculation in modes:
        before = speculation.worth_it
        for _ in range(9):
            step(speculation, wrong=True)
        assert (before, speculation.worth_it) == expected[speculation.mode]


def test_one_wrong_step_is_borne_and_two_are_not() -> None:
    speculation = SpeculationChoice("auto")
    step(speculation, wrong=True)
    assert speculation.worth_it
    step(speculation, wrong=True)
    assert not speculation.worth_it


def test_it_is_tried_again_when_it_would_have_been_right() -> None:
    speculation = SpeculationChoice("auto")
    for _ in range(99):
        speculation.dropped(1)
    seen = []
    for _ in range(6):
        seen.append(speculation.worth_it)
        step(speculation, wrong=False)
    assert seen == [False] * 5 + [True]  # 0.75⁵ of what was known is left: less than three in ten


def test_a_clip_would_have_made_it_wrong_though_nothing_was_begun() -> None:
    speculation = SpeculationChoice("auto")
    for _ in range(2):
        speculation.step_decided(NONE, NONE, {0}, clipped=True)
    assert not speculation.worth_it
    assert speculation.counts == UpdateCounts(late=2, clipped=2)


def test_nothing_that_was_dropped_teaches_nothing() -> None:
    speculation = SpeculationChoice("auto")
    for _ in range(9):
        speculation.dropped(0)
    assert speculation.worth_it
    assert speculation.counts == UpdateCounts()


def test_every_update_is_counted_once() -> None:
    speculation = SpeculationChoice("during_backward")
    speculation.step_decided({0, 1}, {2}, {0, 1, 2, 3}, clipped=False)
    assert speculation.counts == UpdateCounts(early=2, undone=1, late=2)
    speculation.dropped(3)
    assert speculation.counts == UpdateCounts(early=2, undone=4, late=2)


def test_clips_are_counted_where_updates_might_have_speculated() -> None:
    for speculation in (SpeculationChoice("before_forward"), SpeculationChoice("off")):
        step(speculation, wrong=False, clipped=True)
        assert speculation.counts.clipped == 0


def test_each_cause_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    speculation = SpeculationChoice("auto")
    with caplog.at_level(logging.WARNING, logger="infinity"):
        step(speculation, wrong=True)
        step(speculation, wrong=True)
        step(speculation, wrong=True, clipped=True)
        speculation.warn("a cause", "Advice.")
        speculation.warn("a cause", "Advice.")
    assert [("hyperparameters" in record.message, "Advice." in record.message) for record in caplog.records] == [
        (True, False),
        (False, True),
    ]


class Machine:
    """A clock: steps take a time of their own with speculation, and without."""

    def __init__(self, during: float, before: float) -> None:
        self._seconds, self._now = {True: during, False: before}, 0.0
        self.timed = TimedSpeculationChoice(lambda: self._now)

    def steps(self, count: int) -> list[bool]:
        ways = []
        for _ in range(count):
            ways.append(self.timed.speculates)
            self._now += self._seconds[ways[-1]]
            self.timed.step_decided()
        return ways


@pytest.mark.parametrize(
    ("before", "speculates"),
    [pytest.param(0.9, False, id="slower"), pytest.param(0.98, True, id="hardly"), (1.2, True)],
)
def test_the_faster_way_is_kept_and_both_are_tried_again(before: float, speculates: bool) -> None:
    machine = Machine(1.0, before)
    assert machine.steps(10) == [True] * 10
    tried = [True] * 3 + [False] * 3
    assert machine.steps(12) == tried * 2
    assert machine.steps(500) == [speculates] * 500
    assert machine.steps(12) == tried * 2


def test_one_slow_step_decides_nothing() -> None:
    machine = Machine(1.0, 1.2)
    machine.steps(11)
    machine._now += 100.0  # an evaluation
    machine.steps(11)
    assert machine.steps(1) == [True]


@pytest.mark.parametrize("mode", ["before_forward", "during_backward", "off"])
def test_no_step_is_timed_where_the_config_decides(mode: Overlap) -> None:
    def clock() -> float:
        raise AssertionError

    step(SpeculationChoice(mode, TimedSpeculationChoice(clock)), wrong=False)
