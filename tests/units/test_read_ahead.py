"""States that are read ahead: as many as the staging holds, taken over by the updates that come, or dropped."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from infinity.units.read_ahead import ReadAheadJobs
from tests.tiers.fakes import few, imitate_streams, pages
from tests.units.fakes import homes_of, no_shadows, offloaded, resources, unit_of

COUNT = 5
GROUPS = (1, 2)
"""Tiles of a unit, by group."""
IN_RAM = 4
"""The unit whose states are in RAM."""


class ReadAheadMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        imitate_streams(self.patch)

    def teardown(self) -> None:
        self.patch.undo()

    @initialize(ahead_max=st.integers(0, 9))
    def offload(self, ahead_max: int) -> None:
        self.below = resources()
        self.pipeline: Any = self.below.pipeline
        self.pipeline.ahead_tiles_max = self.ahead_max = ahead_max
        shadows, space = no_shadows(self.pipeline), pages(6)
        self.units = [
            offloaded(unit, homes_of(unit, states=space if unit.index == IN_RAM else None), shadows)
            for unit in (unit_of(index, GROUPS) for index in range(COUNT))
        ]
        self.ahead = ReadAheadJobs(self.below)

    def _ahead(self) -> list[int]:
        return sorted(unit.index for unit in self.ahead._jobs)

    @rule(order=st.permutations(range(COUNT)))
    def begin(self, order: list[int]) -> None:
        before, room = self._ahead(), self.ahead_max
        room -= sum(GROUPS) * len(before)
        self.ahead.begin((self.units[index] for index in order), 1)
        expected = list(before)
        for index in order:
            if room > 0 and index != IN_RAM and index not in before:
                expected.append(index)
                room -= sum(GROUPS)
        assert set(self._ahead()) == set(expected)

    @rule(index=st.integers(0, COUNT - 1), groups=st.sets(st.sampled_from([0, 1])))
    def take(self, index: int, groups: set[int]) -> None:
        before = dict(self.ahead._jobs.get(self.units[index], {}))
        taken = self.ahead.take(self.units[index], groups)
        assert self.units[index] not in self.ahead._jobs
        assert [taken.get(group) for group in groups] == [before.get(group) for group in groups]
        for group, job in before.items():
            assert (job in self.pipeline.canceled) == (group not in groups)
            if group in groups:
                self.pipeline.ahead.remove(job)  # an update took it over

    @rule(but=st.sets(st.integers(0, COUNT - 1)))
    def drop(self, but: set[int]) -> None:
        before = self._ahead()
        self.ahead.drop(but=but)
        assert self._ahead() == [index for index in before if index in but]

    @invariant()
    def every_job_belongs_to_a_unit_that_is_ahead(self) -> None:
        ahead = [job for jobs in self.ahead._jobs.values() for job in jobs.values()]
        assert {id(job) for job in ahead} == {id(job) for job in self.pipeline.ahead}
        assert all(len(jobs) == len(GROUPS) for jobs in self.ahead._jobs.values())


TestReadAhead = ReadAheadMachine.TestCase
TestReadAhead.settings = few
