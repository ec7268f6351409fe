"""The updates of a model over a pipeline that is imitated: speculated, undone, decided and finished in any order.

What is decided is what the step wants, of the units it wants it of; nothing is in flight after undoing; each state
counts as before until its update was finished; memory for new weights adds up.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from infinity.errors import SwapIOError
from infinity.sizes import PAGE_BYTES
from infinity.tiers.slots import HostSlot
from infinity.units.speculative_update_buffers import SpeculativeUpdateBuffers
from infinity.units.unit import OffloadedUnit
from infinity.units.update import UnitRequest, UnitUpdate
from infinity.units.update_queue import UpdateQueue
from tests.tiers.fakes import CANCELED, Failure, UpdateFuture, few, imitate_streams, pages
from tests.units.fakes import Fetch, homes_of, offloaded, resources, unit_of, wanted

COUNT = 6
IN_RAM = (3, 4)
"""Their weights; with the states of the last two they share the memory for shadows."""
STATES_IN_RAM = (4, 5)
SHADOW_PAGES = 6
"""Pages of the shadow of the unit that has everything in RAM."""
LR = st.sampled_from([1.0, 2.0])


class UpdatesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        imitate_streams(self.patch)
        self.below = resources()
        self.pipeline = self.below.pipeline
        self.space = space = pages(2 * len(IN_RAM) + 4 * len(STATES_IN_RAM) + SHADOW_PAGES)
        self.shadows = SpeculativeUpdateBuffers(space, self.pipeline, SHADOW_PAGES * PAGE_BYTES, [2 * PAGE_BYTES])
        self.units = [self._unit(index, space) for index in range(COUNT)]
        self.updates = UpdateQueue(self.below, self.shadows)
        self.begun: list[int] = []  # units, as their updates began
        self.committed = False
        for index in (0, 1):  # others were not fetched
            self._fetch(self.units[index])

    def _unit(self, index: int, space: Any) -> OffloadedUnit:
        unit = unit_of(index, (1, 1))
        weights, states = (space if index in those else None for those in (IN_RAM, STATES_IN_RAM))
        return offloaded(unit, homes_of(unit, weights, states, kept=True), self.shadows)

    @staticmethod
    def _shadow_bytes(index: int) -> int:
        return (2 * (index in IN_RAM) + 4 * (index in STATES_IN_RAM)) * PAGE_BYTES

    @staticmethod
    def _fetch(unit: OffloadedUnit) -> None:
        lease = pages(2).lease(unit.full.weight_bytes, "a slot")
        slot: Any = HostSlot(lease.tensor(), lease)
        fetch: Any = Fetch(slot)
        unit.weights.begin_fetch(fetch)
        unit.weights.finish_fetch()

    def _waits(self) -> int:
        return sum(job.waits for job in self.pipeline.jobs)

    def _forget(self, gone: Sequence[int]) -> None:
        self.begun = [index for index in self.begun if index not in gone]

    # -- what may happen ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.updates.oldest_decided is None)
    @rule(lr=LR)
    def a_backward_brings_all_gradients(self, lr: float) -> None:
        for index in reversed(range(COUNT)):
            self.speculate(index, lr)

    @precondition(lambda self: self.updates.oldest_decided is None)
    @rule(index=st.integers(0, COUNT - 1), lr=LR)
    def speculate(self, index: int, lr: float) -> None:
        unit = self.units[index]
        if not self.updates.can_speculate(unit):
            assert unit.update is not None or self.shadows.free_bytes < self._shadow_bytes(index)
            return
        if not self.updates.speculate(unit, wanted(unit.full, lr), 1, committed=self.committed):
            whole = self.space.try_lease(self._shadow_bytes(index))
            assert whole is None  # what is free is in pieces
            assert unit.update is None
            return
        assert unit.speculative is not None
        self.begun.append(index)

    @precondition(lambda self: self.pipeline.under_way)
    @rule(data=st.data())
    def a_milestone_is_reached(self, data: Any) -> None:
        job = data.draw(st.sampled_from(self.pipeline.under_way))
        if job.fate is None:
            job.advance()

    @rule(count=st.integers(1, 3))
    def the_pipeline_begins(self, count: int) -> None:
        for job in self.pipeline.under_way[:count]:
            job.begun = True

    @precondition(lambda self: self.begun)
    @rule(data=st.data())
    def an_update_is_done(self, data: Any) -> None:
        for job in _jobs(self.units[data.draw(st.sampled_from(self.begun))].update):
            if job.fate is None:
                job.reach(job)

    @rule(indices=st.sets(st.integers(0, COUNT - 1)), fails=st.booleans())
    def undo(self, indices: set[int], fails: bool) -> None:
        dropped = [self.units[index] for index in sorted(indices) if self.units[index].speculative is not None]
        jobs = [job for unit in dropped for job in _jobs(unit.update)]
        running = [job for job in jobs if not job.done()]
        for job in running[:1] if fails else ():
            job.fate = Failure()
        failed = False
        try:
            self.updates.undo([self.units[index] for index in sorted(indices)])
        except SwapIOError:
            failed = True
        assert failed == (fails and bool(running))
        assert all(job.done() for job in jobs)
        assert [unit.update for unit in dropped] == [None] * len(dropped)
        self._forget([unit.index for unit in dropped])

    @rule()
    def who_needs_room_waits_for_those_that_read_slots(self) -> None:
        self.updates.wait_for_readers()
        assert not any(unit.reads_slot() for unit in self.units)

    @precondition(lambda self: self.updates.oldest_decided is None)
    @rule(
        requested=st.dictionaries(st.integers(0, COUNT - 1), LR),
        order=st.permutations(range(COUNT)),
        committed=st.booleans(),
        agrees=st.booleans(),
    )
    def decide(self, requested: dict[int, float], order: list[int], committed: bool, agrees: bool = False) -> None:
        requests = {index: wanted(self.units[index].full, lr) for index, lr in requested.items()}
        for unit in self.updates.speculative if agrees else ():
            assert unit.update is not None
            requests[unit.index] = dict(unit.update.wanted)
        speculated = {unit.index: unit.update for unit in self.updates.speculative}
        goes_on = {
            index
            for index, update in speculated.items()
            if self._is_right(update, requests.get(index), committed) and any(job.begun for job in _jobs(update))
        }
        earlier = len(self.pipeline.jobs)
        decided = self.updates.decide(requests, [self.units[index] for index in order], 1, committed=committed)
        self.begun = [index for index in self.begun if index in goes_on]
        self.begun += [index for index in order if index in requests and index not in goes_on]
        assert [unit.index for unit in decided] == self.begun
        assert not self.updates.speculative
        for unit in decided:
            assert unit.decided is not None
            assert unit.decided.wanted == requests[unit.index]
            assert unit.decided.committed == committed
            assert (unit.decided is speculated.get(unit.index)) == (unit.index in goes_on)
            assert unit.decided.speculated == (unit.index in goes_on)
        later = [job for job in self.pipeline.jobs[:earlier] if not job.done()]
        assert later == [job for unit in decided if unit.index in goes_on for job in _jobs(unit.update) if job in later]
        assert not self.pipeline.ahead

    @staticmethod
    def _is_right(update: UnitUpdate | None, requested: UnitRequest | None, committed: bool) -> bool:
        return update is not None and update.wanted == requested and update.committed == committed

    @precondition(lambda self: self.updates.oldest_decided is not None)
    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        unit = data.draw(st.sampled_from(self.updates.decided))
        written = self._written(unit)
        self.updates.finish(unit)
        self._finished(unit, written)

    @staticmethod
    def _written(unit: OffloadedUnit) -> list[Any]:
        assert unit.update is not None
        return [(each.home, each.copy_index) for each in unit.update.each_destination()]

    def _finished(self, unit: OffloadedUnit, written: list[Any]) -> None:
        assert unit.update is None
        assert all(home.dirty if copy is None else home.stored().newest_copy == copy for home, copy in written)
        self._forget([unit.index])

    @rule()
    def finish_what_is_written(self) -> None:
        before, waits = [(unit, self._written(unit), unit.update) for unit in self.updates.decided], self._waits()
        self.updates.finish_written()
        assert self._waits() == waits
        stops = False
        for unit, written, update in before:
            stops = stops or not update.reached("written")
            if stops:
                assert unit.update is update
            else:
                self._finished(unit, written)

    @rule()
    def finish_all(self) -> None:
        self.updates.finish_all()
        self._forget([index for index in self.begun if self.units[index].update is None])
        assert self.updates.oldest_decided is None

    @precondition(lambda self: self.updates.oldest_decided is None)
    @rule(order=st.permutations(range(COUNT)))
    def read_ahead(self, order: list[int]) -> None:
        self.updates.read_ahead((self.units[index] for index in order), 1)

    @rule()
    def nobody_reads_a_slot_after_waiting_for_it(self) -> None:
        self.updates.wait_for_readers()
        assert not any(unit.reads_slot() for unit in self.units)

    # -- what stays ---------------------------------------------------------------------------------------------------

    @invariant()
    def a_quarter_of_the_slots_at_most_is_kept_from_others(self) -> None:
        kept = sum(unit.full.weight_bytes for unit in self.units if unit.reads_slot())
        assert kept * 4 <= self.below.plan.budgets.slot_bytes

    @invariant()
    def the_units_with_an_update_are_under_way_as_they_began(self) -> None:
        assert list(self.updates._under_way) == self.begun
        assert {unit.index for unit in self.units if unit.update is not None} == set(self.begun)

    @invariant()
    def what_is_in_flight_belongs_to_an_update(self) -> None:
        running = {id(job) for unit in self.units for job in _jobs(unit.update)}
        assert {id(job) for job in self.pipeline.under_way} <= running

    @invariant()
    def the_bytes_of_the_shadows_add_up(self) -> None:
        used = 0
        for unit in self.units:
            used += 0 if unit.update is None else sum(lease.nbytes for lease in unit.update.shadows())
        assert self.shadows.free_bytes + used == SHADOW_PAGES * PAGE_BYTES
        assert self.space.free_bytes == self.shadows.free_bytes

    @invariant()
    def what_updates_keep_of_the_slots_is_a_share(self) -> None:
        reading = [unit for unit in self.updates.speculative if unit.reads_slot()]
        assert sum(unit.full.weight_bytes for unit in reading) * 4 <= self.below.plan.budgets.slot_bytes

    def teardown(self) -> None:
        self.patch.undo()


def _jobs(update: UnitUpdate | None) -> list[UpdateFuture]:
    futures: list[Any] = [] if update is None else [transfer.future for transfer in update.transfers.values()]
    return futures


TestUpdates = UpdatesMachine.TestCase
TestUpdates.settings = few


@pytest.fixture
def machine() -> Any:
    machine = UpdatesMachine()
    yield machine
    machine.teardown()


def test_newest_updates_are_canceled_first(machine: UpdatesMachine) -> None:
    for index in (0, 2, 1):
        machine.speculate(index, 1.0)
    jobs = list(machine.pipeline.jobs)
    machine.updates.undo(machine.updates.speculative)
    assert machine.pipeline.canceled == [*jobs[4:], *jobs[2:4], *jobs[:2]]


def test_a_failure_while_undoing_is_told_when_everything_was_undone(machine: UpdatesMachine) -> None:
    for index in (0, 1, 2):
        machine.speculate(index, 1.0)
    machine.pipeline.jobs[2].fate = Failure()
    with pytest.raises(SwapIOError):
        machine.updates.undo(machine.updates.speculative)
    assert all(job.done() for job in machine.pipeline.jobs)
    assert not machine.updates.speculative


def test_what_speculation_needs(machine: UpdatesMachine) -> None:
    updates, unit = machine.updates, machine.units[0]
    assert updates.can_speculate(unit)
    gradients: Any = unit.gradients
    gradients.in_ram = False
    assert not updates.can_speculate(unit)
    gradients.in_ram = True
    spare = machine.below.spare_copy
    machine.below.spare_copy = lambda extent: None if extent.state == "weight" else spare(extent)
    assert not updates.can_speculate(unit)
    assert updates.can_speculate(machine.units[3])  # its weights are in RAM
    machine.below.spare_copy = spare
    assert updates.can_speculate(machine.units[5])  # its states are in RAM
    machine.below.plan.placement.updates.in_ram = ()
    assert not updates.can_speculate(machine.units[5])
    assert updates.can_speculate(machine.units[3])


def test_an_update_of_which_a_group_has_begun_goes_on_and_another_is_taken_back(machine: UpdatesMachine) -> None:
    for index in (5, 3, 1):
        machine.speculate(index, 1.0)
    begun, untouched = machine.units[5].update, machine.units[3].update
    machine.pipeline.jobs[0].begun = True
    machine.decide({5: 1.0, 3: 1.0, 1: 1.0}, list(range(COUNT)), False)
    assert machine.units[5].update is begun
    assert machine.units[3].update is not untouched
    assert [job.job["unit"] for job in machine.pipeline.under_way] == [5, 5, 1, 1, 3, 3]
    assert machine.shadows.free_bytes == (SHADOW_PAGES - 4) * PAGE_BYTES


def test_a_moment_that_the_optimizer_does_not_use_stays_where_it_is(machine: UpdatesMachine) -> None:
    unit = machine.units[4]
    uses_one = {group: replace(each, moments=frozenset({"exp_avg"})) for group, each in wanted(unit.full).items()}
    assert machine.updates.speculate(unit, uses_one, 1, committed=False)
    before = {home: home.lease for home in unit.homes.all_states()}
    machine.updates.decide({4: uses_one}, machine.units, 1, committed=False)
    assert unit.update is None or not unit.update.speculated  # nothing had begun
    machine.updates.finish_all()
    assert machine.updates.speculate(unit, uses_one, 2, committed=False)
    for job in machine.pipeline.under_way:
        job.begun = True
    machine.updates.decide({4: uses_one}, machine.units, 2, committed=False)
    machine.updates.finish_all()
    for states in unit.homes.states.values():
        exp_avg, exp_avg_sq = states.homes()
        assert exp_avg.lease is not before[exp_avg]
        assert exp_avg_sq.lease is before[exp_avg_sq]
    assert machine.shadows.free_bytes == SHADOW_PAGES * PAGE_BYTES


def test_states_in_ram_that_the_step_commits_need_a_spare_copy(machine: UpdatesMachine) -> None:
    spare = machine.below.spare_copy
    machine.below.spare_copy = lambda extent: (
        None if extent.state == "exp_avg" and extent.unit == "4" else spare(extent)
    )
    unit = machine.units[4]
    assert machine.updates.can_speculate(unit)
    assert not machine.updates.speculate(unit, wanted(unit.full), 1, committed=True)
    assert machine.updates.speculate(unit, wanted(unit.full), 1, committed=False)


@pytest.mark.parametrize("committed", [False, True])
def test_states_in_ram_are_written_when_the_step_is_committed(machine: UpdatesMachine, committed: bool) -> None:
    unit = machine.units[4]
    for speculates in (True, False):
        if speculates:
            assert machine.updates.speculate(unit, wanted(unit.full), 1, committed=committed)
        else:
            machine.updates.undo([unit])
            machine.updates.decide({4: wanted(unit.full)}, machine.units, 1, committed=committed)
        assert unit.update is not None
        for each in unit.update.each_destination():
            writes = committed or not each.home.in_memory
            assert each.copy_index == (int(speculates) if writes else None)


def test_a_speculative_update_without_a_spare_copy_is_a_mistake(machine: UpdatesMachine) -> None:
    machine.below.spare_copy = lambda extent: None
    with pytest.raises(AssertionError, match="no spare copy for weight of unit '0'"):
        machine.updates.speculate(machine.units[0], wanted(machine.units[0].full), 1, committed=False)


def test_a_part_of_a_unit_in_ram_is_not_speculated(machine: UpdatesMachine) -> None:
    unit = machine.units[3]
    part = {0: wanted(unit.full)[0]}
    assert not machine.updates.speculate(unit, part, 1, committed=False)
    assert unit.update is None
    assert machine.shadows.free_bytes == SHADOW_PAGES * PAGE_BYTES


def test_a_known_failure_of_a_decided_update_is_told(machine: UpdatesMachine) -> None:
    machine.speculate(2, 1.0)
    machine.pipeline.jobs[0].end(Failure())
    machine.updates.require_well()  # what is speculative may be undone
    with pytest.raises(SwapIOError):
        machine.updates.undo(machine.updates.speculative)
    machine.begun.clear()
    machine.decide({0: 1.0, 1: 1.0}, list(range(COUNT)), False)
    machine.updates.require_well()
    oldest = machine.updates.oldest_decided
    assert oldest is not None
    assert oldest.update is not None
    first = next(iter(oldest.update.transfers.values())).future
    next(job for job in machine.pipeline.jobs if job is first).end(Failure())
    with pytest.raises(SwapIOError):
        machine.updates.require_well()


def test_weights_that_are_not_finite_are_told_when_their_update_is_finished(
    machine: UpdatesMachine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.decide({0: 1.0, 1: 1.0}, list(range(COUNT)), False)
    machine.pipeline.jobs[1].finite = False
    with caplog.at_level(logging.WARNING, logger="infinity"):
        machine.updates.finish_all()
    assert [record.message.split(" is no")[0] for record in caplog.records] == [
        "step 1: a weight or a moment of unit '0'"
    ]


def test_shadows_come_back_when_updates_speculate_again(machine: UpdatesMachine) -> None:
    machine.shadows.lend()
    machine.read_ahead(list(range(COUNT)))
    machine.decide({0: 1.0}, list(range(COUNT)), False)
    machine.read_ahead([1])
    machine.updates.reclaim_shadows()
    assert machine.shadows.free_bytes == SHADOW_PAGES * PAGE_BYTES
    assert all(job.computed.done() for job in machine.pipeline.jobs)
    assert not any(job.done() for job in machine.pipeline.jobs)
    assert not machine.pipeline.ahead
    assert machine.pipeline.canceled[-1].fate is CANCELED
