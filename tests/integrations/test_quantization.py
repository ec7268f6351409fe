"""Scripts that ask for bitsandbytes: their frozen weights rest in 4 or 8 bits, and bitsandbytes is not needed."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    FineGrainedFP8Config,
    GPTQConfig,
    Mxfp4Config,
)

import infinity
from examples.make_demo_checkpoint import make_checkpoint
from infinity.coordinator import registry
from infinity.state.frozen_codecs import encoded_form
from tests.checkpoint.fp8 import decoded, qwen3, write_fp8
from tests.checkpoint.packed import ATTENTION, FORMS
from tests.checkpoint.quantized import quantize
from tests.integrations.conftest import Launch
from tests.integrations.test_peft import log_of, trainer
from tests.models import llama

Rows = list[dict[str, torch.Tensor]]
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
INT8 = BitsAndBytesConfig(load_in_8bit=True)
LAYER = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(autouse=True)
def _without_bitsandbytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing it fails."""
    if "quantized" not in request.fixturenames:
        monkeypatch.setitem(sys.modules, "bitsandbytes", None)


@pytest.fixture
def quantized(tmp_path: Path, bitsandbytes: Any) -> Path:
    """A base that bitsandbytes quantized."""
    llama()[0].bfloat16().save_pretrained(tmp_path / "base")
    return quantize(tmp_path / "base", tmp_path / "quantized", "nf4")


def adapted(model: Any, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    options = {"target_modules": "all-linear"} | options
    return get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", **options))


def codecs_in(model: Any) -> set[str | None]:
    """Return the codecs of the groups of frozen weights in blocks."""
    return {group.codec for unit in registry.coordinator_of(model).units for group in unit.full.groups}


def qlora(path: Path, quantization: Any) -> Any:
    """Return a model with adapters on a quantized base, loaded like a script does."""
    import peft

    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=quantization, device_map="auto")
    if quantization is not None:
        model = peft.prepare_model_for_kbit_training(model)
    return adapted(model)


def test_a_copy_of_a_model_rests_as_the_model_does(checkpoint: Path, launch: Launch) -> None:
    with launch(memory={"device": "4MiB", "host": "96MiB"}):
        model = AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=NF4)
        another = copy.deepcopy(model)
        batch = llama()[1]
        with torch.no_grad():
            another(input_ids=batch["input_ids"] % 96)
        assert codecs_in(another) == {None, "nf4"}


@pytest.fixture(scope="module")
def logs_that_are_expected() -> dict[tuple[str, object], list[float]]:
    """The logs of scripts whose swap config names the form, by the form and the device."""
    return {}


@pytest.mark.covering(strength=1, most=2)
@pytest.mark.parametrize(
    ("quantization", "form"),
    [
        (NF4, "nf4"),
        (INT8, "int8"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4"),
        (BitsAndBytesConfig(load_in_4bit=True), "nf4"),
    ],
    ids=["nf4", "int8", "dict", "fp4"],
)
def test_a_script_with_bitsandbytes_trains_as_one_whose_swap_config_says_so(
    quantization: Any,
    form: str,
    checkpoint: Path,
    rows: Rows,
    launch: Launch,
    tmp_path: Path,
    caplog: Any,
    computes_on: object,
    logs_that_are_expected: dict[tuple[str, object], list[float]],
) -> None:
    logs = []
    for asked, frozen in ((quantization, "auto"), (None, form)):
        if asked is None and (form, computes_on) in logs_that_are_expected:
            continue
        with launch(frozen=frozen, nvme={"paths": [str(tmp_path / f"swap-{frozen}")]}):
            one = trainer(qlora(checkpoint, asked), rows, tmp_path / "out", optim="paged_adamw_8bit")
            one.train()
            assert codecs_in(one.model) == {None, form}
            logs.append(log_of(one))
    assert logs[0] == logs_that_are_expected.setdefault((form, computes_on), logs[-1])
    said = [record.getMessage() for record in caplog.records if "BitsAndBytesConfig(" in record.getMessage()]
    assert len(said) == 1
    assert f"(`frozen: {form}`)" in said[0]


def test_the_model_learns(checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path) -> None:
    with launch():
        one = trainer(qlora(checkpoint, NF4), rows[:2] * 8, tmp_path / "out")
        one.train()
        losses = [entry["loss"] for entry in one.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.1


def test_fp4_is_said_to_be_nf4(checkpoint: Path, launch: Launch, caplog: Any) -> None:
    with launch():
        AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    assert "fp4 is not available, and NF4 takes the same space" in caplog.text


def test_modules_that_are_not_skipped_are_named(checkpoint: Path, launch: Launch, caplog: Any) -> None:
    config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["lm_head", "down_proj"])
    with launch():
        AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=config)
    assert "llm_int8_skip_modules=['down_proj'] is ignored" in caplog.text


@pytest.mark.parametrize(("frozen", "codec"), [("bf16", None), ("int8", "int8")])
def test_the_swap_config_goes_before_the_script(
    frozen: str, codec: str | None, checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path, caplog: Any
) -> None:
    with launch(frozen=frozen):
        one = trainer(qlora(checkpoint, NF4), rows, tmp_path / "out")
        one.train()
        assert codecs_in(one.model) == {None, codec}
    assert f"the swap config says `frozen: {frozen}`, which is used instead" in caplog.text


@pytest.mark.parametrize("quantization", [None, NF4], ids=["as it is", "asked for again"])
def test_a_quantized_base_stays_as_it_is(
    quantization: Any, quantized: Path, rows: Rows, launch: Launch, tmp_path: Path, caplog: Any
) -> None:
    with launch(memory={"device": "2MiB", "host": "96MiB"}):
        model = AutoModelForCausalLM.from_pretrained(quantized, quantization_config=quantization)
        known = encoded_form(model.get_parameter(LAYER))
        assert known is not None
        one = trainer(adapted(model), rows, tmp_path / "out")
        one.train()
        assert codecs_in(one.model) == {None, "nf4"}
        one.model.save_pretrained(tmp_path / "adapters")
    assert ("the checkpoint is quantized already" in caplog.text) == (quantization is not None)
    assert str(quantized) in (tmp_path / "adapters/adapter_config.json").read_text()


def test_dora_reads_a_quantized_base_and_leaves_it_as_it_is(
    quantized: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    with launch(memory={"device": "2MiB", "host": "96MiB"}):
        model = AutoModelForCausalLM.from_pretrained(quantized, quantization_config=NF4)
        one = trainer(adapted(model, use_dora=True), rows, tmp_path / "out")
        one.train()
        assert codecs_in(one.model) == {None, "nf4"}


@pytest.mark.parametrize("quantization", [None, FineGrainedFP8Config(dequantize=True)], ids=["as it is", "decoded"])
def test_a_base_in_fp8_stays_as_it_is(
    quantization: Any, rows: Rows, launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library would raise for 576 rows, and use wrong scales for 192 rows, if it decoded the weights itself."""
    path = write_fp8(qwen3(), tmp_path / "fp8", "bf16")
    monkeypatch.setattr("transformers.integrations.finegrained_fp8.Fp8Dequantize.convert", None)
    with launch(memory={"device": "8MiB", "host": "96MiB"}):
        model = AutoModelForCausalLM.from_pretrained(path, quantization_config=quantization, dtype=torch.bfloat16)
        assert torch.equal(model.get_parameter(LAYER).clone(), decoded(path)[LAYER])
        one = trainer(adapted(model), rows, tmp_path / "out")
        one.train()
        assert codecs_in(one.model) == {None, "fp8_block:128x128:bf16"}
        one.model.save_pretrained(tmp_path / "adapters")
    assert all(torch.isfinite(torch.tensor(log_of(one))))
    assert str(path) in (tmp_path / "adapters/adapter_config.json").read_text()


@pytest.mark.parametrize("quantization", [None, Mxfp4Config(dequantize=True)], ids=["as it is", "decoded"])
def test_gpt_oss_stays_in_mxfp4(
    quantization: Any, rows: Rows, launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = FORMS["gpt-oss"]
    path = form.write(tmp_path / "mxfp4")
    monkeypatch.setattr("transformers.integrations.mxfp4.convert_moe_packed_tensors", None)
    with launch(memory={"device": "8MiB", "host": "96MiB"}):
        model = AutoModelForCausalLM.from_pretrained(path, quantization_config=quantization, dtype=torch.bfloat16)
        assert torch.equal(model.get_parameter(form.layer).clone(), form.decoded(path)[form.layer])
        one = trainer(adapted(model, target_modules=ATTENTION), rows, tmp_path / "out")
        one.train()
        assert codecs_in(one.model) == {None, *form.codec}
    assert all(torch.isfinite(torch.tensor(log_of(one))))


def test_a_new_head_on_a_quantized_base_is_initialized_and_said(
    quantized: Path, launch: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    how: dict[str, Any] = {"num_labels": 2, "pad_token_id": 0, "dtype": torch.bfloat16}
    torch.manual_seed(0)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", **how)
    with launch(memory={"device": "2MiB", "host": "96MiB"}):
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(quantized, **how)
        assert torch.equal(model.score.weight, plain.score.weight)
        model.requires_grad_(False)
        model.score.requires_grad_(True)
        optim = torch.optim.AdamW(model.score.parameters(), lr=1e-3)
        loss = model(input_ids=torch.arange(8)[None], labels=torch.tensor([1])).loss
        loss.backward()
        optim.step()
        assert codecs_in(model) == {None, "nf4"}
    assert loss.isfinite()
    assert "has no tensors for score.weight: they are initialized" in caplog.text


def test_preparing_for_training_casts_and_reads_nothing(checkpoint: Path, launch: Launch) -> None:
    import peft

    with launch():
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16, quantization_config=NF4)
        assert peft.prepare_model_for_kbit_training(model) is model
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        assert not any(parameter.requires_grad for parameter in model.parameters())
        assert "values in the store" in repr(model.get_parameter(LAYER))  # which are still to be read
        assert model.is_gradient_checkpointing


@pytest.mark.parametrize("reentrant", [True, pytest.param(False, marks=pytest.mark.long)])
def test_preparing_with_a_checkpointing_of_its_own_trains(
    reentrant: bool, checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    import peft

    with launch():
        model = AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=NF4)
        kwargs = {"use_reentrant": reentrant}
        model = adapted(peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=kwargs))
        one = trainer(model, rows, tmp_path / "out")
        one.train()
        assert all(torch.isfinite(torch.tensor(log_of(one))))


def test_preparing_another_model_does_what_it_did(launch: Launch) -> None:
    import peft

    model = llama()[0].bfloat16()
    with launch():
        peft.prepare_model_for_kbit_training(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        (GPTQConfig(bits=4, dataset=["a"]), "GPTQConfig"),
        ({"quant_method": "awq"}, "awq"),
        (FineGrainedFP8Config(), "FineGrainedFP8Config"),
    ],
)
def test_other_quantizations_are_refused(quantization: Any, named: str, checkpoint: Path, launch: Launch) -> None:
    with launch(), pytest.raises(infinity.NotAvailableError, match=f"quantization_config={named}.*frozen: nf4"):
        AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=quantization)


@pytest.mark.covering(strength=1, most=1)
@pytest.mark.parametrize("named", [True, False], ids=["by its path", "loaded"])
def test_sft_of_trl_with_adapters(named: bool, launch: Launch, tmp_path: Path) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    make_checkpoint(tmp_path, hidden=64, layers=4, vocabulary=512, dtype=torch.float32, text_bytes=100_000)
    path = str(tmp_path / "checkpoint")
    args = SFTConfig(
        output_dir=str(tmp_path / "out"),
        max_steps=3,
        per_device_train_batch_size=2,
        max_length=64,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        optim="paged_adamw_8bit",
        model_init_kwargs={"quantization_config": NF4} if named else None,
    )
    texts = Dataset.from_list([{"text": f"{number} and {number + 1} are numbers"} for number in range(16)])
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    with launch(memory={"device": "4MiB", "host": "96MiB"}):
        model: Any = path if named else AutoModelForCausalLM.from_pretrained(path, quantization_config=NF4)
        one = SFTTrainer(model, args, train_dataset=texts, peft_config=lora)
        one.train()
        assert codecs_in(one.model) == {None, "nf4"}
        losses = [entry["loss"] for entry in one.state.log_history if "loss" in entry]
    assert len(losses) == 3


def test_a_config_of_infinity_is_left_out_under_infinity_run(checkpoint: Path, launch: Launch, tmp_path: Path) -> None:
    swap = {"nvme": {"paths": [str(tmp_path / "other")]}}
    with launch():
        with pytest.raises(infinity.NotAvailableError, match="Remove the quantization_config"):
            AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=infinity.InfinityConfig(swap))
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        torch.optim.AdamW(model.parameters(), lr=1e-3)
        assert registry.is_offloaded(model)
