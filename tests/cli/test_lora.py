"""`--lora` trains what PEFT would train, and `--freeze` leaves out what it names."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from infinity.cli.main import main
from tests.cli.test_finetune import run
from tests.cli.test_resume import _job, _losses, _stop_after
from tests.cli.test_resume import job as job  # with dropout in the model
from tests.models import qwen3_moe

LORA = ["--lora", "4"]
ADAPTERS = "adapter_model.safetensors"


def same_adapters(one: Path, other: Path) -> bool:
    mine, others = load_file(one / ADAPTERS), load_file(other / ADAPTERS)
    return mine.keys() == others.keys() and all(torch.equal(mine[name], others[name]) for name in mine)


def plain_losses(job: dict[str, Any], **of_lora: Any) -> list[float]:
    """Return the losses of PEFT and torch.optim.AdamW on the first batches of the run."""
    from peft import LoraConfig, get_peft_model

    from infinity.cli.data import PackedDataset
    from infinity.cli.order import SequenceSampler

    tokenizer = AutoTokenizer.from_pretrained(job["--model"])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(job["--model"], dtype=torch.float32)
    lora = LoraConfig(r=4, task_type="CAUSAL_LM", **({"lora_alpha": 8, "target_modules": "all-linear"} | of_lora))
    model = get_peft_model(model, lora).train()
    data = PackedDataset([job["--data"]], tokenizer, job["--sequence-length"], job["--data"].parent)
    size = job["--batch-size"]
    order = list(SequenceSampler(data.sequences, job["--steps"] * size, 0))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optim = torch.optim.AdamW(trained, lr=job["--lr"], weight_decay=0.01)
    losses = []
    for step in range(job["--steps"]):
        ids = data.rows(order[step * size : (step + 1) * size]).ids
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("flags", "of_lora"),
    [
        ([], {}),
        (
            ["--lora-alpha", "3", "--lora-targets", "q_proj", "down_proj"],
            {"lora_alpha": 3, "target_modules": ["q_proj", "down_proj"]},
        ),
    ],
)
def test_losses_are_those_of_peft(
    flags: list[str], of_lora: dict[str, Any], job: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    fp32 = _job(tmp_path, "a", activations="keep") | {"--steps": 6, "--warmup-steps": 0}
    assert run(fp32, *LORA, *flags, "--dtype", "fp32", "--schedule", "constant", "--verify-output") == 0
    expected = plain_losses(fp32, **of_lora)
    assert [float(loss) for loss in _losses(tmp_path / "out-a")] == pytest.approx(expected, rel=1e-6)
    out = capsys.readouterr().out
    assert "verified: the saved adapters, loaded by PEFT, give the trained model's logits, bit for bit" in out
    report = json.loads((tmp_path / "out-a" / "report.json").read_text())
    assert 0 < report["trained_parameters"] < report["parameters"] / 4
    assert f"trained: {report['trained_parameters']:,} of {report['parameters']:,} parameters" in out
    assert not (tmp_path / "out-a" / "model.safetensors").exists()


@pytest.mark.parametrize("experts", [[], ["--lora-experts"]])
def test_a_mixture_trains_adapters_of_its_experts_if_asked_and_the_plan_counts_them(
    experts: list[str], job: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    qwen3_moe()[0].save_pretrained(tmp_path / "model")
    fp32 = _job(tmp_path, "a", activations="keep") | {"--steps": 3, "--warmup-steps": 0}
    given = [*LORA, *(experts or ["--verify-output"]), "--dtype", "fp32", "--schedule", "constant"]
    assert run(fp32, *given) == 0
    adapted = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    adapted |= {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]} if experts else {}
    expected = plain_losses(fp32, **adapted)
    assert [float(loss) for loss in _losses(tmp_path / "out-a")] == pytest.approx(expected, rel=1e-6)
    assert any("experts" in name for name in load_file(tmp_path / "out-a" / ADAPTERS)) == bool(experts)
    assert (
        "adapters: none for the experts, which are 62% of the parameters (--lora-experts)" in capsys.readouterr().out
    ) == (not experts)
    report = json.loads((tmp_path / "out-a" / "report.json").read_text())
    assert main(["plan", "--model", str(tmp_path / "model"), "--machine", "consumer", "--json", *LORA, *experts]) == 0
    planned = json.loads(capsys.readouterr().out)
    for counted in ("trained_parameters", "parameters"):
        assert planned[counted] == report[counted]


def test_adapters_of_experts_are_verified_merged_only(job: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    qwen3_moe()[0].save_pretrained(tmp_path / "model")
    assert run(job, *LORA, "--lora-experts", "--verify-output") == 2
    assert "PEFT rounds adapters of experts in another order" in capsys.readouterr().err
    assert run(job, *LORA, "--lora-experts", "--verify-output", "--merge") == 0
    assert "bit for bit" in capsys.readouterr().out


def test_experts_have_no_dropout_and_the_error_names_layers_that_have(
    job: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    qwen3_moe()[0].save_pretrained(tmp_path / "model")
    dropout = [*LORA, "--lora-dropout", "0.1"]
    assert run(job, *dropout, "--lora-experts") == 2
    assert "Leave it out, or leave out --lora-experts" in capsys.readouterr().err
    assert run(job, *dropout, "--lora-targets", "all-linear") == 2
    named = capsys.readouterr().err.partition("Leave it out, or exclude the experts: ")[2].split()
    assert named == ["--lora-targets", "k_proj", "o_proj", "q_proj", "v_proj"]
    assert run(job | {"--steps": 1, "--warmup-steps": 0}, *dropout) == 0


def test_adapters_of_the_head_are_refused_and_those_of_the_others_train(job: dict[str, Any], capsys: Any) -> None:
    few = job | {"--steps": 1, "--warmup-steps": 0}
    assert run(few, *LORA, "--lora-targets", "lm_head", "q_proj") == 2
    said = capsys.readouterr()
    assert "--lora-targets lm_head: TRL's trainers train no adapters of a model's head" in said.err
    assert "Leave lm_head out" in said.err
    assert len(said.err.splitlines()) == 1
    assert run(few, *LORA, "--lora-targets", "q_proj") == 0


def test_what_is_written_is_loaded_by_peft(job: dict[str, Any], tmp_path: Path) -> None:
    from peft import PeftModel

    assert run(job, *LORA, "--lora-dropout", "0.1") == 0
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model = PeftModel.from_pretrained(base, str(tmp_path / "out-a"))
    assert model.peft_config["default"].base_model_name_or_path == str(tmp_path / "model")
    assert model.peft_config["default"].lora_dropout == 0.1
    assert any(value.abs().sum() > 0 for name, value in model.named_parameters() if "lora_B" in name)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_an_interrupted_run_ends_in_the_same_adapters(number: int, job: dict[str, Any], tmp_path: Path) -> None:
    flags = [*LORA, "--lora-dropout", "0.1", "--save-every", "3"]
    assert run(job, *flags) == 0
    _stop_after(_job(tmp_path, "b"), number, *flags)
    assert main(["finetune", "--resume", str(tmp_path / "swap-b"), "--lora", "8"]) == 2
    assert main(["finetune", "--resume", str(tmp_path / "swap-b")]) == 0
    assert _losses(tmp_path / "out-b") == _losses(tmp_path / "out-a")
    assert same_adapters(tmp_path / "out-a", tmp_path / "out-b")
    assert same_adapters(*(tmp_path / f"out-{name}-steps" / "checkpoint-6" for name in "ab"))


def test_a_run_goes_on_from_a_portable_copy(job: dict[str, Any], tmp_path: Path) -> None:
    assert run(job, *LORA) == 0
    _stop_after(_job(tmp_path, "b"), signal.SIGINT, *LORA)
    copy = ["checkpoint", "export", str(tmp_path / "swap-b"), "--output", str(tmp_path / "copy")]
    assert main(copy) == 0
    _job(tmp_path, "c", weights="host")
    config, output = str(tmp_path / "c.yaml"), str(tmp_path / "out-c")
    goes_on = ["finetune", "--from-checkpoint", str(tmp_path / "copy"), "--config", config, "--output", output]
    assert main(goes_on) == 0
    assert same_adapters(tmp_path / "out-a", tmp_path / "out-c")


def test_what_is_frozen_stays_and_the_rest_is_trained(job: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    patterns = ["--freeze", "model.embed_tokens.*", "model.layers.[0-1].*"]
    assert run(job, *patterns, "--verify-output") == 0
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out-a"))
    frozen = {name for name in before if torch.equal(before[name], after[name])}
    assert frozen == {
        name for name in before if name.startswith(("model.embed_tokens", "model.layers.0.", "model.layers.1."))
    }
    assert len(frozen) < len(before)
    assert "bit for bit" in capsys.readouterr().out
    _stop_after(_job(tmp_path, "b"), signal.SIGKILL, *patterns)
    assert main(["finetune", "--resume", str(tmp_path / "swap-b")]) == 0
    again = load_file(tmp_path / "out-b" / "model.safetensors")
    assert all(torch.equal(again[name], after[name]) for name in after)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--freeze", "model.layer.*"], "the model has no such parameter; a similar name is model.layers."),
        (["--freeze", "*"], "no parameter is left to train"),
        (["--freeze", "*", "--lora", "2"], "--freeze does nothing with --lora"),
        (["--lora-alpha", "2"], "--lora-alpha does nothing without --lora"),
        (["--lora", "0"], "must be at least 1"),
        (["--lora", "2", "--lora-targets", "qproj"], "its linear layers are called down_proj, "),
    ],
)
def test_what_does_not_fit_the_model_is_an_error(
    flags: list[str], says: str, job: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    assert run(job, *flags) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out-a").exists()
    assert not (tmp_path / "swap-a").exists()


@pytest.mark.parametrize("flags", [["--freeze", "model.embed_tokens.*"], LORA], ids=["freeze", "lora"])
def test_freeze_beside_lora_is_refused_and_either_alone_trains(
    flags: list[str], job: dict[str, Any], capsys: Any
) -> None:
    assert run(job, "--freeze", "model.embed_tokens.*", *LORA) == 2
    assert "--freeze does nothing with --lora, which trains the adapters only" in capsys.readouterr().err
    assert run(job | {"--steps": 1, "--warmup-steps": 0}, *flags) == 0


def test_adapters_are_no_model_to_begin_with_and_their_base_and_both_in_one_are(
    job: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    from peft import AutoPeftModelForCausalLM

    one = {"--steps": 1, "--warmup-steps": 0}
    assert run(job | one, *LORA) == 0
    anew = _job(tmp_path, "b") | one
    assert run(anew | {"--model": tmp_path / "out-a"}) == 2
    base = re.search("contains adapters of .*: give --model (.*), or merge both into one", capsys.readouterr().err)
    assert base is not None
    assert run(anew | {"--model": base[1]}) == 0
    merged = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out-a").merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(tmp_path / "out-a").save_pretrained(tmp_path / "merged")
    assert run(_job(tmp_path, "c") | one | {"--model": tmp_path / "merged"}) == 0
