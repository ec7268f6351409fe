"""A linear layer that memory.device has no room for is tiled by infinity.offload, and a line says so."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.coordinator import registry
from infinity.runtime.deferred_parameters import defer_in_memory
from infinity.runtime.tiles import TiledLinear
from tests import models
from tests.conftest import require_no_leaks
from tests.runtime.test_tiles import Model, model_and_batch, train

pytestmark = pytest.mark.cpu_only("it is about what fits: the simulated device has room for gradients beside")
SMALL = {"device": "640KiB", "host": "64MiB"}


def tiles_of(model: nn.Module) -> list[str]:
    units = registry.coordinator_of(model).units
    return [unit.name for unit in units if "infinity_tile" in unit.name]


def test_a_layer_that_does_not_fit_is_tiled_and_training_is_the_same(
    offload: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    losses = []
    for name, memory in (("roomy", {"device": "64MiB", "host": "64MiB"}), ("small", SMALL)):
        model, batch = model_and_batch()
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="infinity"):
            offload(model, memory=memory, nvme={"paths": [str(tmp_path / name)]})
        said = [record.message for record in caplog.records if "tiles" in record.message]
        assert len(said) == (name == "small")
        losses.append(train(model, batch))
        require_no_leaks(model)
    assert said == ["memory.device is 640.00 KiB, and 'large' has 1.00 MiB of weights: it runs in 7 tiles"]
    assert tiles_of(model) == [f"large.infinity_tile_{index}" for index in range(7)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("kind", ["meta", "deferred"])
def test_models_without_values_in_memory_are_tiled_too(kind: str, offload: Any, swap_config: Any) -> None:
    wanted = {name: value.clone() for name, value in model_and_batch()[0].state_dict().items()}
    if kind == "meta":
        with torch.device("meta"):
            model = Model()
        infinity.offload(model, swap_config(memory=SMALL), source=wanted.__getitem__)
    else:
        model, _ = model_and_batch()
        defer_in_memory(model)
        infinity.offload(model, swap_config(memory=SMALL))
    assert len(tiles_of(model)) == 7
    found = dict(infinity.state_dict(model))
    infinity.close(model)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_what_tiles_do_not_help_keeps_its_error(offload: Any) -> None:
    model, _ = models.tied_llama()  # whose embedding does not fit
    with pytest.raises(infinity.PlanError, match=r"memory.device is 24"):
        offload(model, memory={"device": "24KiB", "host": "64MiB"})
    assert not any(isinstance(module, TiledLinear) for module in model.modules())


def test_a_run_that_was_tiled_by_itself_goes_on_with_any_memory_to_the_same_bits(
    swap_config: Any, tmp_path: Path
) -> None:
    results = []
    for split in (6, 3):
        options = {"commit_every": 1, "nvme": {"paths": [str(tmp_path / str(split))]}}
        model, batch = model_and_batch(torch.bfloat16)
        small = {"device": "320KiB", "host": "64MiB"}
        infinity.offload(model, swap_config(memory=small, **options))
        losses = train(model, batch, split)
        if split < 6:
            infinity.close(model)
            model, batch = model_and_batch(torch.bfloat16)
            infinity.resume(model, swap_config(memory={"device": "64MiB", "host": "64MiB"}, **options))
            losses += train(model, batch, 6 - split)
        assert tiles_of(model)
        results.append((losses, dict(infinity.state_dict(model))))
        infinity.close(model)
    assert results[0][0] == results[1][0]
    assert all(torch.equal(results[1][1][name], value) for name, value in results[0][1].items())


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_blocks_whose_layers_are_all_too_large_train_in_little_room(
    activations: str, offload: Any, tmp_path: Path
) -> None:
    """While a block is recomputed the weights of all its tiles are not held at the same time."""
    losses = []
    for device in ("64MiB", "512KiB"):
        torch.manual_seed(0)
        model, batch = models.llama(layers=2)
        for layer in model.model.layers:  # 512 KiB for each of three layers
            layer.mlp.gate_proj, layer.mlp.up_proj = (nn.Linear(64, 2048, bias=False) for _ in range(2))
            layer.mlp.down_proj = nn.Linear(2048, 64, bias=False)
        memory = {"device": device, "host": "64MiB"}
        offload(model, memory=memory, nvme={"paths": [str(tmp_path / device)]}, activations=activations)
        losses.append(train(model, batch))
        require_no_leaks(model)
        slot_bytes = registry.coordinator_of(model).plan.budgets.slot_bytes
    assert len({name.rpartition(".")[0] for name in tiles_of(model)}) == 6
    assert slot_bytes <= 512 << 10
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
