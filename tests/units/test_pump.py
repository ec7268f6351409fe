"""The pump: it carries on with what is done, in the right order, and waits for nothing unless it is told to."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from infinity.base.timeline import Timeline
from infinity.errors import InfinityError, SwapIOError
from infinity.ranks.world import SingleProcessWorld
from infinity.units.health import ModelHealth
from infinity.units.pump import UpdatePump
from tests.tiers.fakes import Generations, few


class Model:
    """Updates and a commit as Updates and Commits have them, and a log of what is done to them.

    Attributes:
        running: updates that are decided, and whether each is done.
        synced: the sync of the commit is over.
        failing: by what is called, what it raises.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        self.running: list[bool] = []
        self.speculative: list[str] = []
        self.under_way = self.frozen = self.written_once = self.synced = False
        self.log: list[str] = []
        self.waited = False
        self.failing: dict[str, BaseException] = {}
        self.generations = Generations() if keeps else None
        self.health = ModelHealth(SingleProcessWorld())
        below: Any = SimpleNamespace(generations=self.generations)
        updates: Any = self
        commits: Any = self
        self.pump = UpdatePump(below, updates, commits, self.health, Timeline())

    def _log(self, what: str) -> None:
        self.log.append(what)
        if what in self.failing:
            raise self.failing[what]

    # -- as Updates ---------------------------------------------------------------------------------------------------

    @property
    def oldest_decided(self) -> str | None:
        return "a unit" if self.running else None

    def finish_written(self) -> None:
        while self.running[:1] == [True]:
            self.running.pop(0)
            self._log("finish update")

    def finish_all(self) -> None:
        self._log("finish updates")
        self.waited |= not all(self.running)
        self.running.clear()

    def undo(self, units: list[str]) -> None:
        self._log("undo")
        self.speculative = [unit for unit in self.speculative if unit not in units]

    # -- as Commits ---------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self.frozen and self.written_once and self.synced

    def due(self, step: int) -> bool:
        return self.generations is not None and step % 2 == 0

    def skip_commit(self) -> None:
        assert not self.under_way

    def begin(self, step: int) -> None:
        self._log(f"begin {step}")
        self.under_way, self.frozen, self.written_once, self.synced = True, False, False, False

    def freeze(self) -> None:
        self.frozen = self.under_way

    def write_remaining(self) -> None:
        assert not self.running, "what is not written yet would be synced"
        self._log("write rest")
        self.written_once = True

    def finish(self) -> None:
        assert not self.running
        self._log("finish")
        self.waited |= not self.synced
        self.under_way = self.frozen = False

    def step_begins(self) -> None:
        self._log("step begins")
        if self.frozen:
            self.finish()
        self.under_way = False


class ProgressMachine(RuleBasedStateMachine):
    """Background work ends in any order, while the pump is called."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.step = 0

    @rule(updates=st.integers(0, 3))
    def a_step_is_decided(self, updates: int) -> None:
        self.model.pump.finish_updates()
        self.model.pump.make_way()
        self.model.waited = False
        self.step += 1
        self.model.running = [False] * updates
        self.model.pump.begin_commit(self.step)
        assert self.model.under_way == (self.step % 2 == 0)

    @rule(which=st.integers(0, 2))
    def an_update_is_done(self, which: int) -> None:
        if which < len(self.model.running):
            self.model.running[which] = True

    @rule()
    def a_forward_freezes(self) -> None:
        self.model.freeze()

    @rule()
    def the_sync_is_done(self) -> None:
        self.model.synced = self.model.written_once

    @rule()
    def advance(self) -> None:
        self.model.pump.advance()
        assert self.model.running[:1] != [True]
        assert self.model.running or self.model.written_once or not self.model.under_way
        assert not (self.model.under_way and not self.model.running and self.model.ready)

    @rule()
    def finish_commit(self) -> None:
        self.model.pump.finish_commit()
        assert not self.model.under_way
        self.model.waited = False

    @invariant()
    def nobody_waited(self) -> None:
        assert not self.model.waited
        assert self.model.health.failure is None


TestProgress = ProgressMachine.TestCase
TestProgress.settings = few


def test_a_commit_goes_on_when_the_last_update_is_finished() -> None:
    model = Model()
    model.running = [True, False]
    model.pump.begin_commit(2)
    assert model.log == ["begin 2"]
    model.pump.advance()
    assert model.log == ["begin 2", "finish update"]
    model.running[0] = True
    model.pump.advance()
    assert model.log == ["begin 2", "finish update", "finish update", "write rest"]
    model.synced = True
    model.pump.advance()
    assert "finish" not in model.log
    model.freeze()
    model.pump.advance()
    assert model.log[-1] == "finish"


def test_a_commit_that_is_frozen_is_not_finished_before_it_is_synced() -> None:
    model = Model()
    model.pump.begin_commit(2)
    model.freeze()
    model.pump.advance()
    assert "finish" not in model.log
    model.synced = True
    model.pump.advance()
    assert model.log[-1] == "finish"


def test_a_commit_is_begun_when_it_is_due() -> None:
    model = Model()
    model.pump.begin_commit(1)
    assert not model.under_way
    model.pump.begin_commit(2)
    assert model.log == ["begin 2", "write rest"]


def test_a_commit_that_was_not_frozen_gives_way_and_one_that_was_is_finished() -> None:
    model = Model()
    model.pump.begin_commit(2)
    assert model.pump.make_way()
    model.pump.begin_commit(4)
    model.freeze()
    assert not model.pump.make_way()
    assert model.log.count("finish") == 1
    assert not model.pump.make_way()
    assert model.generations is not None
    assert model.generations.settled == 3


def test_nothing_is_settled_where_there_are_no_generations() -> None:
    Model(keeps=False).pump.finish_recovery()


def test_speculation_is_dropped_and_counted() -> None:
    model = Model()
    model.speculative = ["a", "b"]
    assert model.pump.drop_speculation() == 2
    assert model.speculative == []


ACTS: dict[str, Callable[[UpdatePump], object]] = {
    "begin 2": lambda progress: progress.begin_commit(2),
    "write rest": lambda progress: progress.begin_commit(2),
    "step begins": lambda progress: progress.make_way(),
    "undo": lambda progress: progress.drop_speculation(),
}


@pytest.mark.parametrize("what", ACTS)
def test_a_failure_is_told_to_health(what: str) -> None:
    model = Model()
    model.failing[what] = error = SwapIOError("write", path="/swap")
    with pytest.raises(SwapIOError):
        ACTS[what](model.pump)
    assert model.health.failure is error


def test_a_commit_that_fails_while_work_is_carried_on_is_told_to_health() -> None:
    model = Model()
    model.pump.begin_commit(2)
    model.freeze()
    model.synced, model.failing["finish"] = True, InfinityError("not durable")
    with pytest.raises(InfinityError, match="not durable"):
        model.pump.advance()
    assert model.health.failure is not None
