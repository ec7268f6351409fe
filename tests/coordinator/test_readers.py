"""Who may read the weights: whoever is in a forward, a backward or a gathering; and nobody when the last has ended."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from infinity.coordinator.readers import ParameterReaders
from infinity.errors import ModelError
from tests.tiers.fakes import few


class ReadersMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.readers = ParameterReaders()
        self.gathered: list[Any] = []

    @initialize()
    def begin(self) -> None:
        self.forward = self.backward = False

    @rule(dead=st.booleans())
    def forward_begins(self, dead: bool) -> None:
        self.readers.begin_reading(self._end if dead else lambda: None)
        self.dead = dead
        self.forward, self.backward = True, False

    def _end(self) -> None:
        self.readers.end_reading()
        self.forward = False

    @rule()
    def forward_ends(self) -> None:
        self.readers.end_reading()
        self.forward = False

    @rule()
    def backward_begins(self) -> None:
        self.readers.backward_begins()
        self.backward = True

    @rule()
    def backward_ends(self) -> None:
        self.readers.backward_ends()
        self.backward = False

    @rule()
    def gather(self) -> None:
        self.gathered.append(self.readers.gathering())
        self.gathered[-1].__enter__()

    @precondition(lambda self: self.gathered)
    @rule(raised=st.booleans())
    def scatter(self, raised: bool) -> None:
        self.gathered.pop().__exit__(*((ValueError, ValueError(), None) if raised else (None, None, None)))

    @rule()
    def a_dead_forward_is_forgotten(self) -> None:
        begun = self.forward
        self.readers.forget_dead()
        assert self.forward == (begun and not self.dead)

    @rule()
    def step_begins(self) -> None:
        if self.gathered:
            with pytest.raises(ModelError, match="inside `with infinity.gathered"):
                self.readers.step_begins()
        else:
            self.readers.step_begins()
            self.forward = self.backward = False

    @invariant()
    def who_may_read(self) -> None:
        assert self.readers.passing == self.forward
        assert self.readers.may_read == (self.forward or bool(self.gathered))
        assert self.readers.nobody == (not (self.forward or self.backward or self.gathered))


TestReaders = ReadersMachine.TestCase
TestReaders.settings = few


def test_a_backward_may_read_in_its_own_thread() -> None:
    readers, seen = ParameterReaders(), []

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: Any, *gradients: torch.Tensor) -> Any:
            seen.append((readers.passing, readers.may_read))
            return gradients[0]

    readers.backward_begins()
    assert (readers.passing, readers.may_read, readers.nobody) == (False, False, False)
    Backward.apply(torch.ones(1, requires_grad=True)).backward()
    assert seen == [(True, True)]


def test_a_backward_begins_only_where_no_gradients_are_gathered() -> None:
    readers = ParameterReaders()
    with readers.gathering():
        readers.backward_begins()
    readers.backward_ends()
    refused = pytest.raises(ModelError, match="a backward pass inside .*grads=True")
    with readers.gathering(grads=True), readers.gathering(), refused:
        readers.backward_begins()
    assert readers.nobody
    readers.backward_begins()


def test_what_is_dead_is_ended_before_a_step_is_refused_for_it() -> None:
    readers = ParameterReaders()

    class Call:
        def __init__(self) -> None:
            self.reading = readers.gathering()
            self.reading.__enter__()

        def end(self) -> None:
            self.reading.__exit__(None, None, None)

    call = Call()
    readers.watch(call.end)
    readers.step_begins()
    assert readers.nobody
