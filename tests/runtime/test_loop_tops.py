"""Actions of a loop between a step and its next item, and between an item and its forward, at a resume."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.coordinator import registry
from tests.runtime.test_loops import WIDTH, Loop, Rows, StatefulDataLoader, config, end_badly, ended, fresh


class Fixed(Loop):
    """In its places a loop does something between the step and the next item, or before the forward."""

    def __init__(self, model: nn.Module, between: Callable[[Fixed], None], before: Callable[[Fixed], None]) -> None:
        self.between, self.before = between, before
        self.items: list[float] = []
        super().__init__(model)

    def make(self) -> None:
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optim, 0.5)
        self.loader = StatefulDataLoader(Rows(), batch_size=2, shuffle=True)
        self.done = infinity.track(self.loader, self.scheduler, model=self.model)

    def run(self, end: int = 6) -> Fixed:
        for batch in self.loader:
            self.items.append(batch[0, 0].item())
            self.before(self)
            self.step(batch)
            self.between(self)
            self.scheduler.step()
            if self.done == end:
                break
        return self


def leave(model: nn.Module) -> None:
    """Leave the model like a crash."""
    registry.coordinator_of(model).health.fail(infinity.InfinityError("no commit comes any more, as after a crash"))
    infinity.close(model)


def nothing(loop: Fixed) -> None:
    return


def double(loop: Fixed) -> None:
    with infinity.gathered(loop.model, write=True):
        loop.model.blocks[0].weight.data.mul_(2)


def look(loop: Fixed) -> None:
    """Do a forward with a graph, whose backward never comes."""
    loop.model(torch.ones(4, WIDTH))


def look_and_double(loop: Fixed) -> None:
    look(loop)
    double(loop)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize(
    ("between", "before"),
    [(look, nothing), (nothing, double), (double, look), (look, double), (look_and_double, nothing)],
)
def test_what_a_loop_does_around_its_item_is_done_once(
    between: Callable[[Fixed], None], before: Callable[[Fixed], None], tmp_path: Path, caplog: Any
) -> None:
    """A weight written between an item and its forward cost that item at a resume; a forward between a step and its
    scheduler kept the learning rate of before."""
    caplog.set_level(logging.WARNING, "infinity")
    whole = Fixed(infinity.offload(fresh(), config(tmp_path / "whole")), between, before).run()
    rate = whole.scheduler.get_last_lr()
    _, states = ended(whole)
    cut = Fixed(infinity.offload(fresh(), config(tmp_path / "cut")), between, before).run(3)
    before(cut)
    leave(cut.model)
    again = Fixed(infinity.resume(fresh(seed=7), config(tmp_path / "cut")), between, before)
    first = again.done
    assert first >= 2
    again.run()
    assert again.items == whole.items[first:]
    assert again.scheduler.get_last_lr() == rate
    _, others = ended(again)
    assert [name for name, value in states.items() if not torch.equal(others[name], value)] == []
    assert "its loop may have been elsewhere" not in caplog.text
    assert "several optimizer steps for one item" not in caplog.text


def test_several_steps_for_an_item_are_said_when_they_are_seen_and_at_a_resume(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.WARNING, "infinity")

    def twice(loop: Fixed) -> None:
        loop.step(torch.ones(4, WIDTH))

    cut = Fixed(infinity.offload(fresh(), config(tmp_path)), twice, nothing).run(5)
    assert caplog.text.count("makes several optimizer steps for one item of the loader that it tracks") == 1
    leave(cut.model)
    again = Fixed(infinity.resume(fresh(), config(tmp_path)), twice, nothing)
    again.step(torch.ones(4, WIDTH))
    assert "its loop may have been elsewhere: its tracked loader gave no item after the step" in caplog.text
    infinity.close(again.model)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize(("every", "commits"), [(2, False), (1000, True)])
@pytest.mark.parametrize("left", [6, 7], ids=["where an iteration ends", "between steps"])
def test_several_steps_for_an_item_go_on_where_an_iteration_ends_as_the_warnings_say(
    every: int, commits: bool, left: int, tmp_path: Path, caplog: Any
) -> None:
    caplog.set_level(logging.WARNING, "infinity")

    def swap(name: str) -> dict[str, Any]:
        return config(tmp_path / name) | {"commit_every": every}

    def iterations(loop: Fixed, steps: int) -> Fixed:
        for batch in loop.loader:
            loop.items.append(batch[0, 0].item())
            for _ in range(2):
                loop.step(batch)
                if loop.done == steps and steps % 2:
                    return loop
            loop.scheduler.step()
            if commits:
                infinity.commit(loop.model)
            if loop.done == steps:
                break
        return loop

    whole = iterations(Fixed(infinity.offload(fresh(), swap("whole")), nothing, nothing), 10)
    rate, (_, states) = whole.scheduler.get_last_lr(), ended(whole)
    cut = iterations(Fixed(infinity.offload(fresh(), swap("cut")), nothing, nothing), left)
    leave(cut.model)
    again = Fixed(infinity.resume(fresh(seed=7), swap("cut")), nothing, nothing)
    first = again.done
    assert first in (4, 6)
    assert iterations(again, 10).items == whole.items[first // 2 :]
    assert again.scheduler.get_last_lr() == rate
    _, others = ended(again)
    assert [name for name, value in states.items() if not torch.equal(others[name], value)] == []
    assert "its loop may have been elsewhere" not in caplog.text
    assert "several optimizer steps for one item" not in caplog.text


def test_gradients_that_a_step_has_not_used_are_missed_at_a_resume(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.WARNING, "infinity")
    model = infinity.offload(fresh(), config(tmp_path))
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(torch.ones(4, WIDTH)).backward()
        optim.step()
        optim.zero_grad()
    model(torch.ones(4, WIDTH)).backward()
    infinity.commit(model)
    leave(model)
    model = infinity.resume(fresh(), config(tmp_path))
    infinity.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(4, WIDTH))
    assert "elsewhere: there were gradients that no step had used" in caplog.text
    infinity.close(model)


def test_an_item_that_is_taken_before_its_iteration_is_missed_at_a_resume(tmp_path: Path, caplog: Any) -> None:
    """The loader is asked between a forward and its backward, and that again before the next forward."""
    caplog.set_level(logging.WARNING, "infinity")
    model = infinity.offload(fresh(), config(tmp_path))
    optim = infinity.AdamW(model.parameters(), lr=1e-2)
    loader = StatefulDataLoader(Rows(), batch_size=2)
    infinity.track(loader, model=model)
    items = iter(loader)
    item = next(items)
    for _ in range(3):
        loss = model(item)
        item = next(items)
        (loss + model(item)).backward()
        optim.step()
        optim.zero_grad()
    leave(model)
    model = infinity.resume(fresh(), config(tmp_path))
    infinity.AdamW(model.parameters(), lr=1e-2)
    infinity.track(StatefulDataLoader(Rows(), batch_size=2), model=model)
    model(torch.ones(4, WIDTH))
    assert "asked for an item between an earlier forward pass and the backward of that pass" in caplog.text
    infinity.close(model)


def test_a_loop_that_is_left_with_an_item_has_that_item_at_the_next_run(tmp_path: Path, caplog: Any) -> None:
    """`for item in loader: if done == 3: break`, and then the model is closed."""
    caplog.set_level(logging.WARNING, "infinity")
    loop = Fixed(infinity.offload(fresh(), config(tmp_path)), nothing, nothing)
    items = iter(loop.loader)
    for _ in range(3):
        loop.step(next(items))
        loop.scheduler.step()
    missed = next(items)[0, 0].item()
    infinity.close(loop.model)
    again = Fixed(infinity.resume(fresh(), config(tmp_path)), nothing, nothing).run(4)
    assert again.items == [missed]
    infinity.close(again.model)
    assert "its loop may have been elsewhere" not in caplog.text


def test_a_loop_that_is_closed_in_the_middle_of_an_iteration_is_said_to_be(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.WARNING, "infinity")
    loop = Fixed(infinity.offload(fresh(), config(tmp_path)), nothing, nothing)
    loop.step(next(iter(loop.loader)))
    infinity.close(loop.model)
    again = Fixed(infinity.resume(fresh(), config(tmp_path)), nothing, nothing)
    again.step(torch.ones(4, WIDTH))
    assert "the model was closed, and the position of its loop is not known" in caplog.text
    infinity.close(again.model)


@pytest.mark.parametrize("end", ["of its loader", "with an item", "by an exception"])
def test_a_loop_whose_last_step_was_not_due_goes_on_where_it_ended(end: str, tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.WARNING, "infinity")
    made = config(tmp_path) | {"commit_every": 4}

    def stop(loop: Fixed) -> None:
        if loop.done == 5:
            raise ArithmeticError

    loop = Fixed(infinity.offload(fresh(), made), nothing, stop if end == "by an exception" else nothing)
    if end == "of its loader":
        loop.run(end=-1)
        infinity.close(loop.model)
    elif end == "with an item":
        items = iter(loop.loader)
        for _ in range(5):
            loop.step(next(items))
            loop.scheduler.step()
        loop.items = [next(items)[0, 0].item()]
        infinity.close(loop.model)
    else:
        with pytest.raises(ArithmeticError):
            end_badly(loop)
    again = Fixed(infinity.resume(fresh(), made), nothing, nothing)
    assert again.done == loop.done >= 5
    rates = [each.scheduler.get_last_lr() for each in (again, loop)]
    again.run(end=loop.done + 1)
    if end != "of its loader":
        assert again.items == loop.items[-1:]
    infinity.close(again.model)
    assert rates[0] == rates[1]
    assert "its loop may have been elsewhere" not in caplog.text
