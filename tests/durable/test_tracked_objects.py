"""Where a loop is between two steps: the moment before its loader is asked, or the one that is told."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from infinity.durable.tracked_objects import TrackedObjects, is_data, state_of
from infinity.errors import ConfigError


class Counter:
    """A tracked object that behaves like a scheduler."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Loader(Counter):
    """Two batches a pass."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(2):
            self.at += 1
            yield self.at


def tracking_of(rates: list[int], buffers: dict[str, Any]) -> TrackedObjects:
    return TrackedObjects(lambda: rates, lambda: buffers)


class Loop:
    def __init__(self, *, loader: bool) -> None:
        self.rates, self.buffers = [0], {"mean": [0]}
        self.tracking = tracking_of(self.rates, self.buffers)
        self.counter, self.loader = Counter(), Loader()
        self.tracking.add("counter", self.counter)
        if loader:
            self.tracking.add("loader", self.loader)

    def step(self) -> None:
        self.tracking.step_ended()
        self.counter.at += 1

    def states(self) -> dict[str, int]:
        return {name: state["at"] for name, state in self.tracking.note().states.items()}


def test_all_is_noted_just_before_the_loader_is_asked() -> None:
    loop = Loop(loader=True)
    batches = iter(loop.loader)
    next(batches)
    loop.tracking.forward_begins()
    loop.step()
    assert not loop.tracking.at_top
    next(batches)
    assert loop.tracking.at_top
    loop.counter.at += 100
    assert loop.states() == {"counter": 1, "loader": 1}


def test_at_the_border_of_a_pass_the_second_note_counts() -> None:
    loop = Loop(loader=True)
    for _ in loop.loader:
        loop.tracking.forward_begins()
        loop.step()
    assert loop.states() == {"counter": 2, "loader": 2}
    loop.counter.at += 1  # a scheduler that steps once a pass
    next(iter(loop.loader))
    assert loop.states() == {"counter": 3, "loader": 2}


def test_a_loader_that_is_asked_after_its_items_forward_began_is_not_noted() -> None:
    loop = Loop(loader=True)
    batches = iter(loop.loader)
    next(batches)
    loop.step()
    next(batches)
    loop.tracking.forward_begins()
    next(iter(loop.loader))
    assert loop.states() == {"counter": 1, "loader": 1}


@pytest.mark.parametrize("alive", [True, False])
def test_a_forward_before_the_loader_is_asked_is_one_of_the_step_before_if_no_backward_of_it_may_come(
    alive: bool,
) -> None:
    loop = Loop(loader=True)
    batches = iter(loop.loader)
    next(batches)
    loop.step()
    loop.tracking.forward_begins(lambda: object() if alive else None)
    loop.counter.at += 1
    next(batches)
    assert loop.tracking.at_top
    assert loop.states() == {"counter": 2, "loader": 1}
    assert loop.tracking.note().graphs == alive


def test_what_making_an_iterator_draws_was_drawn_after_the_moment_that_is_noted() -> None:
    class Shuffling(Loader):
        def __iter__(self) -> Iterator[int]:
            return iter(random.sample(range(9), 9))

    tracking, loader = tracking_of([], {}), Shuffling()
    tracking.add("loader", loader)
    tracking.step_ended()
    before = random.getstate()[1]
    next(iter(loader))
    assert tuple(tracking.note().rng["python"][1].tolist()) == before


def test_without_a_loader_random_numbers_are_those_of_the_steps_end_and_the_rest_is_of_now() -> None:
    loop = Loop(loader=False)
    random.seed(3)
    loop.step()
    expected = random.getstate()[1]
    random.random()
    loop.counter.at += 10
    for kept in (loop.rates, loop.buffers["mean"]):
        kept.append(1)
    noted = loop.tracking.note()
    assert loop.states() == {"counter": 11}
    assert tuple(noted.rng["python"][1].tolist()) == expected
    for kept in (loop.rates, loop.buffers["mean"]):
        kept.append(2)
    assert noted.around == {"optimizers": [0, 1], "buffers": {"mean": [0, 1]}}


def test_an_iteration_that_is_said_to_have_ended_is_the_top() -> None:
    loop = Loop(loader=False)
    loop.step()
    loop.tracking.iteration_ended()
    loop.counter.at += 10
    assert loop.states() == {"counter": 1}
    loop.step()
    assert loop.states() == {"counter": 12}


def test_nothing_is_known_before_the_first_step_and_after_the_run() -> None:
    loop = Loop(loader=True)
    with pytest.raises(AssertionError, match="nothing was noted"):
        loop.tracking.note()
    loop.step()
    assert loop.tracking.has_data
    loop.tracking.forget()
    assert not loop.tracking.has_data
    with pytest.raises(AssertionError, match="nothing was noted"):
        loop.tracking.note()


def test_what_cannot_be_kept_is_named() -> None:
    class Broken(Counter):
        def state_dict(self) -> dict[str, Any]:
            return {"at": lambda: 0}

    with pytest.raises(ConfigError, match="the state of counter cannot be kept"):
        state_of("counter", Broken())


def test_a_watched_loader_is_what_it_was() -> None:
    loop = Loop(loader=True)
    assert isinstance(loop.loader, Loader)
    assert type(loop.loader).__name__ == "Loader"
    assert list(loop.loader) == [1, 2]


def test_what_gives_batches_is_data() -> None:
    assert [is_data(each) for each in (Loader(), iter([1]), Counter(), nn.Linear(1, 1), nn.Sequential(), [1], {})] == [
        True,
        True,
        *[False] * 5,
    ]


def test_the_top_is_before_the_first_of_several_items() -> None:
    """Two loaders in a zip, or one that is asked twice, give one top; an evaluation between belongs to the iteration
    before."""
    loop = Loop(loader=True)
    other = Loader()
    loop.tracking.add("other", other)
    both = zip(iter(loop.loader), iter(other), strict=True)
    next(both)
    loop.step()
    next(both)
    assert loop.states() == {"counter": 1, "loader": 1, "other": 1}
    loop.tracking.evaluated()
    loop.counter.at += 1
    next(iter(loop.loader))
    assert loop.states() == {"counter": 2, "loader": 2, "other": 2}


def test_what_is_tracked_has_moved_if_it_changed_behind_the_item() -> None:
    loop = Loop(loader=True)
    batches = iter(loop.loader)
    next(batches)
    loop.step()
    loop.counter.at = float("nan")  # type: ignore[assignment]
    next(batches)
    assert not loop.tracking.moved()
    loop.counter.at = 3
    assert loop.tracking.moved()
