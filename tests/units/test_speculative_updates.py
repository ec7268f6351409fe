"""When updates speculate: each thing that must be so, one by one, and what comes before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from infinity.errors import SwapIOError
from infinity.units.speculation_choice import SpeculationChoice, UpdateCounts
from infinity.units.speculative_updates import SpeculativeUpdates
from infinity.units.update import UnitUpdate
from tests.units.fakes import unit_of, wanted

UNIT = unit_of(0)


class Model:
    """The parts that SpeculativeUpdates use, and a log of its actions. By default everything favours speculation."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.last = True
        self.fits = True
        self.under_way = self.frozen = False
        self.expected: Any = wanted(UNIT)
        self.mine: Any = lambda of_whole: of_whole
        self.failure: BaseException | None = None
        self.speculation = SpeculationChoice("during_backward")
        self.accumulation_steps = None
        self.expected_scale = 1.0
        self.speculative: list[Any] = []
        self.shadows = SimpleNamespace(lend=lambda: self.log.append("lend"))
        self.unit: Any = SimpleNamespace(index=0, name="0", gradients=SimpleNamespace(finite=True), update=None)
        here: Any = self
        shards: Any = [SimpleNamespace(localize=lambda of_whole: of_whole and self.mine(of_whole))]
        self.speculative_updates = SpeculativeUpdates(self.speculation, here, here, here, here, [self.unit], shards)

    def __getattr__(self, name: str) -> Any:
        if name in ("advance", "finish_commit", "retire_early", "finish_recovery", "reclaim_shadows"):
            return lambda: self.log.append(name)
        raise AttributeError(name)

    def is_last(self, accumulation_steps: int | None) -> bool:
        return self.last

    def due(self, step: int) -> bool:
        return step % 2 == 0

    def can_speculate(self, unit: Any) -> bool:
        return self.fits

    def speculate(self, unit: Any, requested: Any, step: int, *, committed: bool) -> bool:
        self.log.append(("speculate", unit.index, step, committed))
        return True

    def read_ahead(self, waiting: Any, step: int) -> None:
        self.log.append(("read ahead", [unit.index for unit in waiting], step))

    def drop_speculation(self) -> int:
        count = len(self.speculative)
        self.speculative = []
        if self.failure is not None:
            raise self.failure
        return count

    def expected_update(self, index: int) -> Any:
        return self.expected

    def complete(self, step: int = 3) -> list[Any]:
        optimizer: Any = self
        self.speculative_updates.gradients_complete(self.unit, optimizer, step)
        return self.log

    def begin_backward(self, step: int = 3) -> list[Any]:
        optimizer: Any = self
        others: list[Any] = [SimpleNamespace(index=index) for index in (2, 1)]
        self.speculative_updates.backward_begins(lambda: others, optimizer, step)
        return self.log


@pytest.mark.parametrize("step", [3, 4])
def test_an_update_begins_when_nothing_it_writes_is_named_by_a_commit_that_is_not_durable(step: int) -> None:
    assert Model().complete(step) == [
        "advance",
        "finish_commit",
        "retire_early",
        "finish_recovery",
        ("speculate", 0, step, step == 4),
    ]


@pytest.mark.parametrize(
    "but",
    [
        {"last": False},
        {"speculation": SpeculationChoice("before_forward")},
        {"under_way": True},
        {"finite": False},
        {"optimizer": None},
    ],
    ids=lambda but: next(iter(but)),
)
def test_it_does_not_seem_worth_while(but: dict[str, Any]) -> None:
    model = Model()
    model.unit.gradients.finite = but.pop("finite", True)
    without = "optimizer" in but
    model.speculative_updates._speculation = but.pop("speculation", model.speculation)
    for name, value in but.items():
        setattr(model, name, value)
    if without:
        model.speculative_updates.gradients_complete(model.unit, None, 3)
        model.speculative_updates.backward_begins(lambda: [], None, 3)
    else:
        model.complete()
    assert model.log == []


def test_a_commit_that_is_frozen_is_finished_first() -> None:
    model = Model()
    model.under_way = model.frozen = True
    assert "finish_commit" in model.complete()


@pytest.mark.parametrize(
    "but", [{"fits": False}, {"expected": {}}, {"mine": lambda _: {}}], ids=lambda but: next(iter(but))
)
def test_what_does_not_fit_or_is_not_wanted_does_not_begin(but: dict[str, Any]) -> None:
    model = Model()
    for name, value in but.items():
        setattr(model, name, value)
    assert model.complete() == ["advance", "finish_commit", "retire_early", "finish_recovery"]


def test_before_the_last_backward_states_are_read_that_no_speculative_update_needs() -> None:
    model = Model()
    assert model.begin_backward() == ["retire_early", "reclaim_shadows", ("read ahead", [], 3)]
    model = Model()
    model.fits = False
    assert model.begin_backward() == ["retire_early", "reclaim_shadows", ("read ahead", [2, 1], 3)]
    model = Model()
    model.speculative_updates._speculation = SpeculationChoice("before_forward")
    assert model.begin_backward() == ["lend", ("read ahead", [2, 1], 3)]


@pytest.mark.parametrize("but", [{"last": False}, {"mode": "off"}], ids=lambda but: next(iter(but)))
def test_nothing_is_read_ahead_where_it_is_not_the_last_backward_or_nothing_overlaps(but: dict[str, Any]) -> None:
    model = Model()
    model.last = but.get("last", True)
    model.speculation.mode = but.get("mode", model.speculation.mode)
    assert model.begin_backward() == []


def speculated(model: Model, index: int, requested: Any) -> Any:
    update = UnitUpdate(str(index), requested, {}, committed=False, speculated=True)
    unit = SimpleNamespace(index=index, update=update)
    model.speculative.append(unit)
    return unit


def test_a_speculative_update_is_wrong_when_the_step_wants_something_else_of_it() -> None:
    model = Model()
    for index in range(3):
        speculated(model, index, wanted(UNIT, lr=1.0))
    assert model.speculative_updates.wrong({0: wanted(UNIT, lr=1.0), 1: wanted(UNIT, lr=2.0)}) == {1, 2}


def test_what_became_of_speculative_updates_is_learned() -> None:
    model = Model()
    optimizer: Any = model
    begun = [speculated(model, 0, wanted(UNIT))]
    begun.append(SimpleNamespace(index=1, update=UnitUpdate("1", {}, {}, committed=False)))
    model.speculative_updates.step_decided(begun, {1}, {0: wanted(UNIT), 1: wanted(UNIT)}, optimizer)
    assert model.speculation.counts == UpdateCounts(early=1, undone=1, late=1)
    model.expected_scale = 0.5
    model.speculative_updates.step_decided(begun, {1}, {0: wanted(UNIT)}, optimizer)
    assert model.speculation.counts.clipped == 1


def test_what_is_undone_is_counted_though_undoing_fails() -> None:
    model = Model()
    speculated(model, 0, wanted(UNIT))
    model.failure = SwapIOError("write", path="/swap")
    with pytest.raises(SwapIOError):
        model.speculative_updates.undo("a cause", "Advice.")
    assert model.speculation.counts.undone == 1
    model.failure = None
    model.speculative_updates.drop()
    assert model.speculation.counts.undone == 1
