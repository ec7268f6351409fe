"""`--merge`: the output is one model, with the adapters in it, and the base as it rests."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from infinity.cli.main import main
from tests.cli.test_finetune import run
from tests.cli.test_frozen import FEW, generated
from tests.cli.test_lora import ADAPTERS, LORA
from tests.cli.test_resume import _job, _losses, _same, _stop_after
from tests.cli.test_resume import job as job  # with dropout in the model
from tests.models import VOCABULARY, tied_llama

MERGE = [*LORA, "--merge"]


def test_the_output_is_what_peft_merges(job: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    from peft import PeftModel

    flags = ["--lora-alpha", "3", "--lora-targets", "q_proj", "down_proj", "--verify-output"]
    assert run(job | FEW, *MERGE, *flags) == 0
    out = capsys.readouterr().out
    assert "verified: the saved model, loaded by plain transformers, gives the trained model's logits, bit for" in out
    assert f"model, with the adapters merged into it, report and loss curve: {tmp_path / 'out-a'}" in out
    assert run(_job(tmp_path, "b") | FEW, *LORA, *flags) == 0
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    both = PeftModel.from_pretrained(base, str(tmp_path / "out-b"), autocast_adapter_dtype=False)
    both.merge_and_unload().save_pretrained(tmp_path / "both")
    assert _same(tmp_path / "out-a", tmp_path / "both")
    assert _losses(tmp_path / "out-a") == _losses(tmp_path / "out-b"), "--merge changes nothing of the training"
    assert not (tmp_path / "out-a" / ADAPTERS).exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "out-a")("the fox")["input_ids"]
    report = json.loads((tmp_path / "out-a" / "report.json").read_text())
    assert report["trained_parameters"] < report["parameters"] / 4
    assert not (tmp_path / "swap-a").exists() or not list((tmp_path / "swap-a").glob("*.swap"))


@pytest.mark.covering(strength=1, most=1)
@pytest.mark.parametrize("form", ["int8", "nf4"])
def test_an_encoded_base_is_merged_as_it_decodes(form: str, job: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    flags = ["--frozen", form, "--verify-output"]
    assert run(job | FEW, *MERGE, *flags) == 0
    assert "verified: the saved model, loaded by plain transformers" in capsys.readouterr().out
    assert run(_job(tmp_path, "b") | FEW, *LORA, *flags) == 0
    merged, adapters = load_file(tmp_path / "out-a" / "model.safetensors"), load_file(tmp_path / "out-b" / ADAPTERS)
    base = load_file(tmp_path / "model" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    a, b = (adapters[f"base_model.model.{name}.lora_{each}.weight"].float() for each in "AB")
    decoded = merged[f"{name}.weight"] - (2 * b @ a).bfloat16()
    away = (decoded - base[f"{name}.weight"]).abs()
    assert 0 < away.max() < 0.2 * base[f"{name}.weight"].abs().max()
    assert torch.equal(merged["model.embed_tokens.weight"], base["model.embed_tokens.weight"])


def test_a_merged_model_writes(job: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    assert run(job | FEW, *MERGE) == 0
    assert generated(tmp_path / "out-a", job["--config"], capsys)


@pytest.mark.long
def test_a_run_with_adapters_ends_merged_where_that_is_asked_later(
    job: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    assert run(job, *MERGE, "--save-every", "5") == 0
    _stop_after(_job(tmp_path, "b"), signal.SIGKILL, *LORA, "--save-every", "5", "--keep-store")
    assert main(["finetune", "--resume", str(tmp_path / "swap-b")]) == 0
    assert (tmp_path / "out-b" / ADAPTERS).exists()
    again = ["finetune", "--resume", str(tmp_path / "swap-b"), "--output", str(tmp_path / "out-c"), "--merge"]
    assert main(again) == 0
    assert _same(tmp_path / "out-a", tmp_path / "out-c")
    assert (tmp_path / "out-a-steps" / "checkpoint-5" / "model.safetensors").exists()
    assert (tmp_path / "out-b-steps" / "checkpoint-5" / ADAPTERS).exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--merge"], "--merge does nothing without --lora"),
        (
            [*MERGE, "--lora-targets", "embed_tokens"],
            "--merge: merging adapters of 'model.embed_tokens', whose weight is tied to the weight of another module",
        ),
    ],
)
def test_what_cannot_be_merged_is_an_error_before_training(
    flags: list[str], says: str, job: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    tied_llama()[0].bfloat16().save_pretrained(tmp_path / "model")
    assert run(job, *flags) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert "step 1" not in said.out
    assert not (tmp_path / "out-a").exists()
    assert not (tmp_path / "swap-a").exists()


def test_layers_in_tiles_are_merged_around(job: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 4096, "vocab_size": VOCABULARY}
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2)).bfloat16().save_pretrained(tmp_path / "model")
    _job(tmp_path, "a", memory={"device": "1000KiB", "host": "64MiB"})
    assert run(job, *MERGE, "--lora-targets", "up_proj") == 2
    said = capsys.readouterr()
    assert "--merge: merging adapters of 'model.layers.0.mlp.up_proj', which runs in tiles" in said.err
    assert "step 1" not in said.out
    assert not (tmp_path / "out-a").exists()
    assert run(job | FEW, *MERGE, "--lora-targets", "q_proj", "--verify-output") == 0
    assert "bit for bit" in capsys.readouterr().out
