"""Which steps are committed: every N-th, or as many as 5 % of the time has room for."""

from __future__ import annotations

import pytest

from infinity.durable.commit_pace import CommitSchedule
from infinity.plan.commit_frequency import CommitFrequency


class Loop:
    """Steps that take a time, and commits that take another."""

    def __init__(self, pace: CommitSchedule) -> None:
        self.pace, self.now, self.step = pace, 0.0, 0

    def run(self, steps: int, step_s: float, commit_s: float) -> list[int]:
        """Do steps, and return those that were committed."""
        committed = []
        for _ in range(steps):
            self.step += 1
            self.now += step_s
            if self.pace.due(self.step):
                committed.append(self.step)
                for part in (0.75, 0.25):
                    with self.pace.working():
                        self.now += part * commit_s
                self.pace.finished(self.step)
        return committed


def loop(commits: CommitFrequency) -> Loop:
    made: Loop = Loop(CommitSchedule(commits, clock=lambda: made.now))
    return made


@pytest.mark.parametrize("every", [1, 3])
def test_a_number_of_steps_is_kept_whatever_a_commit_costs(every: int) -> None:
    for frequency in (CommitFrequency(every), CommitFrequency(every, "all states are on NVMe")):
        assert loop(frequency).run(12, 1.0, 100.0) == [step for step in range(1, 13) if step % every == 0]


def test_commits_of_what_rests_in_ram_take_five_percent_of_the_time_once_two_were_measured() -> None:
    assert loop(CommitFrequency(1000, at_most=True)).run(45, 1.0, 0.75) == [1, 2, 15, 30, 45]
    assert loop(CommitFrequency(1000, at_most=True)).run(8, 1.0, 0.04) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_commits_are_never_further_apart_than_the_plan_has_it() -> None:
    assert loop(CommitFrequency(4, at_most=True)).run(12, 1.0, 100.0) == [1, 2, 4, 8, 12]


def test_what_is_measured_again_counts() -> None:
    made = loop(CommitFrequency(1000, at_most=True))
    assert made.run(20, 1.0, 0.5) == [1, 2, 10, 20]
    assert made.run(20, 2.0, 0.5) == [30, 35, 40]


def test_the_answer_for_a_step_stays_when_a_commit_ends_meanwhile() -> None:
    made = loop(CommitFrequency(1000, at_most=True))
    made.run(1, 1.0, 1.0)
    made.now += 1.0
    assert made.pace.due(2)
    with made.pace.working():
        made.now += 1.0
    made.pace.finished(2)
    assert made.pace.due(2)
    assert not made.pace.due(3)


def test_two_commits_of_one_step_measure_no_step() -> None:
    made = loop(CommitFrequency(1000, at_most=True))
    made.run(2, 1.0, 0.5)
    made.now += 100.0
    made.pace.finished(2)
    assert made.run(9, 1.0, 0.5) == [10]


def test_a_rank_commits_by_what_all_have_agreed_on_and_not_by_its_own_clock() -> None:
    """Whether or not it has asked for the next step before the ranks agree."""
    for asks_before in (False, True):
        pace = CommitSchedule(CommitFrequency(1000, at_most=True), agreed=True, clock=lambda: 0.0)
        for step in range(1, 4):
            pace.finished(step)
        told = pace.every
        assert pace.due(4)
        if asks_before:
            assert pace.due(5)
        pace.lead(max(told, 3), 5)
        assert pace.due(5)
        assert [step for step in range(6, 13) if pace.due(step)] == [6, 9, 12]
    measured = Loop(CommitSchedule(CommitFrequency(1000, at_most=True), agreed=True, clock=lambda: measured.now))
    assert measured.run(6, 1.0, 0.75) == [1, 2, 3, 4, 5, 6]
    assert measured.pace.every > 1
