"""Files have whole weights under their own names, whether the model was trained in tiles or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn

import infinity
from infinity.checkpoint import save_pretrained
from infinity.checkpoint.tensor_names import TensorNames
from infinity.errors import ModelError, ResumeError
from tests.checkpoint.runs import STEPS, Config, begin, example, go_on, tensors_in, train
from tests.conftest import states_of, weights_of
from tests.models import Batch, llama

LAYERS = {"lm_head": 5, "model.layers.1.mlp.down_proj": 3, "model.layers.2.self_attn.q_proj": 2}


def tiled(model: Any) -> Any:
    for name, tiles in LAYERS.items():
        infinity.tile(model.get_submodule(name), tiles)
    return model


def in_bf16(model: Any) -> Any:
    """Its weights; the buffers stay as load_pretrained makes them."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def checkpoint(directory: Path) -> tuple[Path, Batch]:
    torch.manual_seed(0)
    model, batch = llama()
    model.save_pretrained(directory)
    return directory, batch


def test_a_model_that_is_saved_from_tiles_is_the_one_that_was_loaded(
    config: Config, tmp_path: Path, opened: list[Any]
) -> None:
    path, _ = checkpoint(tmp_path / "in")
    model = infinity.load_pretrained(path, config("swap"), dtype=torch.float32, defer=True)
    infinity.offload(tiled(model), config("swap"))
    opened.append(model)
    infinity.save_pretrained(model, tmp_path / "out")
    before, after = tensors_in(path), tensors_in(tmp_path / "out")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    plain = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert all(torch.equal(plain.state_dict()[name], value) for name, value in before.items())


def test_a_tiled_model_in_several_shards_is_saved_whole(config: Config, tmp_path: Path, opened: list[Any]) -> None:
    model = tiled(llama()[0].bfloat16())
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    opened.append(infinity.offload(model, config("swap")))
    infinity.save_pretrained(model, tmp_path / "out", max_shard_size="40KB")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    found = tensors_in(tmp_path / "out")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_deferred_weights_are_read_by_rows_whatever_is_done_before(
    config: Config, tmp_path: Path, opened: list[Any]
) -> None:
    path, batch = checkpoint(tmp_path / "in")
    model = tiled(infinity.load_pretrained(path, config("swap"), dtype=torch.float32, defer=True))
    plain = hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        assert model(**batch).loss.item() == pytest.approx(plain(**batch).loss.item(), rel=1e-6)
    model.to(torch.bfloat16)
    opened.append(infinity.offload(model, config("swap")))
    exact = {name: value.bfloat16() for name, value in plain.state_dict().items()}
    found = dict(infinity.state_dict(model))
    assert all(found[name].shape == value.shape for name, value in exact.items())
    assert all((found[name] - value).abs().max() <= 0.01 for name, value in exact.items())


def test_weights_of_a_tiled_model_are_read_again_when_it_is_offloaded_anew(
    config: Config, tmp_path: Path, opened: list[Any]
) -> None:
    path, _ = checkpoint(tmp_path / "in")
    model = infinity.load_pretrained(path, config("whole"), dtype=torch.float32)
    opened.append(model)
    with pytest.raises(ModelError, match=r"after infinity\.load_pretrained\(path, config, defer=True\)"):
        tiled(model)
    model = tiled(infinity.load_pretrained(path, config("swap"), dtype=torch.float32, defer=True))
    opened.append(infinity.offload(model, config("swap")))
    model.lm_head.requires_grad_(False)
    infinity.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    found, wanted = dict(infinity.state_dict(model)), tensors_in(path)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize(
    "form",
    [
        {},
        pytest.param({"moments": "bf16"}, marks=pytest.mark.long),
        {"moments": "int8"},
        pytest.param({"master": "fp32"}, marks=pytest.mark.long),
    ],
)
def test_a_run_in_tiles_goes_on_from_its_copy_to_the_bit(
    form: dict[str, str], config: Config, tmp_path: Path, opened: list[Any]
) -> None:
    model, batch = llama()
    model, _ = begin(tiled(in_bf16(model)), batch, config("swap", **form))
    infinity.close(model)
    infinity.export_checkpoint(tmp_path / "swap", tmp_path / "out")
    there = infinity.load_pretrained(tmp_path / "out", config("other", **form), from_checkpoint=True)
    opened.append(there)
    imported = states_of(there)
    losses = go_on(there, batch, 3)
    here = infinity.resume(tiled(in_bf16(llama()[0])), config("swap", **form))
    opened.append(here)
    resumed = states_of(here)
    assert imported.keys() == resumed.keys()
    assert all(torch.equal(imported[name], value) for name, value in resumed.items())
    assert losses == go_on(here, batch, 3)
    ours, wanted = weights_of(there), weights_of(here)
    assert all(torch.equal(ours[name], value) for name, value in wanted.items())


def test_a_portable_copy_has_whole_states_by_the_names_of_the_weights(config: Config, tmp_path: Path) -> None:
    copies = {}
    for name in ("whole", "tiles"):
        torch.manual_seed(0)
        model, batch = llama()
        model = model.bfloat16()
        begin(tiled(model) if name == "tiles" else model, batch, config(name))
        infinity.close(model)
        infinity.export_checkpoint(tmp_path / name, tmp_path / f"{name}-out")
        folder = tmp_path / f"{name}-out"
        index = json.loads((folder / "optimizer" / "optimizer.safetensors.index.json").read_text())
        copies[name] = tensors_in(folder), tensors_in(folder / "optimizer"), index
    for of_whole, of_tiles in zip(copies["whole"][:2], copies["tiles"][:2], strict=True):
        assert {name: value.shape for name, value in of_whole.items()} == {
            name: value.shape for name, value in of_tiles.items()
        }
    whole, tiles = (copies[name][2]["metadata"]["optimizers"][0] for name in ("whole", "tiles"))
    assert whole["steps"] == tiles["steps"]
    assert sorted(whole["param_groups"][0]["params"]) == sorted(tiles["param_groups"][0]["params"])
    hf.AutoModelForCausalLM.from_pretrained(tmp_path / "tiles-out")


def test_a_run_in_tiles_goes_on_in_plain_torch(config: Config, tmp_path: Path, opened: list[Any]) -> None:
    model, batch = llama()
    model, _ = begin(tiled(model), batch, config("swap"))
    infinity.close(model)
    infinity.export_checkpoint(tmp_path / "swap", tmp_path / "out")
    plain, optimizer = example().load(tmp_path / "out")
    ours = infinity.resume(llama()[0], config("swap"))
    opened.append(ours)
    np.testing.assert_allclose(train(plain.train(), optimizer, batch, 5), go_on(ours, batch, 5), rtol=1e-5)


def test_a_copy_of_a_run_in_tiles_is_not_taken_for_other_tiles(config: Config, tmp_path: Path) -> None:
    model, batch = llama()
    model, _ = begin(tiled(model.bfloat16()), batch, config("swap"))
    infinity.close(model)
    infinity.export_checkpoint(tmp_path / "swap", tmp_path / "out")
    other, _ = llama()
    infinity.tile(other.lm_head, 2)
    with pytest.raises(ResumeError, match="Build the model that the run trained"):
        infinity.offload_from_checkpoint(other, tmp_path / "out", config("other"))


def test_a_tensor_that_files_have_in_another_form_is_not_written_by_tiles() -> None:
    shapes = {"x.infinity_tile_0.weight": (2, 3), "x.infinity_tile_1.weight": (2, 3)}
    halves = TensorNames(shapes, lambda part: {f"{name}.half": value[:2] for name, value in part.items()})
    with pytest.raises(ModelError, match="'x.weight' in another form"):
        halves.meta({"x.infinity_tile_0.weight": torch.empty(2, 3)})
    renamed = TensorNames(shapes, lambda part: {f"old.{name}": value for name, value in part.items()})
    assert renamed.meta({"x.infinity_tile_0.weight": torch.empty(2, 3)})["old.x.weight"].shape == (4, 3)
    ((name, first, value),) = renamed.pieces({"x.infinity_tile_1.weight": torch.ones(2, 3)})
    assert (name, first, value.shape) == ("old.x.weight", 6, (2, 3))


def test_a_model_whose_tiles_cannot_be_written_gives_its_weights_as_the_error_says(
    config: Config, tmp_path: Path, opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiled(llama()[0].bfloat16())
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    opened.append(infinity.offload(model, config("swap")))
    monkeypatch.setattr(
        save_pretrained, "revert_of", lambda _: lambda part: {name: value[:1] for name, value in part.items()}
    )
    with pytest.raises(ModelError, match=r"tile by tile; use infinity.state_dict\(model\)"):
        infinity.save_pretrained(model, tmp_path / "out")
    found = dict(infinity.state_dict(model))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_training_goes_on_after_a_save(config: Config, tmp_path: Path, opened: list[Any]) -> None:
    model, batch = llama()
    wanted = train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch, STEPS)
    torch.manual_seed(0)
    model, _ = llama()
    opened.append(infinity.offload(tiled(model), config("swap")))
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        losses += train(model, optim, batch, 1)
        infinity.save_pretrained(model, tmp_path / f"out-{step}")
    assert losses == pytest.approx(wanted, rel=1e-4)
    assert isinstance(hf.AutoModelForCausalLM.from_pretrained(tmp_path / f"out-{STEPS - 1}").lm_head, nn.Linear)
