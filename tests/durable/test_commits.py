"""A generation on its way: begun, frozen and written in either order, finished once; or it gives way, or fails."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from infinity.durable.commits import Commit, Commits, facts_of
from infinity.durable.generation_body import ModelRecord
from infinity.durable.generation_maker import SingleProcessGenerationMaker
from infinity.durable.resumed_generation import ResumedGeneration
from infinity.errors import ConfigError, InfinityError, SwapIOError
from infinity.plan.commit_frequency import CommitFrequency
from infinity.plan.plan_input import NO_PEERS, PeerFacts
from infinity.sharded.multi_rank_generation_maker import MultiRankGenerationMaker
from infinity.sizes import PAGE_BYTES
from infinity.state.shard import RankPartition
from infinity.tiers.home import StateHome, WeightsHome
from tests.tiers.fakes import Failure, Future, Generations, Store, extent, few, pages, transfer

EVERY = 2


def plan_of(commit_every: int) -> Any:
    """Return the part of a plan that commits use."""
    form = SimpleNamespace(stored=("exp_avg",))
    return SimpleNamespace(peers=NO_PEERS, placement=SimpleNamespace(commits=CommitFrequency(commit_every), form=form))


class Optimizers:
    """Fake of Optimizers. Attributes: count: optimizers that entered; at: the content of their checkpoint."""

    def __init__(self) -> None:
        self.count, self.at, self.taken_up = 1, 0, 0

    def __len__(self) -> int:
        return self.count

    def checkpoint(self) -> list[dict[str, Any]]:
        return [{"at": self.at}]

    def restore_hyperparameters(self, resumed: ResumedGeneration | None, *, again: bool) -> None:
        self.taken_up += 1


class Loader:
    """Data, which can be tracked."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return

    def __iter__(self) -> Any:
        return iter([1, 2])


class Run:
    """Commits over a store, and the homes of two states in RAM."""

    def __init__(self, *, keeps: bool = True, several: bool = False) -> None:
        self.said: list[int] = []
        self.collectives = SimpleNamespace(say=self.said.append, heard=[0, 0])
        space = pages(2)
        self.homes = [
            StateHome(space.lease(PAGE_BYTES, "a state"), 0, PAGE_BYTES, extent(name, "exp_avg")) for name in ("a", "b")
        ]
        self.store, self.generations, self.optimizers = Store(), Generations(), Optimizers()
        below: Any = SimpleNamespace(
            plan=plan_of(EVERY),
            generations=self.generations if keeps else None,
            require_store=lambda: self.store,
            homes=lambda: self.homes,
            units=[],
            facts={},
        )
        kept: Any = below.generations
        world: Any = SimpleNamespace(collectives=self.collectives)
        maker = MultiRankGenerationMaker(world, kept) if several else SingleProcessGenerationMaker()
        optimizers: Any = self.optimizers
        model = ModelRecord(class_name="A", config=None, generation_config=None, groups=[], parameters=[])
        self.commits = Commits(below, optimizers, maker, model, dict)

    @property
    def made(self) -> list[int]:
        return [step for step, _ in self.generations.made]

    @property
    def body(self) -> dict[str, Any]:
        return self.generations.made[-1][1]

    def begin(self, step: int = 2) -> Commits:
        self.optimizers.at = step
        self.commits.begin(step)
        return self.commits


class CommitsMachine(RuleBasedStateMachine):
    """The actions that a loop may take, step by step. A model that failed takes none."""

    def __init__(self) -> None:
        super().__init__()
        self.run = Run()
        self.commits = self.run.commits
        self.step = 0
        self.under_way: int | None = None
        self.frozen_at: int | None = None
        self.owed = False
        self.failed = False
        self.expected: list[int] = []

    def _alive(self) -> bool:
        return not self.failed

    def _failing(self, act: Any) -> bool:
        """Whether the commit under way failed: it is gone, and there is no such generation."""
        try:
            act()
        except InfinityError:
            self.failed, self.under_way = True, None
            return True
        return False

    @precondition(_alive)
    @rule(changes=st.booleans())
    def a_step_is_done(self, changes: bool) -> None:
        if self._failing(self.commits.step_begins):
            return
        if self.under_way is not None and self.frozen_at is not None:
            self.expected.append(self.under_way)
        elif self.under_way is not None:
            self.owed = True
        self.under_way = self.frozen_at = None
        self.step += 1
        self.run.optimizers.at = self.step
        for home in self.run.homes if changes else ():
            home.mark_changed()
        assert self.commits.due(self.step) == (self.owed or self.step % EVERY == 0)
        if self.commits.due(self.step):
            self.commits.begin(self.step)
            self.under_way, self.owed = self.step, False

    @precondition(_alive)
    @rule()
    def a_forward_begins(self) -> None:
        self.commits.forward_begins()
        if self.under_way is not None and self.frozen_at is None:
            self.frozen_at = self.run.optimizers.at

    @precondition(_alive)
    @rule()
    def hyperparameters_change(self) -> None:
        self.run.optimizers.at += 100

    @precondition(lambda self: self._alive() and self.under_way is not None)
    @rule()
    def every_update_is_finished(self) -> None:
        syncs = len(self.run.store.syncs)
        before = self.commits._commit
        assert before is not None
        synced = before.sync is not None
        self.commits.write_remaining()
        assert len(self.run.store.syncs) == syncs + (not synced)
        assert not self.run.store.under_way
        assert not any(home.dirty for home in self.run.homes) or synced

    @precondition(lambda self: self.run.store.syncs)
    @rule(fails=st.sampled_from([False, False, True]))
    def the_sync_ends(self, fails: bool) -> None:
        self.run.store.syncs[-1].end(Failure(operation="sync") if fails else None)

    @precondition(_alive)
    @rule()
    def finish(self) -> None:
        syncs = len(self.run.store.syncs)
        begun = self.commits._commit is not None and self.commits._commit.sync is not None
        step, frozen = self.under_way, self.frozen_at
        if self._failing(self.commits.finish):
            assert not self.commits.under_way
            return
        assert len(self.run.store.syncs) == syncs + (step is not None and not begun)
        if step is not None:
            self.expected.append(step)
            at = self.run.optimizers.at if frozen is None else frozen
            assert self.run.body["optimizers"] == [{"at": at}]
            assert (self.run.body["rng_before_forward"] is None) == (frozen is None)
        self.under_way = self.frozen_at = None

    @invariant()
    def there_are_the_generations_that_were_finished(self) -> None:
        assert self.run.made == self.expected
        assert self.commits.newest == (self.expected[-1] if self.expected else None)

    @invariant()
    def a_commit_is_under_way_until_it_ends(self) -> None:
        assert self.commits.under_way == (self.under_way is not None)
        assert self.commits.frozen == (self.under_way is not None and self.frozen_at is not None)

    @invariant()
    def it_is_ready_when_finishing_would_not_wait(self) -> None:
        commit = self.commits._commit
        ready = commit is not None and self.commits.frozen and commit.sync is not None and commit.sync.done()
        assert self.commits.ready == ready

    @invariant()
    def nobody_waits_for_a_sync_twice(self) -> None:
        assert all(sync.waits <= 1 for sync in self.run.store.syncs)


TestCommits = CommitsMachine.TestCase
TestCommits.settings = few


def test_a_commit_is_frozen_once_and_synced_once() -> None:
    commit = Commit(3)
    assert not commit.ready
    commit.freeze({"a": 1})
    sync = Future()
    commit.synced(transfer(sync))
    assert not commit.ready
    sync.end()
    assert commit.ready
    with pytest.raises(AssertionError, match="generation 3 was frozen already"):
        commit.freeze({})
    with pytest.raises(AssertionError, match="generation 3 was synced already"):
        commit.synced(transfer(Future()))
    assert commit.body == {"a": 1}


def test_a_sync_that_failed_fails_the_generation_and_is_not_tried_again() -> None:
    run = Run()
    run.begin().forward_begins()
    run.commits.write_remaining()
    run.store.syncs[0].end(Failure(operation="sync"))
    with pytest.raises(
        InfinityError, match="generation 2 could not be made durable: sync .* resumable generation is none"
    ):
        run.commits.finish()
    assert not run.commits.under_way
    run.commits.finish()
    assert (run.made, len(run.store.syncs)) == ([], 1)


def test_what_is_in_ram_is_written_before_the_sync_begins() -> None:
    run = Run()
    for value, home in enumerate(run.homes):
        home.view()[:] = bytes([value + 1]) * PAGE_BYTES
    run.homes[1].mark_changed()
    run.begin().finish()
    assert run.store.stored == {("b.0.exp_avg", 1): b"\2" * PAGE_BYTES}
    assert [(home.stored().newest_copy, home.dirty) for home in run.homes] == [(0, False), (1, False)]


def test_a_write_that_failed_fails_the_generation_before_it_is_synced() -> None:
    run = Run()
    for home in run.homes:
        home.mark_changed()

    class Failing(Store):
        def write(self, *args: Any, **kwargs: Any) -> Any:
            started = super().write(*args, **kwargs)
            self.under_way[-1].fate = Failure()
            return started

    run.store = Failing()
    with pytest.raises(InfinityError, match="generation 2 could not be made durable"):
        run.begin().finish()
    assert not run.store.syncs
    assert not run.store.under_way
    assert [(home.stored().newest_copy, home.dirty) for home in run.homes] == [(0, True), (0, True)]


def test_a_commit_that_no_forward_froze_gives_way_and_the_next_step_owes_one() -> None:
    run = Run()
    commits = run.begin()
    commits.write_remaining()
    commits.step_begins()
    assert not commits.under_way
    assert run.store.syncs[0].done()
    assert commits.due(3)
    commits.begin(3)
    assert not commits.due(5)


def test_a_sync_of_a_commit_that_gave_way_tells_its_failure() -> None:
    run = Run()
    run.begin().write_remaining()
    run.store.syncs[0].fate = Failure(operation="sync")
    with pytest.raises(SwapIOError):
        run.commits.step_begins()
    assert not run.commits.under_way


def test_a_commit_is_begun_again_for_the_same_step_without_losing_what_was_frozen() -> None:
    run = Run()
    run.begin().forward_begins()
    run.begin()
    assert run.commits.frozen


def test_with_several_optimizers_a_commit_waits_until_the_loader_is_asked() -> None:
    run = Run()
    run.optimizers.count = 2
    loader = Loader()
    run.commits.tracking.add("loader", loader)
    run.begin().forward_begins()
    assert not run.commits.frozen
    run.commits.step_begins()
    run.begin(3)
    next(iter(loader))
    run.commits.forward_begins()
    assert run.commits.frozen


def test_what_cannot_be_kept_is_an_error_of_the_users() -> None:
    run = Run()
    run.generations.failure = TypeError("a lambda")
    with pytest.raises(ConfigError, match="generation 2 could not be made: a lambda"):
        run.begin().finish()
    assert not run.commits.under_way


def test_without_generations_nothing_is_ever_due() -> None:
    run = Run(keeps=False)
    assert not any(run.commits.due(step) for step in range(1, 9))
    assert run.commits.newest is None
    run.commits.touched()
    run.commits.end(4, broken=False)
    assert not run.commits.under_way


def test_the_end_commits_what_is_not_committed() -> None:
    run = Run()
    run.begin().finish()
    run.commits.end(2, broken=False)
    assert run.made == [2]
    run.commits.touched()
    run.commits.end(2, broken=False)
    assert run.made == [2, 2]
    run.commits.end(3, broken=False)
    assert (run.made, run.optimizers.taken_up) == ([2, 2, 3], 2)


def test_a_run_without_steps_has_nothing_to_commit() -> None:
    run = Run()
    run.commits.touched()
    run.commits.end(0, broken=False)
    assert run.made == []


@pytest.mark.parametrize("at_top", [False, True])
def test_a_loop_that_an_exception_left_commits_only_what_is_known_to_be_its_top(
    at_top: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run()
    if at_top:
        run.begin().forward_begins()
    else:
        run.begin()
    with caplog.at_level(logging.WARNING, logger="infinity"):
        run.commits.end(2, broken=True)
    assert run.made == ([2] if at_top else [])
    assert ["step 2 is not committed" in record.message for record in caplog.records] == ([] if at_top else [True])


def test_facts_say_what_a_run_that_resumes_must_agree_on() -> None:
    states = [SimpleNamespace(master=master, moments="fp32") for master in ("weight", "split16", "weight")]
    weights = WeightsHome((), 0)
    units = [SimpleNamespace(states=dict(enumerate(states)), weights=weights)]
    below: Any = SimpleNamespace(units=units, plan=plan_of(EVERY), facts=NO_PEERS.facts)
    facts = {"master": ["split16", "weight"], "moments": ["fp32"], "stored": ["exp_avg"]}
    assert facts_of(below) == facts
    below.facts = PeerFacts(RankPartition(3, 1), 3).facts
    assert facts_of(below) == facts | {"rank": 1, "ranks": 3, "slice_numel": 65536}


def test_of_several_ranks_a_generation_is_prepared_and_stays_with_those_that_all_have() -> None:
    run = Run(several=True)
    run.begin()
    run.commits.finish()
    assert run.generations.prepared == run.generations.steps == [2]
    assert run.commits.payload() == [EVERY, 2]
    run.commits.receive([[EVERY, 2], [EVERY + 1, 2, 0]], 1)
    assert run.generations.retired == [{2}]
    assert run.said == [2]
    assert [step for step in range(1, 13) if run.commits.due(step)] == [3, 6, 9, 12]


@pytest.mark.parametrize(("heard", "retired"), [([2, 2], [[2]]), ([2, 1], []), ([1, 1], []), ([0, 0], [])])
def test_older_generations_go_before_a_step_only_where_all_say_that_they_have_the_newest(
    heard: list[int], retired: list[list[int]]
) -> None:
    run = Run(several=True)
    run.commits.retire_early()
    run.begin()
    run.commits.finish()
    run.collectives.heard = heard
    run.commits.retire_early()
    assert run.generations.retired == retired


def test_a_process_that_trains_alone_hears_nothing() -> None:
    run = Run()
    run.begin()
    run.commits.finish()
    run.commits.retire_early()
    assert run.generations.retired == []
