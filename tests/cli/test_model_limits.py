"""A model, its tokenizer and the data go together, or the run is refused with what does not fit."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import tomllib
import torch
import transformers as hf
import yaml
from transformers import AutoModelForCausalLM

import infinity
from infinity.cli.main import main
from infinity.cli.trainers import FinetuneSFTTrainer
from infinity.units.fetcher import Fetcher
from tests.cli.test_finetune import TEXT, run, tokenizer
from tests.models import VOCABULARY, gpt2, llama

Job = dict[str, Any]


def use(model: torch.nn.Module, job: Job, *, with_tokenizer: bool = True) -> None:
    for path in job["--model"].iterdir():
        path.unlink()
    model.save_pretrained(job["--model"])
    if with_tokenizer:
        tokenizer().save_pretrained(job["--model"])


def refused(job: Job, message: str, tmp_path: Path, capsys: Any) -> None:
    capsys.readouterr()
    assert run(job) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("error: ") == 1
    assert len(captured.err.splitlines()) == 1
    assert "step 1/" not in captured.out
    assert not (tmp_path / "swap").exists()
    assert not (tmp_path / "out").exists()


def qwen3() -> torch.nn.Module:
    config = hf.Qwen3Config(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=VOCABULARY, max_position_embeddings=64,
    )  # fmt: skip
    return hf.Qwen3ForCausalLM(config)


@pytest.mark.parametrize("model", [gpt2()[0], qwen3()], ids=["gpt2", "qwen3"])
def test_a_sequence_longer_than_the_models_positions_is_refused(
    model: torch.nn.Module,
    job: Job,
    tmp_path: Path,
    capsys: Any,
) -> None:
    use(model, job)
    refused(job | {"--sequence-length": 65}, "--sequence-length is 65, but ", tmp_path, capsys)
    assert run(job | {"--sequence-length": 64, "--steps": 1}) == 0


def test_a_model_with_rotary_positions_learns_more_of_them_where_its_config_says_so(
    job: Job, tmp_path: Path, capsys: Any
) -> None:
    use(qwen3(), job)
    longer = job | {"--sequence-length": 65, "--steps": 1}
    refused(longer, "write the larger number into its config.json", tmp_path, capsys)
    config = job["--model"] / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 65}))
    assert run(longer) == 0


def test_positions_that_the_config_does_not_tell_are_named_too(
    job: Job,
    tmp_path: Path,
    capsys: Any,
) -> None:
    """RoBERTa's positions begin at 2."""
    config = hf.RobertaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCABULARY,
        max_position_embeddings=34, is_decoder=True,
    )  # fmt: skip
    use(hf.RobertaForCausalLM(config), job)
    assert run(job | {"--sequence-length": 33}) == 2
    assert "the model cannot compute sequences of 33 tokens" in capsys.readouterr().err
    assert not (tmp_path / "swap").exists()
    assert run(job | {"--sequence-length": 32, "--steps": 1}) == 0


FEWER = [{"--sequence-length": 8}, {"--batch-size": 1}]


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("fewer", FEWER, ids=["shorter", "fewer"])
@pytest.mark.parametrize("of", ["forward", "backward"])
def test_without_memory_for_a_pass_a_smaller_one_runs(
    of: str, fewer: Job, job: Job, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    tokens = [0]
    compute, backward = FinetuneSFTTrainer.compute_loss, torch.Tensor.backward

    def allocate(where: str) -> None:
        if where == of and tokens[0] > 16:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory")

    def forward(trainer: Any, model: Any, inputs: Any, **named: Any) -> torch.Tensor:
        tokens[0] = inputs["input_ids"].numel()
        allocate("forward")
        loss: torch.Tensor = compute(trainer, model, inputs, **named)
        return loss

    def back(loss: torch.Tensor, *given: Any, **named: Any) -> None:
        allocate("backward")
        backward(loss, *given, **named)

    monkeypatch.setattr(FinetuneSFTTrainer, "compute_loss", forward)
    monkeypatch.setattr(torch.Tensor, "backward", back)
    assert run(job | {"--steps": 1}) == 2
    error = capsys.readouterr().err
    assert re.search(
        "ive a smaller --sequence-length or --batch-size|se a smaller --batch-size or --sequence-len", error
    )
    assert run(job | {"--steps": 1} | fewer) == 0


def test_a_pass_of_too_many_tokens_is_done_in_several(job: Job, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("infinity.cli.main.TOKENS_MAX", 16)
    assert run(job | {"--steps": 1}) == 2
    assert "Use a smaller --batch-size and more --gradient-accumulation." in capsys.readouterr().err
    assert run(job | {"--steps": 1, "--batch-size": 1, "--gradient-accumulation": 2}) == 0


def test_a_device_that_fails_a_copy_is_told_as_that(job: Job, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def bring(room: Fetcher, unit: Any) -> None:
        raise infinity.DeviceCopyError("copying", path="device 0", detail="the device's runtime returned error 2")

    monkeypatch.setattr(Fetcher, "fetch", bring)
    assert run(job) == 1
    told = capsys.readouterr().err
    assert "device 0: the device's runtime returned error 2" in told
    assert "--sequence-length" not in told


@pytest.mark.parametrize("build", [llama, gpt2])
def test_a_model_without_a_tokenizer_is_refused(build: Any, job: Job, tmp_path: Path, capsys: Any) -> None:
    use(build()[0], job, with_tokenizer=False)
    refused(job, "tokenizer", tmp_path, capsys)


def test_tokens_beyond_the_vocabulary_are_found_before_the_model_is_loaded(
    job: Job,
    tmp_path: Path,
    capsys: Any,
) -> None:
    """The last word of the data is one that was added to the tokenizer and not to the model."""
    added = tokenizer()
    added.add_tokens([f"<new{index}>" for index in range(VOCABULARY)])
    last = len(added) - 1
    added.save_pretrained(job["--model"])
    assert run(job | {"--steps": 1}) == 0, "what is not used does not matter"
    (tmp_path / "text.txt").write_text(TEXT + f"<new{VOCABULARY - 1}>")
    os.rename(tmp_path / "out", tmp_path / "first")
    refused(job, f"token {last}, but the model's vocabulary has {VOCABULARY}", tmp_path, capsys)


@pytest.mark.parametrize("damage", ["truncated", "not JSON", "another kind"])
def test_a_damaged_tokenizer_is_one_line(damage: str, job: Job, tmp_path: Path, capsys: Any) -> None:
    path = job["--model"] / "tokenizer.json"
    text = path.read_text()
    path.write_text(
        {"truncated": text[: len(text) // 2], "not JSON": "x", "another kind": '{"model": {"a": 1}}'}[damage]
    )
    refused(job, "cannot load the tokenizer of", tmp_path, capsys)


def test_a_damaged_model_is_one_line(job: Job, tmp_path: Path, capsys: Any) -> None:
    os.truncate(job["--model"] / "model.safetensors", 50_000)
    refused(job, "model.safetensors: ", tmp_path, capsys)


def test_a_hub_id_is_asked_for_after_saying_so(
    job: Job,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        assert "--model nope: there is no such directory; asking the Hugging Face hub" in capsys.readouterr().out
        raise OSError("We couldn't connect\nto the hub")

    monkeypatch.setattr(hf.AutoTokenizer, "from_pretrained", unreachable)
    assert run(job | {"--model": "nope"}) == 2
    assert "from the Hugging Face hub: OSError: We couldn't connect to the hub" in capsys.readouterr().err


def test_sequences_of_one_token_are_refused(job: Job, tmp_path: Path, capsys: Any) -> None:
    refused(job | {"--sequence-length": 1}, "--sequence-length must be at least 2", tmp_path, capsys)


def test_an_export_needs_no_other_directory(job: Job, tmp_path: Path, capsys: Any) -> None:
    config = json.loads(json.dumps({"commit_every": 1, "nvme": {"paths": [str(tmp_path / "swap")]}}))
    job["--config"].write_text(json.dumps(config))
    assert run(job | {"--steps": 2}, "--keep-store") == 0
    copy = tmp_path / "copy"
    assert main(["checkpoint", "export", str(tmp_path / "swap"), "--output", str(copy)]) == 0
    job["--model"].rename(tmp_path / "moved")
    other = {"nvme": {"paths": [str(tmp_path / "other")]}, "commit_every": 1}
    job["--config"].write_text(json.dumps(other))
    goes_on = ["--from-checkpoint", str(copy), "--config", str(job["--config"]), "--steps", "3"]
    assert main(["finetune", *goes_on, "--output", str(tmp_path / "longer")]) == 0
    job["--config"].write_text(json.dumps(other | {"nvme": {"paths": [str(tmp_path / "third")]}}))
    assert run(job | {"--model": copy, "--output": tmp_path / "anew"}) == 0
    for name in ("longer", "anew"):
        AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert (tmp_path / name / "tokenizer.json").exists()


def test_an_export_whose_tokenizer_is_gone_says_so(job: Job, tmp_path: Path, capsys: Any) -> None:
    job["--config"].write_text(json.dumps({"commit_every": 1, "nvme": {"paths": [str(tmp_path / "swap")]}}))
    assert run(job | {"--steps": 1}, "--keep-store") == 0
    job["--model"].rename(tmp_path / "moved")
    assert main(["checkpoint", "export", str(tmp_path / "swap"), "--output", str(tmp_path / "copy")]) == 0
    assert "warning: the exported checkpoint has no tokenizer" in capsys.readouterr().err
    goes_on = ["--from-checkpoint", str(tmp_path / "copy"), "--config", str(job["--config"])]
    job["--config"].write_text(json.dumps({"nvme": {"paths": [str(tmp_path / "swap-new")]}}))
    assert main(["finetune", *goes_on, "--output", str(tmp_path / "again")]) == 2
    assert "Where is it now? Give --model" in capsys.readouterr().err
    given = ["--model", str(tmp_path / "moved"), "--output", str(tmp_path / "given")]
    copied = ["--output", str(tmp_path / "copied")]
    for way in given, copied:
        job["--config"].write_text(json.dumps({"nvme": {"paths": [str(tmp_path / f"swap-{len(way)}")]}}))
        assert main(["finetune", *goes_on, "--steps", "2", *way]) == 0
        for file in (tmp_path / "moved").glob("*token*"):
            shutil.copy(file, tmp_path / "copy")


def test_a_head_in_tiles_learns_what_a_whole_one_does(job: Job, tmp_path: Path) -> None:
    losses = []
    for device in ("8MiB", "1600KiB"):
        torch.manual_seed(0)
        model = llama(2)[0]
        model.resize_token_embeddings(4000)
        use(model, job)
        config = yaml.safe_load(job["--config"].read_text())
        config["memory"]["device"] = device
        job["--config"].write_text(yaml.safe_dump(config))
        job["--output"] = tmp_path / device
        assert run(job | {"--steps": 3, "--dtype": "fp32"}) == 0
        losses.append([float(row.split(",")[1]) for row in (tmp_path / device / "loss.csv").read_text().split()[1:]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_library_that_is_missing_is_named_with_the_command_that_installs_it(
    job: Job, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "trl" else find(name))
    assert run(job) == 2
    error = capsys.readouterr().err
    assert 'trl cannot be imported: pip install "infinity-offload[hf]"' in error
    (extra,) = re.findall(r"\[(\w+)\]", error)
    wanted = tomllib.loads((Path(infinity.__file__).parents[1] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ][extra]
    assert {re.split("[>=]", each)[0] for each in wanted} >= {"trl", "datasets"}


def test_a_library_that_is_too_old_is_named(job: Job, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "1.2.0" if name == "trl" else version(name))
    assert run(job) == 2
    assert "infinity finetune needs trl>=1.16, but 1.2.0 is installed: pip install" in capsys.readouterr().err
