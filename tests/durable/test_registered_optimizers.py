"""The optimizers of a model: one for each parameter, in the order in which they were made."""

from __future__ import annotations

import pytest

from infinity.durable.generation_body import OptimizerRecord
from infinity.durable.registered_optimizers import RegisteredOptimizers
from infinity.errors import ModelError, ResumeError
from tests.durable.test_resumed_generation import record, resumed


class Optimizer:
    def __init__(self, *names: str, lr: float = 0.5) -> None:
        self._names = set(names)
        self.lr = lr
        self.took: list[float] = []
        self.refuses = False

    def names(self) -> set[str]:
        return self._names

    def checkpoint(self) -> OptimizerRecord:
        return record(self.lr)

    def restore_progress(self, saved: OptimizerRecord) -> None:
        if self.refuses:
            raise ResumeError("another model's")
        self.took.append(saved.param_groups[0]["lr"])

    def restore_hyperparameters(self, saved: OptimizerRecord) -> None:
        self.lr = saved.param_groups[0]["lr"]


def entered(*optimizers: Optimizer) -> RegisteredOptimizers[Optimizer]:
    made: RegisteredOptimizers[Optimizer] = RegisteredOptimizers()
    for optimizer in optimizers:
        made.enter(optimizer, None)
    return made


def test_an_optimizer_takes_the_place_of_those_that_had_its_parameters() -> None:
    first, second, third = Optimizer("a"), Optimizer("b"), Optimizer("b", "c")
    optimizers = entered(first, second)
    assert optimizers.sole is None
    optimizers.enter(third, None)
    assert len(optimizers) == 2
    for optimizer in (first, third):
        optimizers.require_entered(optimizer)
    with pytest.raises(ModelError, match="replaced it"):
        optimizers.require_entered(second)
    last = Optimizer("a", "b", "c")
    optimizers.enter(last, None)
    assert optimizers.sole is last


def test_in_a_resumed_run_each_takes_up_what_the_one_in_its_place_had() -> None:
    run, optimizers = resumed(optimizers=2), entered()
    made = [Optimizer("a"), Optimizer("b"), Optimizer("c")]
    for optimizer in made:
        optimizers.enter(optimizer, run)
    assert [optimizer.took for optimizer in made] == [[0.0], [1.0], []]


def test_one_that_does_not_fit_has_not_entered_and_nobody_left() -> None:
    before, refused = Optimizer("a"), Optimizer("a")
    optimizers, refused.refuses = entered(before), True
    with pytest.raises(ResumeError):
        optimizers.enter(refused, resumed(optimizers=1))
    assert optimizers.sole is before


def test_hyperparameters_are_taken_up_once_unless_they_are_asked_for_again() -> None:
    run, optimizer = resumed(optimizers=1), Optimizer("a")
    optimizers = entered(optimizer)
    optimizers.restore_hyperparameters(None, again=True)
    assert optimizer.lr == 0.5
    optimizers.restore_hyperparameters(run, again=False)
    assert optimizer.lr == 0.0
    optimizer.lr = 0.7
    optimizers.restore_hyperparameters(run, again=False)
    assert optimizer.lr == 0.7
    optimizers.restore_hyperparameters(run, again=True)
    assert optimizer.lr == 0.0


def test_a_parameter_belongs_to_one_optimizer() -> None:
    first, second = Optimizer("a", "b"), Optimizer("c")
    optimizers = entered(first, second)
    optimizers.require_disjoint(first, {"a", "d"})
    with pytest.raises(ModelError, match="parameter 'a' belongs to another optimizer"):
        optimizers.require_disjoint(second, {"b", "a"})


def test_a_checkpoint_has_all_of_them_in_order() -> None:
    optimizers = entered(Optimizer("a", lr=1.0), Optimizer("b", lr=2.0))
    assert [each["param_groups"][0]["lr"] for each in optimizers.checkpoint()] == [1.0, 2.0]
