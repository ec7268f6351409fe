"""A generation as a portable copy: what is in it, and what goes wrong on the way."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import infinity
from infinity.cli.main import main
from infinity.io.atomic_file import ASIDE
from infinity.io.directory import HEADER_NAME, SWAP_NAME, generations_in
from infinity.io.manifest import read_manifest
from tests.checkpoint.runs import MODELS, STEPS, Config, begin, example, go_on, stored, tensors_in, train
from tests.conftest import states_of, weights_of
from tests.models import llama


@pytest.mark.covering(strength=1, most=3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", MODELS)
def test_the_copy_is_a_model_plain_transformers_loads(
    name: str, dtype: torch.dtype, config: Config, tmp_path: Path
) -> None:
    model, batch = MODELS[name]()
    model.to(dtype)
    begin(model, batch, config("swap"))
    trained = weights_of(model)
    infinity.save_pretrained(model, tmp_path / "saved", max_shard_size="100KB")
    infinity.close(model)
    assert infinity.export_checkpoint(tmp_path / "swap", tmp_path / "out", max_shard_size="100KB") == STEPS
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == dtype
    named = dict(again.named_parameters(remove_duplicate=False))
    for key, weight in trained.items():
        assert torch.equal(named[key], weight), key
    ours, theirs = tensors_in(tmp_path / "out"), tensors_in(tmp_path / "saved")
    assert ours.keys() == theirs.keys()
    for name_of_config in ("config.json", "generation_config.json"):
        mine = json.loads((tmp_path / "out" / name_of_config).read_text())
        assert mine == json.loads((tmp_path / "saved" / name_of_config).read_text())


def test_the_optimizers_tensors_have_torchs_names_and_shapes(config: Config, tmp_path: Path) -> None:
    model, batch = llama()
    model.bfloat16()
    begin(model, batch, config("swap"))
    states, weights = states_of(model), weights_of(model)
    infinity.close(model)
    infinity.export_checkpoint(tmp_path / "swap", tmp_path / "out", max_shard_size="200KB")
    found = tensors_in(tmp_path / "out" / "optimizer")
    assert found.keys() == {f"{name}.{key}" for name in weights for key in ("exp_avg", "exp_avg_sq", "master")}
    index = json.loads((tmp_path / "out" / "optimizer" / "optimizer.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == found.keys()
    assert len(set(index["weight_map"].values())) > 2
    for name, weight in weights.items():
        torch.testing.assert_close(found[f"{name}.master"], weight.float(), rtol=2**-8, atol=1e-30)
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found[f"{name}.{key}"].flatten(), states[f"{name}.{key}"]), name
    (saved,) = index["metadata"]["optimizers"]
    assert saved["class_name"] == "AdamW"
    assert saved["steps"] == dict.fromkeys(weights, STEPS)
    assert saved["param_groups"][0]["betas"] == [0.9, 0.999]


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_plain_torch_goes_on_with_the_same_losses(
    dtype: torch.dtype, rtol: float, config: Config, tmp_path: Path, opened: list[Any]
) -> None:
    model, batch = llama()
    store = stored(tmp_path, batch, model.to(dtype), config("swap"))
    infinity.export_checkpoint(store, tmp_path / "out")
    plain, optimizer = example().load(tmp_path / "out")
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    ours = infinity.resume(llama()[0].to(dtype), config("swap"))
    opened.append(ours)
    np.testing.assert_allclose(train(plain.train(), optimizer, batch, 5), go_on(ours, batch, 5), rtol=rtol)


def test_the_example_is_a_command(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = llama(layers=1)
    infinity.export_checkpoint(stored(tmp_path, batch, model, config("swap")), tmp_path / "out")
    script = Path(__file__).parents[2] / "examples" / "to_torch_adamw.py"
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path / "out"), str(tmp_path / "states.pt")])
    runpy.run_path(str(script), run_name="__main__")
    saved = torch.load(tmp_path / "states.pt")
    assert saved["optimizer"]["state"][0]["step"] == STEPS


@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_the_default_dtype_of_torch_changes_nothing(
    moments: str, config: Config, tmp_path: Path, opened: list[Any]
) -> None:
    model, batch = llama(layers=1)
    run = stored(tmp_path, batch, model.bfloat16(), config("swap", moments=moments))
    infinity.export_checkpoint(run, tmp_path / "first")
    torch.set_default_dtype(torch.bfloat16)
    try:
        infinity.export_checkpoint(run, tmp_path / "second")
        model = llama(layers=1)[0].bfloat16()
        opened.append(infinity.offload_from_checkpoint(model, tmp_path / "first", config("other", moments=moments)))
    finally:
        torch.set_default_dtype(torch.float32)
    for folder in ("", "optimizer"):
        first, second = tensors_in(tmp_path / "first" / folder), tensors_in(tmp_path / "second" / folder)
        assert first.keys() == second.keys()
        assert all(torch.equal(value, second[name]) for name, value in first.items())
    opened.append(infinity.resume(llama(layers=1)[0].bfloat16(), config("swap", moments=moments)))
    there, here = map(states_of, opened)
    assert all(torch.equal(values, there[name]) for name, values in here.items())


def flip(run: Path, step: int, state: str) -> str:
    """Damage a byte of a state of a generation; returns the unit."""
    manifest = read_manifest(generations_in(run)[step])
    record = next(extent for extent in manifest.extents if extent.state == state)
    with (run / SWAP_NAME).open("r+b") as file:
        file.seek(record.offset + 100)
        byte = file.read(1)[0]
        file.seek(record.offset + 100)
        file.write(bytes([byte ^ 1]))
    return record.unit


@pytest.mark.parametrize("state", ["weight", "residual", "exp_avg_sq"])
def test_damage_is_named_and_nothing_is_left(state: str, run: Path, tmp_path: Path) -> None:
    unit = flip(run, STEPS, state)
    with pytest.raises(infinity.ResumeError, match=f"{state} of unit '{re.escape(unit)}'.*generation {STEPS}"):
        infinity.export_checkpoint(run, tmp_path / "out", step=STEPS)
    assert os.listdir(tmp_path) == ["swap"]


def test_the_newest_that_is_whole_is_taken(run: Path, tmp_path: Path) -> None:
    flip(run, STEPS, "exp_avg")
    assert infinity.export_checkpoint(run, tmp_path / "out") == STEPS - 1
    assert STEPS in generations_in(run)


def test_a_step_that_is_not_there_is_named(run: Path, tmp_path: Path) -> None:
    with pytest.raises(infinity.ResumeError, match="no generation 99; it has: 2, 1"):
        infinity.export_checkpoint(run, tmp_path / "out", step=99)
    with pytest.raises(infinity.ResumeError, match="holds no store"):
        infinity.export_checkpoint(tmp_path, tmp_path / "out")


def test_a_directory_with_something_in_it_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(infinity.InfinityError, match="out exists and is not empty"):
        infinity.export_checkpoint(run, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["notes.txt"]


def test_a_full_disk_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(infinity.InfinityError, match="exporting to .*No space left on device.*The directory was not"):
        infinity.export_checkpoint(run, tmp_path / "out")
    assert os.listdir(tmp_path) == ["swap"]


def test_a_store_in_use_is_refused(config: Config, tmp_path: Path, opened: list[Any]) -> None:
    model, batch = llama(layers=1)
    opened.append(begin(model, batch, config("swap"), 1)[0])
    with pytest.raises(infinity.StoreLockedError):
        infinity.export_checkpoint(tmp_path / "swap", tmp_path / "out")
    assert os.listdir(tmp_path) == ["swap"]


def test_an_export_leaves_the_run_as_it_was(run: Path, config: Config, tmp_path: Path, opened: list[Any]) -> None:
    (run / f"{HEADER_NAME}{ASIDE}").write_text("of a run that was killed")
    before = {path.name: path.stat().st_mtime_ns for path in (run, *run.iterdir())}
    infinity.export_checkpoint(run, tmp_path / "out")
    assert main(["checkpoint", "verify", str(run)]) == 0
    assert before == {path.name: path.stat().st_mtime_ns for path in (run, *run.iterdir())}
    opened.append(infinity.resume(llama(layers=2)[0].bfloat16(), config("swap", keep=2)))
