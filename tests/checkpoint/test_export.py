"""A generation as a portable copy, and a run that goes on from it: in plain PyTorch, or with another swap config."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors import safe_open
from torch import nn

import infinity
from infinity import _native
from infinity.checkpoint.generation import CHUNK_NUMEL
from infinity.io.directory import SWAP_NAME, generations_in
from infinity.io.manifest import read_manifest
from infinity.state.int8 import put_scales_back, scales_of
from tests.conftest import states_of, weights_of
from tests.models import Batch, gpt2, llama, loss_of, mixed, mixtral, tied_llama

MODELS = {"llama": llama, "tied_llama": tied_llama, "mixtral": mixtral, "gpt2": gpt2}
STEPS = 3
Config = Callable[..., dict[str, Any]]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A swap config with generations; `name` is its directory, `tiers` is where weights and optimizer are."""

    def make(name: str, tiers: tuple[str, str] = ("nvme", "nvme"), **overrides: Any) -> dict[str, Any]:
        nvme = {"paths": [str(tmp_path / name)]} | overrides.pop("nvme", {})
        places = {"weights": tiers[0], "optimizer": tiers[1], "activations": "keep", "nvme": nvme}
        return places | {"memory": {"device": "64MiB", "host": "512MiB"}, "commit_every": 1} | overrides

    return make


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    """Models to close at the end."""
    models: list[Any] = []
    yield models
    for model in models:
        infinity.close(model)


def train(model: nn.Module, optim: Any, batch: Batch, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = loss_of(model, batch)
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


def begin(model: nn.Module, batch: Batch, config: dict[str, Any], steps: int = STEPS) -> tuple[Any, Any]:
    """A run after `steps` steps, with weights whose masters say more."""
    infinity.offload(model, config)
    optim = infinity.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, seed=7)
    infinity.track(torch.optim.lr_scheduler.StepLR(optim, 100), model=model)
    train(model, optim, batch, steps)
    return model, optim


def stored(directory: Path, batch: Batch, model: nn.Module, config: dict[str, Any], steps: int = STEPS) -> Path:
    """The swap directory of a run that ended after `steps` steps."""
    begin(model, batch, config, steps)
    infinity.close(model)
    return Path(config["nvme"]["paths"][0])


def go_on(model: nn.Module, batch: Batch, steps: int) -> list[float]:
    """An imported run goes on, its optimizer made with hyperparameters that are not the run's."""
    optim = infinity.AdamW(model.parameters(), lr=0.5, seed=1)
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 100)
    assert infinity.track(scheduler, model=model) == STEPS
    return train(model, optim, batch, steps)


def example() -> Any:
    path = Path(__file__).parents[2] / "examples" / "to_torch_adamw.py"
    spec = importlib.util.spec_from_file_location("to_torch_adamw", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


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


def test_the_example_is_a_command(config: Config, tmp_path: Path) -> None:
    model, batch = llama(layers=1)
    infinity.export_checkpoint(stored(tmp_path, batch, model, config("swap")), tmp_path / "out")
    script = Path(__file__).parents[2] / "examples" / "to_torch_adamw.py"
    subprocess.run([sys.executable, script, tmp_path / "out", tmp_path / "states.pt"], check=True)
    saved = torch.load(tmp_path / "states.pt")
    assert saved["optimizer"]["state"][0]["step"] == STEPS


FORMS = {
    "fp32 moments": {},
    "bf16 moments": {"moments": "bf16"},
    "int8 moments": {"moments": "int8"},
    "fp32 masters": {"master": "fp32"},
    "no masters": {"master": "none"},
}


@pytest.mark.parametrize(
    ("before", "after"),
    [(("nvme", "nvme"), ("host", "host")), (("host", "host"), ("nvme", "nvme")), (("host", "nvme"), ("nvme", "host"))],
)
@pytest.mark.parametrize("form", FORMS)
def test_a_run_goes_on_from_its_copy_to_the_bit(
    form: str,
    before: tuple[str, str],
    after: tuple[str, str],
    config: Config,
    tmp_path: Path,
    opened: list[Any],
) -> None:
    model, batch = gpt2(dropout=0.1)  # random numbers must go on, too
    store = stored(tmp_path, batch, model.bfloat16(), config("swap", before, **FORMS[form]))
    infinity.export_checkpoint(store, tmp_path / "out")
    there = infinity.load_pretrained(
        tmp_path / "out",
        config("other", after, update={"tile": "64KiB"}, nvme={"engine": "threads"}, **FORMS[form]),
        from_checkpoint=True,
    )
    opened.append(there)
    imported = states_of(there)
    losses = go_on(there, batch, 3)
    here = infinity.resume(gpt2(dropout=0.1)[0].bfloat16(), config("swap", before, **FORMS[form]))
    opened.append(here)
    resumed = states_of(here)
    assert all(torch.equal(values, imported[name]) for name, values in resumed.items())
    assert losses == go_on(here, batch, 3)
    mine, theirs = weights_of(here), weights_of(there)
    assert all(torch.equal(weight, theirs[name]) for name, weight in mine.items())
    moved, stayed = states_of(there), states_of(here)
    assert all(torch.equal(values, moved[name]) for name, values in stayed.items())


def test_an_imported_run_commits_and_is_exported_again_to_the_same_tensors(
    config: Config, tmp_path: Path, opened: list[Any]
) -> None:
    model, batch = llama(layers=2)
    store = stored(tmp_path, batch, model.bfloat16(), config("swap", moments="int8"))
    infinity.export_checkpoint(store, tmp_path / "first")
    again = infinity.load_pretrained(
        tmp_path / "first", config("other", ("host", "host"), moments="int8"), from_checkpoint=True
    )
    optim = infinity.AdamW(again.parameters())
    infinity.track(torch.optim.lr_scheduler.StepLR(optim, 100), model=again)
    infinity.commit(again)
    infinity.close(again)
    assert infinity.export_checkpoint(tmp_path / "other", tmp_path / "second") == STEPS
    for folder in ("", "optimizer"):
        first, second = tensors_in(tmp_path / "first" / folder), tensors_in(tmp_path / "second" / folder)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(name.endswith(".scales") for name in second)


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_fp32_moments_are_converted_to_what_the_config_asks_for(
    moments: str, config: Config, tmp_path: Path, opened: list[Any]
) -> None:
    model, batch = llama()
    store = stored(tmp_path, batch, model.bfloat16(), config("swap"))
    infinity.export_checkpoint(store, tmp_path / "out")
    exact = tensors_in(tmp_path / "out" / "optimizer")
    there = infinity.load_pretrained(tmp_path / "out", config("other", moments=moments), from_checkpoint=True)
    opened.append(there)
    for name, values in states_of(there).items():
        largest = exact[name].abs().max()
        assert (values - exact[name].flatten()).abs().max() <= 0.05 * largest, name
    assert max(go_on(there, batch, 3)) < 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_bf16_run_goes_on_in_another_dtype_from_its_masters(
    dtype: torch.dtype, config: Config, tmp_path: Path, opened: list[Any]
) -> None:
    model, batch = llama()
    store = stored(tmp_path, batch, model.bfloat16(), config("swap"))
    infinity.export_checkpoint(store, tmp_path / "out")
    there = infinity.load_pretrained(tmp_path / "out", config("other"), dtype=dtype, from_checkpoint=True)
    opened.append(there)
    masters = tensors_in(tmp_path / "out" / "optimizer")
    for name, weight in weights_of(there).items():
        assert torch.equal(weight, masters[f"{name}.master"].to(dtype)), name


@pytest.mark.parametrize("rule", ["SGD", "Lion", "Adagrad"])
def test_every_optimizer_goes_on(rule: str, config: Config, tmp_path: Path, opened: list[Any]) -> None:
    options = {"momentum": 0.9} if rule == "SGD" else {}
    make = getattr(infinity, rule)

    def run(model: nn.Module, steps: int) -> list[float]:
        optim = make(model.parameters(), lr=1e-4, **options)
        infinity.track(model=model)
        losses = train(model, optim, batch, steps)
        infinity.close(model)
        return losses

    model, batch = llama(layers=2)
    infinity.offload(model.bfloat16(), config("swap"), optimizer=rule.lower())
    run(model, 2)
    infinity.export_checkpoint(tmp_path / "swap", tmp_path / "out")
    names = {"SGD": "momentum_buffer", "Lion": "exp_avg", "Adagrad": "sum"}
    assert f"model.norm.weight.{names[rule]}" in tensors_in(tmp_path / "out" / "optimizer")
    there = infinity.load_pretrained(
        tmp_path / "out", config("other", ("host", "host")), optimizer=rule.lower(), from_checkpoint=True
    )
    here = infinity.load_pretrained(tmp_path / "out", config("swap"), optimizer=rule.lower(), resume=True)
    opened += [there, here]
    assert run(there, 3) == run(here, 3)


class WithBuffers(nn.Module):
    """A plain module: mixed dtypes, frozen matrices, a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mixed()[0]
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.norm(x))


def test_a_plain_module_goes_on_from_its_copy(config: Config, tmp_path: Path, opened: list[Any]) -> None:
    model, batch = WithBuffers(), mixed()[1]
    store = stored(tmp_path, batch, model, config("swap"))
    infinity.export_checkpoint(store, tmp_path / "out", max_shard_size="10KB")
    weights = tensors_in(tmp_path / "out")
    assert "norm.running_mean" in weights
    assert weights.keys() == WithBuffers().state_dict().keys()
    there = infinity.offload_from_checkpoint(WithBuffers(), tmp_path / "out", config("other", ("host", "host")))
    here = infinity.resume(WithBuffers(), config("swap"))
    opened += [there, here]
    assert torch.equal(there.norm.running_mean, here.norm.running_mean)
    assert go_on(there, batch, 3) == go_on(here, batch, 3)
    assert torch.equal(there.norm.running_mean, here.norm.running_mean)


class Wide(nn.Module):
    """Blocks of two matrices, of more than a chunk together; the second one lies across its border."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(900, 801)
            self.down = nn.Linear(801, 900)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(x)))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wide.Block().bfloat16() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (x.float() ** 2).mean()


@pytest.mark.parametrize("after", [("host", "host"), ("nvme", "nvme")])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_states_of_several_chunks_go_on_from_a_store_on_two_disks(
    moments: str, after: tuple[str, str], config: Config, tmp_path: Path, opened: list[Any]
) -> None:
    assert 900 * 801 < CHUNK_NUMEL < 2 * 900 * 801
    disks = {"paths": [str(tmp_path / "one"), str(tmp_path / "two")]}
    batch = {"x": torch.randn(4, 900, generator=torch.Generator().manual_seed(3)).bfloat16()}
    stored(tmp_path, batch, Wide(), config("", moments=moments, nvme=disks))
    infinity.export_checkpoint(tmp_path / "two", tmp_path / "out")  # its header names the other
    there = infinity.offload_from_checkpoint(Wide(), tmp_path / "out", config("other", after, moments=moments))
    here = infinity.resume(Wide(), config("", moments=moments, nvme=disks))
    opened += [there, here]
    imported = states_of(there)
    assert all(torch.equal(values, imported[name]) for name, values in states_of(here).items())
    assert go_on(there, batch, 3) == go_on(here, batch, 3)
    mine, theirs = weights_of(here), weights_of(there)
    assert all(torch.equal(weight, theirs[name]) for name, weight in mine.items())


def test_what_is_not_trained_or_not_begun_is_no_obstacle(config: Config, tmp_path: Path, opened: list[Any]) -> None:
    """Saved before the first step: no moments, masters all the same."""
    plain, batch = llama()
    plain.save_pretrained(tmp_path / "in")
    model = infinity.load_pretrained(tmp_path / "in", config("swap"))
    optim = infinity.AdamW(model.parameters())
    infinity.commit(model)
    infinity.close(model)
    assert not optim.state
    assert infinity.export_checkpoint(tmp_path / "swap", tmp_path / "out") == 0
    found = tensors_in(tmp_path / "out" / "optimizer")
    originals = dict(plain.named_parameters())
    assert found.keys() == {f"{name}.master" for name in originals}
    assert all(torch.equal(found[f"{name}.master"], weight) for name, weight in originals.items())
    again = infinity.load_pretrained(tmp_path / "out", config("other"), from_checkpoint=True)
    opened.append(again)
    assert len(train(again, infinity.AdamW(again.parameters()), batch, 1)) == 1


# -- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.fixture
def run(config: Config, tmp_path: Path) -> Path:
    """The swap directory of a run."""
    model, batch = llama(layers=2)
    return stored(tmp_path, batch, model.bfloat16(), config("swap", keep=2))


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
    with pytest.raises(infinity.ResumeError, match="no generation 99; there are: 3, 2"):
        infinity.export_checkpoint(run, tmp_path / "out", step=99)
    with pytest.raises(infinity.ResumeError, match="holds no store"):
        infinity.export_checkpoint(tmp_path, tmp_path / "out")


def test_a_directory_with_something_in_it_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(infinity.InfinityError, match="out is there and not empty"):
        infinity.export_checkpoint(run, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["notes.txt"]


def test_a_full_disk_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(infinity.InfinityError, match="exporting to .*No space left on device.*Nothing there was"):
        infinity.export_checkpoint(run, tmp_path / "out")
    assert os.listdir(tmp_path) == ["swap"]


def test_a_store_in_use_is_refused(config: Config, tmp_path: Path, opened: list[Any]) -> None:
    model, batch = llama(layers=1)
    opened.append(begin(model, batch, config("swap"), 1)[0])
    with pytest.raises(infinity.StoreLockedError):
        infinity.export_checkpoint(tmp_path / "swap", tmp_path / "out")
    assert os.listdir(tmp_path) == ["swap"]


def test_an_export_leaves_the_run_as_it_was(run: Path, config: Config, tmp_path: Path, opened: list[Any]) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in run.iterdir() if path.name != "infinity.lock"}
    infinity.export_checkpoint(run, tmp_path / "out")
    assert before == {path.name: path.stat().st_mtime_ns for path in run.iterdir() if path.name != "infinity.lock"}
    opened.append(infinity.resume(llama(layers=2)[0].bfloat16(), config("swap", keep=2)))


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    infinity.export_checkpoint(run, tmp_path / "copy", max_shard_size="100KB")
    return tmp_path / "copy"


def test_what_is_no_copy_is_refused(copy: Path, config: Config, tmp_path: Path) -> None:
    (copy / "training-state.infinity").unlink()
    with pytest.raises(infinity.ResumeError, match="no portable copy of a run .*infinity checkpoint export"):
        infinity.load_pretrained(copy, config("other"), from_checkpoint=True)
    assert not (tmp_path / "other").exists()


def test_a_damaged_training_state_is_refused(copy: Path, config: Config) -> None:
    path = copy / "training-state.infinity"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(infinity.ManifestError, match="training-state.infinity is damaged"):
        infinity.load_pretrained(copy, config("other"), from_checkpoint=True)


def test_another_model_is_refused(copy: Path, config: Config, tmp_path: Path) -> None:
    with pytest.raises(
        infinity.ResumeError, match="is of a LlamaForCausalLM whose 'transformer.wte.weight' is missing"
    ):
        infinity.offload_from_checkpoint(gpt2()[0], copy, config("other"))
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("missing", ["exp_avg", "scales", "file"])
def test_a_missing_tensor_is_named(missing: str, copy: Path, config: Config, tmp_path: Path) -> None:
    path = copy / "optimizer" / "optimizer.safetensors.index.json"
    index = json.loads(path.read_text())
    name = "model.layers.0.mlp.up_proj.weight.exp_avg"
    shard = index["weight_map"][name]
    if missing == "file":
        (copy / "optimizer" / shard).unlink()
    elif missing == "exp_avg":
        del index["weight_map"][name]
        path.write_text(json.dumps(index))
    else:
        index["weight_map"][name] = next(other for other in index["weight_map"].values() if other != shard)
        path.write_text(json.dumps(index))
    with pytest.raises(infinity.ResumeError, match="optimizer"):
        infinity.load_pretrained(copy, config("other"), from_checkpoint=True)
    assert not (tmp_path / "other").exists()


def test_a_parameter_that_was_trained_and_is_frozen_now_is_named(copy: Path, config: Config, tmp_path: Path) -> None:
    model = llama(layers=2)[0].bfloat16()
    model.lm_head.weight.requires_grad_(False)
    with pytest.raises(infinity.ResumeError, match="trained 'lm_head.weight', which is frozen here"):
        infinity.offload_from_checkpoint(model, copy, config("other"))
    assert not (tmp_path / "other").exists()


# -- arithmetic and memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [256, 1000, _native.CHUNK_NUMEL + 300, 5 * _native.CHUNK_NUMEL])
@pytest.mark.parametrize(("moments", "signed"), [("bf16", True), ("int8", True), ("int8", False)])
def test_moments_that_are_decoded_and_encoded_again_have_the_same_bits(moments: str, signed: bool, numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) ** 3
    values = values if signed else values.abs()
    data = torch.zeros(_native.moment_bytes(moments, numel), dtype=torch.uint8)
    _native.encode_moments(values.numpy(), moments, is_signed=signed, data=data.numpy())
    decoded = torch.zeros(-(-numel // _native.BLOCK_NUMEL) * _native.BLOCK_NUMEL)
    _native.decode_moments(data.numpy(), moments, is_signed=signed, values=decoded[:numel].numpy())
    if moments == "int8":
        put_scales_back(decoded, scales_of(data, numel))
    again = torch.zeros_like(data)
    _native.encode_moments(decoded[:numel].numpy(), moments, is_signed=signed, data=again.numpy())
    assert torch.equal(data, again)


MEMORY = """
import re, sys, threading
from pathlib import Path
import torch
import infinity
import infinity.checkpoint.export, huggingface_hub, safetensors, transformers
from infinity.schedule import registry
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

def growth(act):
    before, peak, done = anonymous(), 0, threading.Event()
    def watch():
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous())
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        result = act()
    finally:
        done.set()
        thread.join()
    return result, peak - before

def build():
    return torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(3))).bfloat16()

def config(name):
    return {"weights": "nvme", "optimizer": "nvme", "activations": "keep", "commit_every": 1, "moments": "int8",
            "memory": {"device": "256MiB", "host": "512MiB"}, "nvme": {"paths": [str(out / name)]}}

out = Path(sys.argv[1])
model = infinity.offload(build(), config("swap") | {"moments": "fp32"})
optim = infinity.AdamW(model.parameters())
model(torch.ones(1, 2048, dtype=torch.bfloat16)).sum().backward()
optim.step()
infinity.close(model)
_, exporting = growth(lambda: infinity.export_checkpoint(out / "swap", out / "copy"))
with torch.device("meta"):
    model = build()
_, importing = growth(lambda: infinity.offload_from_checkpoint(model, out / "copy", config("other")))
plan = registry.ledger_of(model).backing.plan
print(exporting, max(importing - plan.host_bytes - plan.device_bytes, 0))
"""


def test_memory_is_bounded_by_chunks_and_not_by_the_model(tmp_path: Path) -> None:
    """Units of 8 MiB, 168 MiB in the copy: neither way holds more than a few chunks and a unit."""
    done = subprocess.run([sys.executable, "-c", MEMORY, tmp_path], check=True, capture_output=True, text=True)
    exporting, importing = map(int, done.stdout.split())
    copied = sum(path.stat().st_size for path in (tmp_path / "copy").rglob("*.safetensors"))
    assert copied >= 168 << 20
    assert exporting < 56 << 20
    assert importing < 32 << 20
