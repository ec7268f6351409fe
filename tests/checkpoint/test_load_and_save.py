"""Checkpoints of every kind are streamed through the store and come out as they went in."""

from __future__ import annotations

import copy
import functools
import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.integrations import accelerate as accelerate_of_transformers

import infinity
from infinity.checkpoint import merged_experts
from infinity.coordinator import registry
from tests.conftest import weights_of
from tests.models import bert, gpt2, llama, loss_of, mixtral, t5, tied_llama

MODELS = {"llama": llama, "tied_llama": tied_llama, "gpt2": gpt2, "mixtral": mixtral}


@pytest.fixture
def loaded(swap_config: Any) -> Any:
    opened = []

    def load(path: Path, tier: str = "nvme", **options: Any) -> Any:
        model = infinity.load_pretrained(path, swap_config(tier), **options)
        opened.append(model)
        return model

    yield load
    for model in opened:
        infinity.close(model)


@pytest.mark.covering(strength=1, most=3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", MODELS)
def test_a_trained_model_saved_is_the_model_plain_transformers_loads(
    name: str, dtype: torch.dtype, loaded: Any, tmp_path: Path
) -> None:
    plain, batch = MODELS[name]()
    plain.to(dtype).save_pretrained(tmp_path / "in")
    model = loaded(tmp_path / "in", dtype=dtype)
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        loss_of(model, batch).backward()
        optim.step()
        optim.zero_grad()
    infinity.save_pretrained(model, tmp_path / "out", max_shard_size="100KB")
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    saved = dict(again.named_parameters())
    before = dict(plain.named_parameters())
    trained = weights_of(model)
    for key, weight in trained.items():
        assert torch.equal(saved[key], weight), key
    assert any(not torch.equal(before[key], weight) for key, weight in trained.items())
    with torch.no_grad():
        logits = again.eval()(input_ids=batch["input_ids"]).logits
        assert torch.equal(model.eval()(input_ids=batch["input_ids"]).logits, logits)


def _begin_values_at_an_odd_byte(file: Path) -> None:
    """Pad the header of a safetensors file by one blank, as its format allows."""
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    file.write_bytes((length + 1).to_bytes(8, "little") + whole[8 : 8 + length] + b" " + whole[8 + length :])


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "odd header"])
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_fp32_files_loaded_as_bf16_keep_their_fp32_master(
    tier: str, aligned: bool, loaded: Any, tmp_path: Path
) -> None:
    """A step with lr 0 and decay leaves master · (1 − lr·wd): read it back from weight + rest."""
    from infinity import _native
    from infinity.coordinator import registry

    plain, _ = llama()
    plain.save_pretrained(tmp_path / "in")
    if not aligned:
        _begin_values_at_an_odd_byte(tmp_path / "in" / "model.safetensors")
    model = loaded(tmp_path / "in", tier)
    coordinator, weights = registry.coordinator_of(model), weights_of(model)
    originals = dict(plain.named_parameters())
    for _, place in coordinator.places():
        states = coordinator.resources.units[place.unit.index].states[place.group_index]
        home, nbytes = states.residual, place.group.state_bytes(2)
        if home.in_memory:
            rest = torch.frombuffer(home.view(), dtype=torch.uint8)
        else:
            view = coordinator.resources.staging.view(0, nbytes)
            coordinator.resources.store.read(home.extent, view).result()
            rest = torch.frombuffer(view, dtype=torch.uint8)
        part = rest.view(torch.int16)[place.spec.offset : place.spec.offset + place.spec.numel].clone()
        master = torch.empty(place.spec.numel)
        weight = weights[place.spec.name].reshape(-1)
        _native.decode_split16(weight.view(torch.uint8).numpy(), part.numpy(), master.numpy())
        assert torch.equal(master, originals[place.spec.name].detach().reshape(-1)), place.spec.name


def test_shards_have_the_formats_index(loaded: Any, tmp_path: Path) -> None:
    plain, _ = llama()
    plain.bfloat16().save_pretrained(tmp_path / "in")
    infinity.save_pretrained(loaded(tmp_path / "in"), tmp_path / "out", max_shard_size="100KB")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * sum(p.numel() for p in plain.parameters())
    for name, shard in index["weight_map"].items():
        with safe_open(tmp_path / "out" / shard, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert torch.equal(file.get_tensor(name), dict(plain.named_parameters())[name])
    assert set(os.listdir(tmp_path)) == {"in", "out", "swap"}


def test_saving_over_an_earlier_model_leaves_no_stale_shards(loaded: Any, tmp_path: Path) -> None:
    plain, _ = llama()
    plain.bfloat16().save_pretrained(tmp_path / "in")
    model = loaded(tmp_path / "in")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    infinity.save_pretrained(model, tmp_path / "out", max_shard_size="100KB")
    infinity.save_pretrained(model, tmp_path / "out")
    names = set(os.listdir(tmp_path / "out"))
    assert "model.safetensors" in names
    assert "notes.txt" in names
    assert not [name for name in names if "-of-" in name or "index" in name]


def test_a_full_disk_leaves_no_half_written_output(
    loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    plain, _ = llama()
    plain.bfloat16().save_pretrained(tmp_path / "in")
    model = loaded(tmp_path / "in")
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(infinity.InfinityError, match="No space left on device.*The directory was not changed"):
        infinity.save_pretrained(model, tmp_path / "out")
    assert set(os.listdir(tmp_path)) == {"in", "swap"}


@pytest.mark.parametrize("build", [bert, t5])
def test_a_model_that_is_not_causal_is_refused(build: Callable[..., Any], loaded: Any, tmp_path: Path) -> None:
    build()[0].save_pretrained(tmp_path / "in")
    with pytest.raises(infinity.ModelError, match="not a causal language model"):
        loaded(tmp_path / "in")


def test_a_missing_model_is_named(loaded: Any, tmp_path: Path) -> None:
    with pytest.raises(infinity.ModelError, match="there is no directory '.*nowhere'"):
        loaded(tmp_path / "nowhere")


def test_an_id_that_the_hub_may_have_is_asked_for_there(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("no connection")

    monkeypatch.setattr(hf.AutoConfig, "from_pretrained", unreachable)
    with pytest.raises(infinity.ModelError, match="'nope': there is no such directory, and .* hub: no connection"):
        loaded(Path("nope"))


def _truncate(model: Path) -> None:
    os.truncate(model / "model.safetensors", 60_000)


def _empty(model: Path) -> None:
    os.truncate(model / "model.safetensors", 0)


def _drop_a_tensor(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def _quantize(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def _take_the_config_of_another(model: Path) -> None:
    gpt2()[0].config.save_pretrained(model)


def _configure(**values: Any) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, "model.safetensors: .*incomplete"),
        (_empty, "model.safetensors: .*header too small"),
        (_drop_a_tensor, "has no tensor for parameter 'model.layers.1.mlp.up_proj.weight'; is the checkpoint complete"),
        (_quantize, "'model.norm.weight' as torch.int8, but none of the tensors"),
        (_take_the_config_of_another, "no tensor for parameter 'transformer.* and .* more; .* config.json belong"),
        (_configure(hidden_size="x"), "cannot load a model from .*hidden_size"),
        (_configure(num_attention_heads=7), "cannot load a model from .*attention heads"),
        (_configure(hidden_act="nope"), "cannot load a model from .*: KeyError: 'nope'"),
        (_configure(architectures=[3]), "is a 3, not a causal language model"),
        (_configure(quantization_config={"quant_method": "awq"}), "is quantized by awq .quantization_config in"),
        (_configure(hidden_size=32), "is .* in the checkpoint and .* in the model"),
    ],
)
def test_a_damaged_model_is_named(damage: Callable[[Path], None], message: str, loaded: Any, tmp_path: Path) -> None:
    llama()[0].save_pretrained(tmp_path / "in")
    damage(tmp_path / "in")
    with pytest.raises(infinity.ModelError, match=message) as caught:
        loaded(tmp_path / "in")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "swap").exists()


def test_a_file_instead_of_a_model_is_named(loaded: Any, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(infinity.ModelError, match="is a file: name the directory"):
        loaded(tmp_path / "model.gguf")


def test_where_no_terminal_is_loading_prints_no_bar(loaded: Any, tmp_path: Path, capfd: Any) -> None:
    llama()[0].save_pretrained(tmp_path / "in")
    capfd.readouterr()
    hf.utils.logging.enable_progress_bar()
    loaded(tmp_path / "in")
    assert "\r" not in capfd.readouterr().err
    assert hf.utils.logging.is_progress_bar_enabled()


def test_a_swap_directory_that_cannot_be_made_is_named(swap_config: Any, tmp_path: Path) -> None:
    llama()[0].save_pretrained(tmp_path / "model")
    with pytest.raises(infinity.ConfigError, match=r"nvme\.paths: /proc/swap: nothing can be written in /proc: "):
        infinity.load_pretrained(tmp_path / "model", swap_config(nvme={"paths": ["/proc/swap"]}))


def test_converted_tensors_of_a_deferred_model_stay_as_long_as_something_reads_them(
    swap_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merged_experts, "_dim_of_parts", lambda _: None)  # otherwise transformers converts nothing
    mixtral()[0].save_pretrained(tmp_path / "model")
    before = set(tmp_path.rglob("infinity-load-*"))
    model = infinity.load_pretrained(tmp_path / "model", swap_config("nvme"), dtype=torch.float32, defer=True)
    plainly = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "model").model.state_dict()
    part = copy.deepcopy(model).model
    del model
    gc.collect()
    with torch.no_grad():
        assert all(torch.equal(part.get_parameter(name) + 0, plainly[name]) for name, _ in part.named_parameters())
    assert set(tmp_path.rglob("infinity-load-*")) > before
    del part
    gc.collect()
    assert set(tmp_path.rglob("infinity-load-*")) == before


def test_accelerate_is_never_asked_to_leave_everything_on_the_disk(
    loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 1.15 it refuses that."""
    llama()[0].save_pretrained(tmp_path / "model")
    dispatch = accelerate_of_transformers.dispatch_model

    def older(model: Any, device_map: dict[str, Any], **options: Any) -> Any:
        assert len(set(device_map.values())) > 1, "You are trying to offload the whole model to the disk."
        return dispatch(model, device_map, **options)

    monkeypatch.setattr(accelerate_of_transformers, "dispatch_model", functools.wraps(dispatch)(older))
    assert registry.is_offloaded(loaded(tmp_path / "model"))


def test_other_classes_load_too(loaded: Any, tmp_path: Path) -> None:
    plain, batch = t5()
    plain.save_pretrained(tmp_path / "in")
    model = loaded(tmp_path / "in", dtype=torch.float32, model_class=hf.AutoModelForSeq2SeqLM)
    assert loss_of(model.eval(), batch).item() == loss_of(plain.eval(), batch).item()
    infinity.save_pretrained(model, tmp_path / "out")
    again = hf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert loss_of(again.eval(), batch).item() == loss_of(plain, batch).item()


def test_saving_holds_no_unit_while_it_fetches_the_next(offload: Any, tmp_path: Path) -> None:
    model = offload(llama()[0])
    coordinator = registry.coordinator_of(model)
    acquire, held = coordinator.begin_use, []

    def acquiring(index: int) -> None:
        held.extend(
            other.name for other in coordinator.units if other.weights.slot and other.weights.slot.outstanding()
        )
        acquire(index)

    coordinator.begin_use = acquiring
    infinity.save_pretrained(model, tmp_path / "saved")
    assert held == []
