"""Several backward passes before a step: updates speculate in the last one only, once it is known which that is."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.coordinator import registry
from infinity.units.speculation_choice import UpdateCounts
from tests.conftest import states_of, weights_of
from tests.models import llama, loss_of
from tests.runtime.test_overlap import config_of, model_and_batches

PASSES, STEPS = 4, 3
Train = Callable[..., Any]
Warnings = Callable[[], list[str]]


@pytest.fixture
def offloaded(tmp_path: Path) -> Iterator[Train]:
    """A model whose updates all can speculate, and its batches."""
    opened = []

    def make(**config: Any) -> tuple[Any, list[Any]]:
        model, batches = model_and_batches(PASSES)
        given = {"weights": "nvme", "cached": "none", "overlap": "during_backward", "moments": "fp32"} | config
        model = infinity.offload(model, config_of(tmp_path / f"swap{len(opened)}", **given))
        opened.append(model)
        return model, batches

    yield make
    for model in opened:
        infinity.close(model, discard=True)


def counts_of(model: Any) -> UpdateCounts:
    return registry.coordinator_of(model).speculation_choice.counts


def begun(model: Any) -> int:
    """Speculative updates under way."""
    return len(registry.coordinator_of(model).update_queue.speculative)


def accumulate(model: Any, batches: list[Any], no_sync: Callable[[], Any] = nullcontext) -> list[int]:
    """Do the passes of one step, all but the last in `no_sync`, and return the number of speculative updates in
    progress after each."""
    seen = []
    for index, batch in enumerate(batches):
        with nullcontext() if index == len(batches) - 1 else no_sync():
            (loss_of(model, batch) / len(batches)).backward()
        seen.append(begun(model))
    return seen


def steps(model: Any, batches: list[Any], optim: Any, no_sync: Callable[[], Any] = nullcontext) -> list[list[int]]:
    seen = []
    for _ in range(STEPS):
        seen.append(accumulate(model, batches, no_sync))
        optim.step()
        optim.zero_grad()
    infinity.synchronize(model)
    return seen


def require_speculation_in_the_last_pass_only(model: Any, seen: list[list[int]], warnings: Warnings) -> None:
    for *before, last in seen:
        assert before == [0] * (PASSES - 1)
        assert last > 0
    assert counts_of(model).early > 0
    assert counts_of(model).undone == 0
    assert warnings() == []


@pytest.fixture
def warnings(caplog: Any) -> Warnings:
    """Gives those of the test so far."""
    caplog.set_level(logging.WARNING, "infinity")
    return lambda: list(caplog.messages)


@pytest.mark.parametrize("way", ["model", "function"])
def test_with_no_sync_updates_begin_in_the_last_pass_of_the_first_step_on(
    way: str, offloaded: Train, warnings: Warnings
) -> None:
    model, batches = offloaded()
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    seen = steps(model, batches, optim, model.no_sync if way == "model" else lambda: infinity.no_sync(model))
    require_speculation_in_the_last_pass_only(model, seen, warnings)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2"])
def test_a_number_of_passes_that_is_none_is_refused(wrong: Any, offload: Any) -> None:
    model = offload(llama()[0])
    with pytest.raises(infinity.ConfigError, match="accumulation_steps must be a whole number"):
        infinity.AdamW(model.parameters(), accumulation_steps=wrong)


def test_with_accumulation_steps_likewise(offloaded: Train, warnings: Warnings) -> None:
    model, batches = offloaded()
    optim = infinity.AdamW(model.parameters(), lr=1e-3, accumulation_steps=PASSES)
    require_speculation_in_the_last_pass_only(model, steps(model, batches, optim), warnings)


def test_with_neither_one_warning_names_the_setting_and_the_next_step_knows(
    offloaded: Train, warnings: Warnings
) -> None:
    model, batches = offloaded()
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    first, *others = steps(model, batches, optim)
    assert first[0] > 0
    assert first[1:] == [0] * (PASSES - 1)
    assert counts_of(model).undone == first[0]
    for *before, last in others:
        assert before == [0] * (PASSES - 1)
        assert last > 0
    (warning,) = warnings()
    assert "accumulation_steps=" in warning
    assert "model.no_sync()" in warning


def test_a_wrong_accumulation_steps_costs_no_bit(offloaded: Train) -> None:
    results = []
    for passes in (PASSES, 1, 2, PASSES + 1):
        model, batches = offloaded()
        optim = infinity.AdamW(model.parameters(), lr=1e-3, accumulation_steps=passes)
        steps(model, batches, optim)
        results.append(weights_of(model) | states_of(model))
        assert (counts_of(model).undone > 0) == (passes in (1, 2))
    for result in results[1:]:
        assert all(torch.equal(values, results[0][name]) for name, values in result.items())


def test_no_sync_may_be_nested_and_is_left_by_an_exception(offloaded: Train, warnings: Warnings) -> None:
    model, batches = offloaded()
    infinity.AdamW(model.parameters(), lr=1e-3)
    with model.no_sync():
        with pytest.raises(ZeroDivisionError), model.no_sync():
            raise ZeroDivisionError
        loss_of(model, batches[0]).backward()
        assert begun(model) == 0, "the outer one goes on"
    loss_of(model, batches[1]).backward()
    assert begun(model) > 0
    assert warnings() == []


def test_a_pass_that_fails_in_no_sync_leaves_a_good_next_step(offloaded: Train, warnings: Warnings) -> None:
    model, batches = offloaded()
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    failing = loss_of(model, batches[0])
    failing.grad_fn.next_functions[0][0].register_prehook(lambda gradients: 1 / 0)
    with pytest.raises(ZeroDivisionError), model.no_sync():
        failing.backward()
    optim.zero_grad()
    require_speculation_in_the_last_pass_only(model, steps(model, batches, optim, model.no_sync), warnings)


def test_no_sync_on_a_closed_model_says_so(offloaded: Train) -> None:
    model, _ = offloaded()
    no_sync = model.no_sync
    infinity.close(model, discard=True)
    for call in (no_sync, lambda: infinity.no_sync(model)):
        with pytest.raises(infinity.InfinityError, match="this model was closed"):
            call()


def test_no_sync_of_a_model_that_is_not_offloaded_says_so() -> None:
    with pytest.raises(infinity.ModelError, match="is not offloaded"):
        infinity.no_sync(torch.nn.Linear(2, 2))


def test_no_sync_keeps_no_model_alive(offloaded: Train, tmp_path: Path) -> None:
    model, _ = model_and_batches(1)
    config = config_of(tmp_path / "gone", weights="nvme", cached="none", overlap="during_backward", moments="fp32")
    model = infinity.offload(model, config)
    no_sync, coordinator = model.no_sync, weakref.ref(registry.coordinator_of(model))
    del model
    gc.collect()
    assert coordinator() is None
    with pytest.raises(infinity.InfinityError, match="no longer exists"):
        no_sync()


def test_a_model_keeps_its_own_no_sync(offloaded: Train, tmp_path: Path) -> None:
    class Own(torch.nn.Linear):
        def no_sync(self) -> str:
            return "mine"

    model = infinity.offload(Own(4, 4), {"nvme": {"paths": [str(tmp_path / "own")]}, "memory": {"host": "64MiB"}})
    assert model.no_sync() == "mine"
    with infinity.no_sync(model):
        model(torch.ones(1, 4)).sum().backward()
    infinity.close(model)
