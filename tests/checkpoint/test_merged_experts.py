"""Tensors that transformers joins into stacks of experts are joined when their values are needed, row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import infinity
from infinity.checkpoint import merged_experts
from infinity.checkpoint.load_pretrained import CheckpointTensors, on_meta
from infinity.errors import ModelError
from tests import models


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model, _ = models.mixtral()
    model.bfloat16().save_pretrained(tmp_path / "model", max_shard_size="100KB")
    return tmp_path / "model"


def source_of(saved: Path, scratch: Path) -> CheckpointTensors:
    scratch.mkdir()
    _, source, _ = on_meta(hf.AutoModelForCausalLM, str(saved), torch.bfloat16, str(scratch), {})
    assert isinstance(source, CheckpointTensors)
    return source


def test_stacks_of_experts_have_the_values_of_transformers_without_a_copy(saved: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    source = source_of(saved, scratch)
    assert not scratch.exists()  # on_meta removes it if nothing was written to it
    for name, value in hf.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16).named_parameters():
        assert torch.equal(source(name), value), name
        assert torch.equal(source.rows(name, 1, 3), value[1:3]), name


def test_the_rows_of_some_experts_need_the_tensors_of_these_experts_alone(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, read = source_of(saved, tmp_path / "scratch"), list[str]()
    original = merged_experts.tensor_of

    def recorded(file: Any, name: str) -> torch.Tensor:
        read.append(name.rpartition("experts.")[2])
        return original(file, name)

    monkeypatch.setattr(merged_experts, "tensor_of", recorded)
    assert source.rows("model.layers.1.mlp.experts.gate_up_proj", 2, 3).shape == (1, 128, 64)
    assert read == ["2.w1.weight", "2.w3.weight"]


@pytest.mark.parametrize("defer", [False, True])
def test_a_model_of_a_tensor_for_each_expert_is_saved_as_it_was_loaded(
    defer: bool, saved: Path, tmp_path: Path, swap_config: Any
) -> None:
    config = swap_config()
    model = infinity.load_pretrained(saved, config, defer=defer)
    if defer:
        infinity.offload(model, config)
    infinity.save_pretrained(model, tmp_path / "out")
    infinity.close(model)
    before, after = (
        {name: each for file in sorted(where.glob("*.safetensors")) for name, each in load_file(file).items()}
        for where in (saved, tmp_path / "out")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], each) for name, each in before.items())


def test_an_incomplete_stack_is_an_error(saved: Path, swap_config: Any) -> None:
    for file in saved.glob("*.safetensors"):
        tensors = {name: each for name, each in load_file(file).items() if "experts.3." not in name}
        save_file(tensors, file, {"format": "pt"})
    listing = saved / "model.safetensors.index.json"
    kept = [line for line in listing.read_text().splitlines() if "experts.3." not in line]
    listing.write_text("\n".join(kept))
    with pytest.raises(ModelError, match=r"is \(3, 128, 64\) in the checkpoint and \(4, 128, 64\) in the model"):
        infinity.load_pretrained(saved, swap_config())


def test_experts_come_from_the_files_that_transformers_reads(saved: Path, tmp_path: Path, swap_config: Any) -> None:
    """The directory has the index of an older save, whose files are still there."""
    for file in sorted(saved.glob("*.safetensors")):
        zeros = {name: torch.zeros_like(each) for name, each in load_file(file).items()}
        save_file(zeros, saved / file.name.replace("model", "model_old"), {"format": "pt"})
    listing = (saved / "model.safetensors.index.json").read_text()
    (saved / "model_old.safetensors.index.json").write_text(listing.replace('"model-', '"model_old-'))
    source = source_of(saved, tmp_path / "scratch")
    for name, value in hf.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16).named_parameters():
        assert torch.equal(source(name), value), name


@pytest.mark.parametrize("stale", [True, False])
def test_experts_of_a_single_file_and_of_a_variant_are_found(stale: bool, saved: Path, tmp_path: Path) -> None:
    model, _ = models.mixtral()
    with torch.no_grad():
        model.bfloat16().model.layers[0].mlp.experts.down_proj.fill_(0.5)
    if stale:  # transformers leaves the index of the shards that were there before
        listing = (saved / "model.safetensors.index.json").read_text()
        model.save_pretrained(saved)
        (saved / "model.safetensors.index.json").unlink(missing_ok=True)
        (saved / "model.safetensors.index.old.json").write_text(listing)
        how: dict[str, Any] = {}
    else:
        model.save_pretrained(saved, max_shard_size="100KB", variant="v3")
        how = {"variant": "v3"}
    (tmp_path / "scratch").mkdir()
    _, source, _ = on_meta(hf.AutoModelForCausalLM, str(saved), torch.bfloat16, str(tmp_path / "scratch"), how)
    assert bool((source("model.layers.0.mlp.experts.down_proj") == 0.5).all())


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../b"}}', "{"])
def test_an_index_that_cannot_be_read_is_named(text: str, saved: Path, tmp_path: Path) -> None:
    (saved / "other.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"other.safetensors.index.json: "):
        source_of(saved, tmp_path / "scratch")


def test_experts_of_different_dtypes_are_named(saved: Path, tmp_path: Path) -> None:
    for file in saved.glob("*.safetensors"):
        tensors = {name: each.float() if "experts.2.w3" in name else each for name, each in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
    source = source_of(saved, tmp_path / "scratch")
    with pytest.raises(ModelError, match=r"experts.2.w3.weight' is torch.float32, and other experts .* torch.bfloat16"):
        source("model.layers.1.mlp.experts.gate_up_proj")
