"""State that a resumed run gives back: that of tracked objects by their names, and that of
optimizers by their order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from infinity.durable import rng
from infinity.durable.generation_body import GenerationBody, ModelRecord, OptimizerRecord
from infinity.durable.resumed_generation import ResumedGeneration
from infinity.errors import ResumeError


def record(lr: float = 0.1) -> OptimizerRecord:
    return OptimizerRecord(
        class_name="SGD",
        param_groups=[{"params": [], "lr": lr}],
        state={},
        last_grad_norm=0.0,
        skipped_steps=0,
        skips_in_a_row=0,
    )


def resumed(tracked: dict[str, Any] | None = None, optimizers: int = 0) -> ResumedGeneration:
    model = ModelRecord(class_name="A", config=None, generation_config=None, groups=[], parameters=[])
    return ResumedGeneration(
        7,
        GenerationBody(
            optimizers=[record(float(index)) for index in range(optimizers)],
            tracked=tracked or {},
            model=model,
            buffers={},
            rng=rng.snapshot(),
            rng_before_forward=None,
        ),
    )


class Counter:
    def __init__(self) -> None:
        self.at = 0
        self.asked = 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Loader(Counter):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize("kind", [Counter, Loader])
def test_a_state_is_given_back_once_it_is_asked_for(kind: type[Counter]) -> None:
    run, item = resumed({"counter": {"at": 5}, "other": {}}), kind()
    assert run.unclaimed == {"counter", "other"}
    run.give_back("counter", item)
    assert item.at == 5
    assert run.unclaimed == {"other"}
    assert item.asked == (kind is Loader)  # a loader finds its place now, and draws for it


def test_what_was_not_tracked_is_named_with_what_was() -> None:
    with pytest.raises(ResumeError, match="did not track 'counter'; it tracked 'a', 'b'"):
        resumed({"a": {}, "b": {}}).give_back("counter", Counter())
    with pytest.raises(ResumeError, match="it tracked nothing"):
        resumed().give_back("counter", Counter())


def test_a_state_that_does_not_fit_stays_unclaimed() -> None:
    run = resumed({"counter": {"elsewhere": 5}})
    with pytest.raises(ResumeError, match="the state of 'counter' .* does not fit: 'at'"):
        run.give_back("counter", Counter())
    assert run.unclaimed == {"counter"}


def test_optimizers_come_back_in_the_order_in_which_they_were_made() -> None:
    run = resumed(optimizers=2)
    found = [run.optimizer(index) for index in range(3)]
    assert [None if each is None else each.param_groups[0]["lr"] for each in found] == [0.0, 1.0, None]
