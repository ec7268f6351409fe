"""`--frozen`: what is not trained rests in 4 or 8 bits, in training and in generation."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from infinity.cli.main import main
from tests.checkpoint.fp8 import plain_from, write_fp8
from tests.checkpoint.packed import FORMS
from tests.checkpoint.quantized import quantize
from tests.cli.test_evaluation import evaluations
from tests.cli.test_finetune import run, tokenizer
from tests.cli.test_lora import ADAPTERS, LORA, same_adapters
from tests.cli.test_resume import _job, _losses, _stop_after
from tests.cli.test_resume import job as job  # with dropout in the model

NF4 = ["--frozen", "nf4"]
FEW = {"--steps": 3}
ONE = {"--steps": 1, "--warmup-steps": 0}


@pytest.mark.covering(strength=1, most=1)
@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_adapters_are_verified_beside_the_base_as_it_rests(
    form: str, job: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    assert run(job | FEW, *LORA, "--frozen", form, "--eval-split", "0.2", "--verify-output") == 0
    out = capsys.readouterr().out
    assert "verified: the saved adapters, loaded by PEFT, give the trained model's logits, bit for bit" in out
    assert run(_job(tmp_path, "b") | FEW, *LORA, "--eval-split", "0.2") == 0
    assert _losses(tmp_path / "out-a") != _losses(tmp_path / "out-b"), "the base has other values"
    mine, others = (evaluations(tmp_path / f"out-{name}") for name in "ab")
    assert mine != others
    assert f'frozen: "{form}"' in (tmp_path / "out-a" / "run.yaml").read_text()


@pytest.mark.long
def test_the_option_says_what_the_swap_config_says(job: dict[str, Any], tmp_path: Path) -> None:
    assert run(job | FEW, *LORA, *NF4) == 0
    assert run(_job(tmp_path, "b", frozen="nf4") | FEW, *LORA) == 0
    assert run(_job(tmp_path, "c", frozen="int8") | FEW, *LORA, *NF4) == 0
    assert run(_job(tmp_path, "d", frozen="int8") | FEW, *LORA, "--frozen", "bf16") == 0
    assert run(_job(tmp_path, "e") | FEW, *LORA) == 0
    assert same_adapters(tmp_path / "out-a", tmp_path / "out-b")
    assert same_adapters(tmp_path / "out-a", tmp_path / "out-c")
    assert same_adapters(tmp_path / "out-d", tmp_path / "out-e")
    assert not same_adapters(tmp_path / "out-a", tmp_path / "out-e")


def test_frozen_layers_of_a_model_rest_encoded_and_are_saved_decoded(
    job: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    assert run(job | FEW, "--freeze", "model.layers.0.*", *NF4, "--verify-output") == 0
    assert "verified: the saved model, loaded by plain transformers, gives" in capsys.readouterr().out
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out-a"))
    for name in before:
        if name.startswith("model.layers.0.") and "norm" not in name:
            assert not torch.equal(before[name], after[name])
            assert (before[name] - after[name]).abs().max() < 0.2 * before[name].abs().max()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_a_resumed_run_has_its_form(number: int, job: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    assert run(job, *LORA, *NF4) == 0
    _stop_after(_job(tmp_path, "b"), number, *LORA, *NF4)
    swap = str(tmp_path / "swap-b")
    assert main(["finetune", "--resume", swap, "--frozen", "int8"]) == 2
    assert "--frozen is int8, but the resumed run has nf4: leave it out" in capsys.readouterr().err
    assert main(["finetune", "--resume", swap, *NF4]) == 0
    assert _losses(tmp_path / "out-b") == _losses(tmp_path / "out-a")
    assert same_adapters(tmp_path / "out-a", tmp_path / "out-b")


def test_the_form_of_a_run_may_come_from_its_swap_config(job: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    _stop_after(_job(tmp_path, "a", frozen="nf4"), signal.SIGINT, *LORA)
    _stop_after(_job(tmp_path, "b"), signal.SIGINT, *LORA)
    assert main(["finetune", "--resume", str(tmp_path / "swap-a"), "--frozen", "bf16"]) == 2
    assert "--frozen is bf16, but the resumed run has nf4" in capsys.readouterr().err
    assert main(["finetune", "--resume", str(tmp_path / "swap-b"), *NF4]) == 2
    assert "--frozen is nf4, but the resumed run has auto" in capsys.readouterr().err
    assert main(["finetune", "--resume", str(tmp_path / "swap-a"), *NF4]) == 0


def test_adapters_of_a_quantized_model_are_verified_merged_only(
    job: dict[str, Any], tmp_path: Path, capsys: Any, bitsandbytes: Any
) -> None:
    quantize(tmp_path / "model", tmp_path / "small", "nf4")
    tokenizer().save_pretrained(tmp_path / "small")
    job["--model"] = tmp_path / "small"
    assert run(job | FEW, *LORA, "--verify-output") == 2
    assert "--verify-output of adapters of a quantized model is not available yet" in capsys.readouterr().err
    assert run(job | FEW, *LORA, "--verify-output", "--merge") == 0
    assert "bit for bit" in capsys.readouterr().out
    assert "quantization_config" not in (tmp_path / "out-a" / "config.json").read_text()


def _bases(form: str, model: Any, directory: Path) -> tuple[Path, Path]:
    """Save a model in a form, and with the decoded weights in bf16."""
    if form == "fp8":
        block = (48, 40)  # no side of a weight is a multiple of these
        base = write_fp8(model, directory / form, "bf16", block)
        return base, plain_from(base, model, directory / "plain", block)
    base = FORMS[form].write(directory / form, model)
    return base, FORMS[form].plain_from(base, directory / "plain", model)


@pytest.mark.covering(strength=1, most=2)
@pytest.mark.parametrize("form", ["fp8", "modelopt", "compressed-tensors", "integers"])
def test_a_quantized_base_is_trained_on_merged_and_used_as_it_is(
    form: str, job: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    base, plain = _bases(form, model, tmp_path)
    for path in (base, plain):
        tokenizer().save_pretrained(path)
    assert run(job | FEW | {"--model": base}, *LORA) == 0
    assert run(_job(tmp_path, "b") | FEW | {"--model": plain}, *LORA) == 0
    assert _losses(tmp_path / "out-a") == _losses(tmp_path / "out-b")
    assert same_adapters(tmp_path / "out-a", tmp_path / "out-b")
    assert str(base) in (tmp_path / "out-a/adapter_config.json").read_text()
    assert generated(tmp_path / "out-a", job["--config"], capsys) == generated(
        tmp_path / "out-b", job["--config"], capsys
    )
    assert generated(base, job["--config"], capsys) == generated(plain, job["--config"], capsys)
    assert run(_job(tmp_path, "c") | FEW | {"--model": base}, *LORA, "--merge", "--verify-output") == 0
    assert "bit for bit" in capsys.readouterr().out
    assert "quantization_config" not in (tmp_path / "out-c/config.json").read_text()
    merged = load_file(tmp_path / "out-c/model.safetensors")
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}


def test_it_says_nothing_where_all_is_trained(job: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    assert run(job, *NF4) == 2
    err = capsys.readouterr().err
    assert (
        "--frozen nf4 is for weights that are not trained, and all weights are trained: train adapters (--lora" in err
    )
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "swap-a").exists()
    for name, flags in {"b": [*LORA, *NF4], "c": ["--freeze", "model.embed_tokens.*", *NF4], "d": []}.items():
        assert run(_job(tmp_path, name) | ONE, *flags) == 0


def generated(model: Path, config: Path, capsys: Any, *flags: str) -> str:
    capsys.readouterr()
    line = ["generate", "--model", str(model), "--config", str(config), "--prompt", "the quick brown", "--max-tokens"]
    assert main([*line, "12", "--dtype", "bf16", *flags]) == 0
    text: str = capsys.readouterr().out
    return text


@pytest.mark.covering(strength=1, most=1)
@pytest.mark.parametrize("form", ["int8", "nf4"])
def test_a_model_writes_what_its_decoded_weights_write(
    form: str, job: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    """The decoded model is that of a run that froze its layers, and changed nothing else."""
    config = job["--config"]
    still = ["--freeze", "model.layers.*", "--frozen", form, "--lr", "1e-12", "--weight-decay", "0"]
    assert run({name: value for name, value in job.items() if name != "--lr"} | {"--steps": 1}, *still) == 0
    expected = generated(tmp_path / "out-a", config, capsys)
    assert generated(tmp_path / "model", config, capsys, "--frozen", form) == expected
    values = yaml.safe_load(config.read_text()) | {"frozen": form}
    (tmp_path / "encoded.yaml").write_text(yaml.safe_dump(values))
    assert generated(tmp_path / "model", tmp_path / "encoded.yaml", capsys) == expected
    plain = generated(tmp_path / "model", config, capsys)
    assert generated(tmp_path / "model", tmp_path / "encoded.yaml", capsys, "--frozen", "bf16") == plain


def test_adapters_write_beside_the_base_as_it_rests(job: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    assert run(job | FEW, *LORA, *NF4) == 0
    assert load_file(tmp_path / "out-a" / ADAPTERS)
    assert generated(tmp_path / "out-a", job["--config"], capsys, *NF4)
    assert "--frozen" not in capsys.readouterr().err


@pytest.mark.covering(strength=1, most=1)
@pytest.mark.parametrize("by", ["option", "swap config"])
def test_adapters_write_beside_the_form_that_they_were_trained_with(
    by: str, job: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    config = job["--config"]
    assert (run(job | FEW, *LORA, *NF4) if by == "option" else run(_job(tmp_path, "a", frozen="nf4") | FEW, *LORA)) == 0
    adapters = tmp_path / "out-a"
    plain = tmp_path / "plain.yaml"
    plain.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | {"frozen": "auto"}))
    made = ["generate", "--model", str(adapters), "--config", str(plain), "--prompt", "a", "--max-tokens", "2"]
    file = adapters / ("run.yaml" if by == "option" else "swap.yaml")
    line = f"the adapters were trained with weights in nf4 ({file}), so the weights are stored in nf4 here; --frozen"
    capsys.readouterr()
    assert main(made) == 0
    taken = capsys.readouterr()
    assert line in taken.err
    for form, same in (("nf4", True), ("bf16", False)):
        assert main([*made, "--frozen", form]) == 0
        given = capsys.readouterr()
        assert "were trained with" not in given.err
        assert given.out == taken.out or not same
    (adapters / "run.yaml").write_text("frozen: [")
    (adapters / "swap.yaml").write_text("frozen: fp4")
    assert main(made) == 0
    assert "were trained with" not in capsys.readouterr().err
