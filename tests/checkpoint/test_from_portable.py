"""A run goes on from its portable copy, on other disks and in other forms of its states."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity import _native
from infinity.checkpoint.generation import CHUNK_NUMEL
from infinity.io import document
from infinity.state.int8 import put_scales_back, scales_of
from tests import processes
from tests.checkpoint.runs import STEPS, Config, go_on, stored, tensors_in, train
from tests.conftest import states_of, weights_of
from tests.models import gpt2, llama, mixed

FORMS = {
    "fp32 moments": {},
    "bf16 moments": {"moments": "bf16"},
    "int8 moments": {"moments": "int8"},
    "fp32 masters": {"master": "fp32"},
    "no masters": {"master": "none"},
}


@pytest.mark.covering(strength=1, most=4)
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


def test_the_optimizers_state_dict_of_the_run_is_taken_until_the_next_step(
    config: Config, tmp_path: Path, opened: list[Any]
) -> None:
    """Libraries save it into their checkpoints."""
    model, batch = llama(layers=2)
    infinity.offload(model, config("swap"))
    before = infinity.AdamW(model.parameters(), lr=1e-3)
    model(**batch).loss.backward()
    before.step()
    saved = before.state_dict()
    infinity.close(model)
    infinity.export_checkpoint(tmp_path / "swap", tmp_path / "out")
    again = infinity.load_pretrained(tmp_path / "out", config("other"), dtype=torch.float32, from_checkpoint=True)
    opened.append(again)
    optim = infinity.AdamW(again.parameters(), lr=1e-2)
    optim.load_state_dict(saved)
    assert optim.param_groups[0]["lr"] == 1e-3
    again(**batch).loss.backward()
    optim.step()
    with pytest.raises(infinity.ModelError, match=r"it belongs to run \w+, and this is run"):
        optim.load_state_dict(saved)


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


@pytest.mark.covering(strength=1, most=1)
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


@pytest.mark.covering(most=2)
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


@pytest.mark.covering(strength=1)
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
    assert go_on(there, batch, 1) == go_on(here, batch, 1)
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


def test_what_is_no_copy_is_refused(copy: Path, config: Config, tmp_path: Path) -> None:
    (copy / "training-state.infinity").unlink()
    with pytest.raises(infinity.ResumeError, match="not a portable copy of a run .*infinity checkpoint export"):
        infinity.load_pretrained(copy, config("other"), from_checkpoint=True)
    assert not (tmp_path / "other").exists()


def test_a_training_state_has_the_form_that_older_versions_read(copy: Path) -> None:
    """They refuse a field that they do not know, so a new one needs a new version."""
    fields = document.read(copy / "training-state.infinity", "training state", 1)
    assert fields.keys() == {"run", "step", "created", "extents", "sums", "facts", "body"}
    assert fields["extents"] == []


def test_a_damaged_training_state_is_refused(copy: Path, config: Config) -> None:
    path = copy / "training-state.infinity"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(infinity.ManifestError, match="training-state.infinity is damaged"):
        infinity.load_pretrained(copy, config("other"), from_checkpoint=True)


def test_another_model_is_refused(copy: Path, config: Config, tmp_path: Path) -> None:
    with pytest.raises(
        infinity.ResumeError, match="is a copy of a LlamaForCausalLM whose 'transformer.wte.weight' is missing"
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
    with pytest.raises(infinity.ResumeError, match="trained 'lm_head.weight', which is frozen in this model"):
        infinity.offload_from_checkpoint(model, copy, config("other"))
    assert not (tmp_path / "other").exists()


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
import ctypes, re, sys, threading
from pathlib import Path
import torch
import infinity
import infinity.checkpoint.export, huggingface_hub, safetensors, transformers
from infinity.coordinator import registry
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

mallopt = ctypes.CDLL(None).mallopt  # glibc keeps no freed memory: what is measured is what is in use
for option, value in ((-8, 1), (-3, 64 << 10), (-1, 64 << 10)):  # M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
    assert mallopt(option, value) == 1

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
plan = registry.coordinator_of(model).resources.plan
print(exporting, max(importing - plan.host_bytes - plan.device_bytes, 0))
"""


@pytest.mark.long(kept="nothing else looks at the memory that a copy takes, which chunks bound where a model is large")
def test_memory_is_bounded_by_chunks_and_not_by_the_model(tmp_path: Path) -> None:
    """Units of 8 MiB, 168 MiB in the copy: neither way holds more than a few chunks and a unit."""
    done = processes.run_script(MEMORY, str(tmp_path))
    assert done.returncode == 0, done.stderr
    exporting, importing = map(int, done.stdout.split())
    copied = sum(path.stat().st_size for path in (tmp_path / "copy").rglob("*.safetensors"))
    assert copied >= 168 << 20
    assert exporting < 48 << 20
    assert importing < 32 << 20


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def files_of(copy: Path) -> list[str]:
    return sorted(path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file())


def test_every_file_of_a_copy_has_a_checksum_that_any_tool_checks(copy: Path) -> None:
    sums = [line.split("  ") for line in (copy / "SHA256SUMS").read_text().splitlines()]
    assert [name for _, name in sums] == [name for name in files_of(copy) if name != "SHA256SUMS"]
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=copy, check=True)


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
def test_a_damaged_file_of_a_copy_is_named_and_nothing_is_made(
    damage: Any, copy: Path, config: Config, tmp_path: Path
) -> None:
    for name in files_of(copy):
        whole = (copy / name).read_bytes()
        damage(copy / name)
        for begin in (
            lambda: infinity.load_pretrained(copy, config("other"), from_checkpoint=True),
            lambda: infinity.offload_from_checkpoint(llama(layers=2)[0].bfloat16(), copy, config("other")),
        ):
            if damage is Path.unlink and name == "SHA256SUMS":
                continue
            with pytest.raises(infinity.ResumeError, match=name):
                begin()
            assert not (tmp_path / "other").exists()
        (copy / name).write_bytes(whole)
    infinity.close(infinity.load_pretrained(copy, config("other"), from_checkpoint=True))


def test_a_copy_without_checksums_is_read_and_a_line_says_so(
    copy: Path, config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    (copy / "SHA256SUMS").unlink()
    with caplog.at_level("WARNING", "infinity"):
        infinity.close(infinity.load_pretrained(copy, config("other"), from_checkpoint=True))
    assert f"{copy} has no SHA256SUMS, because an older infinity exported it" in caplog.text


def test_a_list_that_was_cut_does_not_pass_for_a_shorter_one(copy: Path, config: Config) -> None:
    whole = (copy / "SHA256SUMS").read_text().splitlines(keepends=True)
    needed = [line for line in whole if "safetensors" in line or "training-state" in line]
    for line in needed:
        (copy / "SHA256SUMS").write_text("".join(other for other in whole if other != line))
        with pytest.raises(infinity.ResumeError, match="has no checksum of"):
            infinity.load_pretrained(copy, config("other"), from_checkpoint=True)
    (copy / "SHA256SUMS").write_text("")
    with pytest.raises(infinity.ResumeError, match="SHA256SUMS is damaged"):
        infinity.load_pretrained(copy, config("other"), from_checkpoint=True)


def test_what_was_changed_on_purpose_is_taken_out_of_the_list(copy: Path, config: Config) -> None:
    (copy / "config.json").write_text((copy / "config.json").read_text() + "\n")
    (copy / "README.md").write_text("mine")
    with pytest.raises(infinity.ResumeError, match="config.json is damaged.*remove its line from SHA256SUMS"):
        infinity.load_pretrained(copy, config("other"), from_checkpoint=True)
    lines = (copy / "SHA256SUMS").read_text().splitlines(keepends=True)
    (copy / "SHA256SUMS").write_text("".join(line for line in lines if "  config.json" not in line))
    infinity.close(infinity.load_pretrained(copy, config("other"), from_checkpoint=True))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
@pytest.mark.parametrize(
    "name",
    [
        "training-state.infinity",
        "SHA256SUMS",
        "optimizer/optimizer.safetensors.index.json",
        "optimizer/optimizer-00001-of-00005.safetensors",
        "model.safetensors.index.json",
    ],
)
def test_what_is_no_file_is_not_read(name: str, put: Any, copy: Path, config: Config, tmp_path: Path) -> None:
    if not (copy / name).exists():
        name = next(each for each in files_of(copy) if each.startswith("optimizer/optimizer-00001"))
    (copy / name).unlink()
    put(copy / name)
    for without in (False, True):
        if without and name in ("SHA256SUMS", "model.safetensors.index.json"):
            continue  # where there are masters no weight is read
        if without:
            (copy / "SHA256SUMS").unlink()
        with pytest.raises(infinity.ResumeError, match=name):
            infinity.offload_from_checkpoint(llama(layers=2)[0].bfloat16(), copy, config("other"))
        assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "weight_map",
    [None, [], {"a": 1}, {"a": "../model.safetensors"}, {"a": ".."}, {"a": ""}, {"a": "/dev/zero"}, {"a": "x\0"}],
)
def test_an_index_that_names_no_files_beside_it_is_refused(weight_map: Any, copy: Path, config: Config) -> None:
    path = copy / "optimizer" / "optimizer.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(infinity.ManifestError, match=f"{path} has a wrong value: weight_map"):
        infinity.offload_from_checkpoint(llama(layers=2)[0].bfloat16(), copy, config("other"))
    path.write_text("[" * 100_000)
    with pytest.raises(infinity.ManifestError, match=f"{path} is not valid JSON"):
        infinity.offload_from_checkpoint(llama(layers=2)[0].bfloat16(), copy, config("other"))
