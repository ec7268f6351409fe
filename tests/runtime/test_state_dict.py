"""torch's own state_dict and load_state_dict, of an offloaded model."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.coordinator import registry
from infinity.units.released_parameters import ReleasedParameter
from tests.models import llama, loss_of
from tests.runtime.gathering import Trained, assert_same, changed, step, weights


def test_state_dict_of_the_model_and_of_a_part_are_copies_of_the_weights(trained: Trained) -> None:
    model, batch, optim = trained
    expected = weights(model)
    whole, part = model.state_dict(), model.model.layers[1].state_dict()
    assert_same(whole, expected)
    assert_same(part, {name: expected[f"model.layers.1.{name}"] for name in part})
    step(model, batch, optim)
    assert_same(whole, expected)
    assert all(isinstance(parameter, ReleasedParameter) for parameter in model.parameters())


def test_state_dict_in_the_forward_is_a_copy_too(trained: Trained) -> None:
    """There the weights are views of slots, which will be other weights."""
    model, batch, _ = trained
    expected, seen = weights(model), []
    hook = model.model.layers[1].register_forward_hook(lambda module, *_: seen.append(module.state_dict()))
    loss_of(model, batch)
    hook.remove()
    assert_same(seen[0], {name: expected[f"model.layers.1.{name}"] for name in seen[0]})


def test_a_state_dict_that_does_not_fit_memory_host_is_refused_with_the_other_ways(offload: Any) -> None:
    model = offload(nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(16)]), memory={"host": "48MiB"})
    with pytest.raises(infinity.ReleasedParameterError, match=r"would take 64\.\d+ MiB of RAM.*save_pretrained"):
        model.state_dict()
    assert model[3].state_dict()["weight"].isfinite().all()


def test_load_state_dict_changes_the_weights_that_the_run_goes_on_with(trained: Trained) -> None:
    model, batch, optim = trained
    before = model.state_dict()
    step(model, batch, optim)
    assert model.load_state_dict(changed(before)).missing_keys == []
    assert_same(weights(model), changed(before))
    step(model, batch, optim)


def test_load_state_dict_refuses_as_torch_does_and_leaves_what_did_not_fit(trained: Trained) -> None:
    model, batch, optim = trained
    before = weights(model)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})
    with pytest.raises(RuntimeError, match="size mismatch for lm_head.weight"):
        model.load_state_dict({"lm_head.weight": torch.zeros(3)}, strict=False)
    with pytest.raises(infinity.ReleasedParameterError, match="assign=True"):
        model.load_state_dict(before, assign=True)
    assert_same(weights(model), before)
    step(model, batch, optim)


# -- calls that end in the middle -------------------------------------------------------------------------------------


def _interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


def _read_until_interrupted(model: nn.Module) -> None:
    hook = model.model.layers[1].register_state_dict_post_hook(_interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            model.state_dict()
    finally:
        hook.remove()


def _load_until_interrupted(model: nn.Module) -> None:
    state = {name: value * 2 for name, value in infinity.state_dict(model)}
    hook = model.lm_head.register_load_state_dict_pre_hook(_interrupt)
    norm = model.model.layers[1].input_layernorm
    kept = norm.register_load_state_dict_post_hook(_interrupt)
    norm._load_state_dict_post_hooks.move_to_end(kept.id, last=False)  # type: ignore[attr-defined]
    try:
        with pytest.raises(KeyboardInterrupt):
            model.load_state_dict(state)
    finally:
        hook.remove()
        kept.remove()


def _nothing_is_gathered(model: nn.Module) -> bool:
    coordinator = registry.coordinator_of(model)
    open_units = [unit.full.name for unit in coordinator.units if unit.views.gathered or unit.weights.uses]
    return not open_units and coordinator.readers.nobody


@pytest.mark.covering(strength=1, most=12)
@pytest.mark.parametrize("end", [_read_until_interrupted, _load_until_interrupted])
@pytest.mark.parametrize("then", ["forward", "step", "evaluation", "state_dict", "load", "iterate", "gather", "close"])
def test_after_an_interrupted_call_the_next_one_finds_nothing_open(then: str, end: Any, trained: Trained) -> None:
    model, batch, optim = trained
    if then == "step":
        loss_of(model, batch).backward()
    end(model)
    assert not _nothing_is_gathered(model)
    if then == "forward":
        assert step(model, batch, optim) > 0
    elif then == "step":
        optim.step()
    elif then == "evaluation":
        with torch.no_grad():
            assert loss_of(model, batch).isfinite()
    elif then == "state_dict":
        assert all(value.isfinite().all() for value in model.state_dict().values())
    elif then == "load":
        before = weights(model)
        model.load_state_dict(before)
        assert_same(weights(model), before)
    elif then == "iterate":
        weights(model)
    elif then == "gather":
        with infinity.gathered(model, model.lm_head, write=True):
            model.lm_head.weight.data.zero_()
    else:
        infinity.close(model)
        return
    assert _nothing_is_gathered(model)
    assert all(isinstance(parameter, ReleasedParameter) for parameter in model.parameters())


def test_what_an_interrupted_load_changed_in_its_last_module_is_dropped(trained: Trained) -> None:
    model, batch, optim = trained
    before = weights(model)
    _load_until_interrupted(model)
    name = "model.layers.1.input_layernorm.weight"
    after = weights(model)
    assert torch.equal(after[name], before[name])
    assert torch.equal(
        after["model.layers.0.input_layernorm.weight"], before["model.layers.0.input_layernorm.weight"] * 2
    )
    assert step(model, batch, optim) > 0


def test_a_state_dict_that_another_thread_reads_is_not_taken_for_a_dead_one(trained: Trained) -> None:
    model, batch, _ = trained
    reading, go_on, read = threading.Event(), threading.Event(), {}

    def wait(*args: Any) -> None:
        reading.set()
        assert go_on.wait(60)

    expected = weights(model)
    hook = model.model.layers[1].register_state_dict_pre_hook(wait)
    reader = threading.Thread(target=lambda: read.update(model.state_dict()))
    reader.start()
    assert reading.wait(60)
    with torch.no_grad():
        loss_of(model, batch)
    go_on.set()
    reader.join()
    hook.remove()
    assert_same(read, expected)


def test_while_a_thread_reads_another_one_is_refused(trained: Trained) -> None:
    model, *_ = trained
    expected, refused = weights(model), []

    def read_beside(*args: Any) -> None:
        def read() -> None:
            with pytest.raises(infinity.ModelError, match="running in another thread") as error:
                model.state_dict()
            refused.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        reader.join()

    hook = model.model.layers[1].register_state_dict_pre_hook(read_beside)
    assert_same(model.state_dict(), expected)
    hook.remove()
    assert len(refused) == 1


def test_an_interrupted_state_dict_does_not_keep_the_model(swap_config: Any) -> None:
    model = infinity.offload(llama()[0], swap_config("nvme"))
    seen = weakref.ref(model)
    _read_until_interrupted(model)
    del model
    gc.collect()
    assert seen() is None
