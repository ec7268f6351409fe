"""infinity.tile: a linear layer in tiles of its rows computes the same, with the weight of one tile on the device."""

from __future__ import annotations

import copy
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.coordinator import registry
from infinity.errors import ConfigError, ModelError, StaleWeightsError
from infinity.runtime import micro_batches
from infinity.runtime.tiles import TiledLinear
from tests import models, sampling
from tests.conftest import require_no_leaks
from tests.models import loss_of

STEPS = sampling.number(2, 3)
ROWS, COLUMNS = 1024, 256


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def pair(dtype: torch.dtype, tiles: int, rows: int = 96, columns: int = 64) -> tuple[nn.Linear, nn.Linear]:
    """Return the same layer twice: whole, and in tiles."""
    layer = nn.Linear(columns, rows).to(dtype)
    return layer, infinity.tile(copy.deepcopy(layer), tiles)


def gradients(layer: nn.Linear, given: torch.Tensor, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the layer's output, and the gradients of its input, its weight and its bias."""
    given = given.detach().clone().requires_grad_()
    made = layer(given)
    (made * weights).sum().backward()
    parts = layer.tiles if isinstance(layer, TiledLinear) else [layer]
    return {
        "output": made.detach(),
        "input": given.grad,
        "weight": torch.cat([part.weight.grad for part in parts]),
        "bias": torch.cat([part.bias.grad for part in parts]),
    }


def in_fp32(layer: nn.Linear) -> nn.Linear:
    return copy.deepcopy(layer).float()


class Model(nn.Module):
    """A few layers around one that is larger than all others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(COLUMNS, COLUMNS) for _ in range(3))
        self.large = nn.Linear(COLUMNS, ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return (self.large(x) ** 2).mean()


def model_and_batch(dtype: torch.dtype = torch.float32) -> tuple[Model, models.Batch]:
    torch.manual_seed(0)
    x = torch.randn(8, COLUMNS, generator=torch.Generator().manual_seed(3))
    return Model().to(dtype), {"x": x.to(dtype)}


def train(model: nn.Module, batch: models.Batch, steps: int = STEPS, optim: Any = None) -> list[float]:
    optim = optim or infinity.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        loss = loss_of(model, batch)
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def third(model: Any, batch: models.Batch) -> torch.Tensor:
    return model(**batch).loss / 3


# -- arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiles", [2, 3, 7, 96])
def test_a_tiled_layer_computes_what_the_whole_one_does(tiles: int) -> None:
    whole, tiled = pair(torch.float32, tiles)
    given, weights = torch.randn(5, 3, 64), torch.randn(5, 3, 96)
    wanted = gradients(whole, given, weights)
    for name, value in gradients(tiled, given, weights).items():
        assert relative(value, wanted[name]) <= 1e-6, name


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tiles", [2, 8, 64])
def test_in_16_bits_a_tiled_layer_is_as_near_to_fp32_as_the_whole_one(tiles: int, dtype: torch.dtype) -> None:
    whole, tiled = pair(dtype, tiles, rows=2048, columns=256)
    given, weights = torch.randn(64, 256).to(dtype), torch.randn(64, 2048).to(dtype)
    exact = gradients(in_fp32(whole), given.float(), weights.float())
    ordinary, ours = gradients(whole, given, weights), gradients(tiled, given, weights)
    for name, value in exact.items():
        assert relative(ours[name], value) <= 1.1 * relative(ordinary[name], value), name


def test_frozen_weights_and_inputs_without_gradients_work() -> None:
    whole, tiled = pair(torch.float32, 4)
    given = torch.randn(3, 64)
    for layer in (whole, tiled):
        layer(given).sum().backward()
        assert given.grad is None
    assert torch.allclose(torch.cat([tile.weight.grad for tile in tiled.tiles]), whole.weight.grad)
    for layer in (whole, tiled):
        layer.requires_grad_(False)
    given.requires_grad_()
    wanted, found = (torch.autograd.grad(layer(given).pow(2).sum(), given)[0] for layer in (whole, tiled))
    assert relative(found, wanted) <= 1e-6


def test_a_graph_that_is_kept_can_be_run_backward_again() -> None:
    whole, tiled = pair(torch.float32, 4)
    given = torch.randn(3, 64, requires_grad=True)
    made = tiled(given)
    for _ in range(3):
        (found,) = torch.autograd.grad(made.sum(), given, retain_graph=True)
        (wanted,) = torch.autograd.grad(whole(given).sum(), given)
        assert relative(found, wanted) <= 1e-6


def test_gradients_of_gradients_are_those_of_the_whole_layer() -> None:
    whole, tiled = pair(torch.float32, 4)
    found = []
    for layer in (whole, tiled):
        given = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        (first,) = torch.autograd.grad(layer(given).pow(3).sum(), given, create_graph=True)
        first.pow(2).sum().backward()
        parts = layer.tiles if isinstance(layer, TiledLinear) else [layer]
        found.append((given.grad, torch.cat([part.weight.grad for part in parts])))
    for ours, wanted in zip(found[1], found[0], strict=True):
        assert relative(ours, wanted) <= 1e-5


def test_a_layer_without_bias_has_none_in_tiles() -> None:
    tiled = infinity.tile(nn.Linear(8, 10, bias=False), 3)
    assert tiled.bias is None
    assert [name for name, _ in tiled.named_parameters()] == [f"infinity_tile_{i}.weight" for i in range(3)]
    assert sum(tile.weight.shape[0] for tile in tiled.tiles) == 10


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["nvme", "host"])
def test_training_in_tiles_has_the_losses_of_the_whole_layer(tier: str, offload: Any, tmp_path: Path) -> None:
    losses = []
    for tiles in (0, 4):
        model, batch = model_and_batch()
        if tiles:
            infinity.tile(model.large, tiles)
        offload(model, tier, nvme={"paths": [str(tmp_path / str(tiles))]})
        losses.append(train(model, batch))
        require_no_leaks(model)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.cpu_only("it is about what fits: the simulated device has room for gradients beside")
def test_the_device_needs_room_for_two_tiles_and_not_for_the_layer(offload: Any, tmp_path: Path) -> None:
    layer_bytes, block_bytes, needed = 4 * ROWS * COLUMNS, 4 * COLUMNS * COLUMNS, {}
    for tiles in (1, 8):
        model, batch = model_and_batch()
        if tiles > 1:
            infinity.tile(model.large, tiles)
        room = layer_bytes + 2 * block_bytes if tiles == 1 else 5 * block_bytes // 2
        offload(model, memory={"device": f"{room}B", "host": "64MiB"}, nvme={"paths": [str(tmp_path / str(tiles))]})
        train(model, batch)
        coordinator = registry.coordinator_of(model)
        resident = sum(unit.full.weight_bytes for unit in coordinator.units if unit.weights.slot is not None)
        needed[tiles] = coordinator.plan.budgets.slot_bytes
        assert resident <= needed[tiles]
    assert needed[1] > layer_bytes
    assert needed[8] < 2.1 * block_bytes  # two blocks, which are larger than a tile


@pytest.mark.covering(most=2)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "t5"])
def test_layers_in_blocks_can_be_tiled(architecture: str, offload: Any, tmp_path: Path) -> None:
    losses = []
    for tiles in (0, 3):
        torch.manual_seed(0)
        model, batch = models.ARCHITECTURES[architecture]()
        layers = [
            module for name, module in model.named_modules() if type(module) is nn.Linear and "lm_head" not in name
        ]
        for layer in layers[:4] if tiles else []:
            infinity.tile(layer, tiles)
        offload(model, nvme={"paths": [str(tmp_path / str(tiles))]}, activations="recompute")
        losses.append(train(model, batch))
        require_no_leaks(model)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("where", ["lm_head", "model.layers.1.mlp.down_proj"])
def test_micro_batches_go_through_tiles_one_after_the_other(
    where: str, activations: str, offload: Any, tmp_path: Path
) -> None:
    results = []
    for vertical in (False, True):
        torch.manual_seed(0)
        model, batch = models.llama()
        infinity.tile(model.get_submodule(where), 4)
        offload(model, nvme={"paths": [str(tmp_path / str(vertical))]}, activations=activations)
        optim = infinity.AdamW(model.parameters(), lr=1e-3)
        batches = [{**batch, "input_ids": torch.roll(batch["input_ids"], i, 1)} for i in range(3)]
        losses = []
        for _ in range(STEPS):
            found = infinity.backward(model, partial(third, model), batches, vertical=vertical)
            optim.step()
            optim.zero_grad()
            losses.append([loss.item() for loss in found])
        results.append((losses, dict(infinity.state_dict(model))))
        if vertical and where == "lm_head":  # in a block the residual goes past the tiles: they are no chain
            chain = micro_batches._known[model].chain
            assert chain is not None
            units = registry.coordinator_of(model).units
            tiles = {unit.index for unit in units if "infinity_tile" in unit.name}
            alone = [set(stage.units) & tiles for stage in chain.stages if set(stage.units) & tiles]
            assert alone == [{index} for index in sorted(tiles)]
        require_no_leaks(model)
    assert results[0][0] == results[1][0]
    for name, value in results[0][1].items():
        assert torch.equal(results[1][1][name], value), name


def test_weights_that_were_changed_since_the_forward_are_refused_by_its_backward(offload: Any) -> None:
    model, batch = model_and_batch()
    infinity.tile(model.large, 4)
    offload(model)
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    late = loss_of(model, batch)
    loss_of(model, batch).backward()
    optim.step()
    with pytest.raises(StaleWeightsError):
        late.backward()
    _, tiled = pair(torch.float32, 4)
    made = tiled(torch.randn(3, 64, requires_grad=True))
    with torch.no_grad():
        tiled.tiles[3].weight.mul_(2)
    with pytest.raises(StaleWeightsError, match="of a layer in tiles from before they were changed"):
        made.sum().backward()


# -- names ------------------------------------------------------------------------------------------------------------


def test_a_state_dict_has_the_whole_weight_and_loads_into_either() -> None:
    whole, tiled = pair(torch.float32, 5)
    state = tiled.state_dict()
    assert list(state) == ["weight", "bias"]
    for name, value in whole.state_dict().items():
        assert torch.equal(state[name], value)
    other = infinity.tile(nn.Linear(64, 96), 3)
    other.load_state_dict(whole.state_dict())
    assert torch.equal(other.weight, whole.weight)
    plain = nn.Linear(64, 96)
    plain.load_state_dict(state)
    assert torch.equal(plain.weight, whole.weight)


def test_an_offloaded_models_state_dict_has_whole_weights(offload: Any) -> None:
    model, _ = model_and_batch()
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    infinity.tile(model.large, 4)
    offload(model)
    for found in (dict(model.state_dict()), dict(infinity.state_dict(model))):
        assert sorted(found) == sorted(wanted)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
    changed = {name: value + 1 for name, value in wanted.items()}
    model.load_state_dict(changed)
    found = dict(infinity.state_dict(model))
    assert all(torch.equal(found[name], value) for name, value in changed.items())
    with infinity.gathered(model, model.large):
        assert torch.equal(model.large.weight, changed["large.weight"])


def test_values_of_a_source_are_taken_by_rows(offload: Any) -> None:
    wanted = model_and_batch()[0].state_dict()
    with torch.device("meta"):
        model = Model()
    infinity.tile(model.large, 4)
    asked: list[str] = []

    def source(name: str) -> torch.Tensor:
        asked.append(name)
        return wanted[name]

    model = infinity.offload(
        model, {"weights": "host", "optimizer": "host", "memory": {"host": "64MiB"}}, source=source
    )
    assert set(asked) == set(wanted)
    found = dict(infinity.state_dict(model))
    infinity.close(model)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_a_resumed_run_is_tiled_as_before_and_ends_in_the_same_bits(swap_config: Any, tmp_path: Path) -> None:
    def made() -> tuple[Model, models.Batch]:
        model, batch = model_and_batch(torch.bfloat16)
        infinity.tile(model.large, 4)
        return model, batch

    results = []
    for split in (6, 3):
        config = swap_config(commit_every=1, nvme={"paths": [str(tmp_path / str(split))]})
        model, batch = made()
        infinity.offload(model, config)
        losses = train(model, batch, split)
        if split < 6:
            infinity.close(model)
            model, batch = made()
            infinity.resume(model, config)
            losses += train(model, batch, 6 - split)
        results.append((losses, dict(infinity.state_dict(model))))
        infinity.close(model)
    assert results[0][0] == results[1][0]
    assert all(torch.equal(results[1][1][name], value) for name, value in results[0][1].items())


def test_the_whole_weight_is_read_and_never_changed_in_vain(offload: Any) -> None:
    whole, tiled = pair(torch.float32, 4)
    given = torch.randn(3, 64)
    assert torch.equal(nn.functional.linear(given, tiled.weight, tiled.bias), whole(given))
    assert type(tiled.weight * 2) is torch.Tensor
    tiled.weight.sum().backward()
    assert all(torch.equal(tile.weight.grad, torch.ones_like(tile.weight)) for tile in tiled.tiles)

    def freeze(weight: Any) -> None:
        weight.requires_grad = False

    def merge(weight: Any) -> None:
        weight.data += 1

    changes: list[Any] = [freeze, merge, lambda weight: weight.data.mul_(2), lambda weight: weight[0].zero_()]
    changes += [lambda weight: weight.requires_grad_(False), nn.init.zeros_, lambda weight: weight.data.copy_(given)]
    for change in changes:
        with pytest.raises(ModelError, match="change the parameters of the tiles"):
            change(tiled.weight)
    with pytest.raises((KeyError, ModelError)):
        tiled.weight = nn.Parameter(torch.zeros(96, 64))
    model, batch = model_and_batch()
    infinity.tile(model.large, 4)
    model.large.requires_grad_(False)
    offload(model)
    with pytest.raises(infinity.ReleasedParameterError):
        model.large.weight.norm()
    with infinity.gathered(model, model.large):
        assert model.large.weight.norm() > 0
    train(model, batch)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_tiled_is_refused(offload: Any) -> None:
    with pytest.raises(ModelError, match=r"takes a torch.nn.Linear, such as model.lm_head, not a Embedding"):
        infinity.tile(nn.Embedding(8, 8), 2)
    for tiles in (1, 0, -1, 9, 2.0, True, "2"):
        with pytest.raises(ConfigError, match="a layer of 8 rows is cut into 2 to 8 tiles"):
            infinity.tile(nn.Linear(8, 8), tiles)
    with pytest.raises(ModelError, match="in tiles already"):
        infinity.tile(infinity.tile(nn.Linear(8, 8), 2), 2)
    changed = nn.Linear(8, 8)
    changed.register_parameter("scale", nn.Parameter(torch.ones(1)))
    with pytest.raises(ModelError, match="has an added parameter 'scale': tile the layer before"):
        infinity.tile(changed, 2)
    model, _ = model_and_batch()
    offload(model)
    with pytest.raises(ModelError, match="offloaded already: tile it before infinity.offload"):
        infinity.tile(model.large, 2)


def test_a_tied_weight_is_refused(offload: Any) -> None:
    model, _ = models.tied_llama()
    infinity.tile(model.lm_head, 4)
    with pytest.raises(ModelError, match=r"'model.embed_tokens.weight' is tied to the weight of a 64 to 128 linear"):
        offload(model)


def test_the_chunked_loss_leaves_a_tiled_head_its_ordinary_loss(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = models.llama()
    wanted = loss_of(model, batch).item()
    infinity.tile(model.lm_head, 4)
    with caplog.at_level(logging.WARNING, logger="infinity"):
        assert "runs in tiles" in infinity.use_chunked_loss(model)
    assert loss_of(model, batch).item() == pytest.approx(wanted, rel=1e-6)
    model, _ = models.llama()
    assert infinity.use_chunked_loss(model) == ""
    with pytest.raises(ModelError, match="the forward of this layer was replaced"):
        infinity.tile(model.lm_head, 4)
