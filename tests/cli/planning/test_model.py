"""The model that is planned for is that which would train: its units, its form, and what a step of it computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from infinity.cli.planning.model import adapt, build
from infinity.errors import ConfigError, ModelError
from infinity.state import model_shape
from infinity.state.discover import discover
from infinity.state.model_shape import shape_of
from infinity.state.training_step import BatchShape, work_of
from tests.checkpoint.fp8 import configure
from tests.checkpoint.packed import FORMS, gpt_oss

SMALL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
}  # fmt: skip
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def directory(path: Path, **values: Any) -> str:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(SMALL | values))
    return str(path)


@pytest.mark.parametrize(
    ("quantization", "codec"),
    [
        ({**NF4, "bnb_4bit_use_double_quant": True}, "nf4"),
        (NF4, "nf4_fp32"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8_rows"),
        ({"load_in_8bit": True}, "int8_rows"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block:128x128:fp32"),
        ({"quant_method": "fp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}, "fp8_block:1x32:e8m0"),
        (FORMS["modelopt"].config, "nvfp4:factor"),
        (FORMS["compressed-tensors"].config, "nvfp4:divisor"),
        (FORMS["integers"].config, "int4_group:32:bf16"),
        (None, None),
    ],
)
def test_a_quantized_base_rests_as_it_is_in_its_files(
    quantization: dict[str, Any] | None, codec: str | None, tmp_path: Path
) -> None:
    given = {} if quantization is None else {"quantization_config": quantization}
    model = build(directory(tmp_path, **given), torch.bfloat16)
    assert {group.codec for unit in discover(model).units for group in unit.groups} == {None}  # it trains whole
    adapt(model, 4, experts=False)
    encoded = [group for unit in discover(model).units for group in unit.groups if group.codec is not None]
    assert {group.codec for group in encoded} == ({codec} if codec else set())
    assert len(encoded) == (3 if codec else 0)


def test_the_experts_of_gpt_oss_rest_in_mxfp4(tmp_path: Path) -> None:
    gpt_oss().config.save_pretrained(tmp_path)
    configure(tmp_path, **FORMS["gpt-oss"].config)
    model = build(str(tmp_path), torch.bfloat16).requires_grad_(False)
    groups = [group for unit in discover(model).units for group in unit.groups if group.codec is not None]
    assert sorted((group.codec, *(spec.name.rpartition(".")[2] for spec in group.specs)) for group in groups) == sorted(
        3 * [("mxfp4:64", "gate_up_proj"), ("mxfp4:96", "down_proj")]
    )


@pytest.mark.parametrize(
    ("method", "ignored"),
    [
        ("modelopt", ["lm_head", "*self_attn*", "model.layers.1.mlp.*"]),
        ("compressed-tensors", ["lm_head", "re:.*self_attn", r"re:model\.layers\.1\.mlp"]),
    ],
)
def test_layers_that_nvfp4_leaves_out_stay_as_they_are(method: str, ignored: list[str], tmp_path: Path) -> None:
    given = FORMS[method].config | {"ignore": ignored}
    model = build(directory(tmp_path, quantization_config=given), torch.bfloat16).requires_grad_(False)
    groups = [group for unit in discover(model).units for group in unit.groups if group.codec is not None]
    names = [spec.name for group in groups for spec in group.specs]
    assert sorted(name.split(".")[2] for name in names) == ["0", "0", "0", "2", "2", "2"]
    assert not any("self_attn" in name for name in names)


def test_layers_that_the_checkpoint_leaves_out_stay_as_they_are(tmp_path: Path) -> None:
    given = {**NF4, "llm_int8_skip_modules": ["lm_head", "self_attn", "model.layers.1.mlp"]}
    model = build(directory(tmp_path, quantization_config=given), torch.bfloat16)
    adapt(model, 4, experts=False)
    groups = [group for unit in discover(model).units for group in unit.groups if group.codec is not None]
    names = [spec.name for group in groups for spec in group.specs]
    assert sorted(name.split(".")[2] for name in names) == ["0", "0", "0", "2", "2", "2"]
    assert not any("self_attn" in name for name in names)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ModelError, "is quantized by gptq"),
        (
            {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}},
            ModelError,
            "is quantized by fp8 with fmt: 'e5m2'",
        ),
        (
            {"quantization_config": {**FORMS["modelopt"].config, "quant_algo": "FP8"}},
            ModelError,
            "is quantized by modelopt with quant_algo: 'FP8'",
        ),
        ({"quantization_config": {**NF4, "bnb_4bit_quant_type": "fp4"}}, ModelError, "is quantized as fp4"),
        ({"model_type": "t5"}, ConfigError, "transformers has no causal language model of type 't5'"),
        ({"hidden_act": "nothing"}, ModelError, "transformers cannot make a model from its config"),
    ],
)
def test_what_cannot_be_planned_says_why(
    values: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        build(directory(tmp_path, **values), torch.bfloat16)


def attention(model: Any) -> float:
    """FLOPs of a forward that grow with the square of the length, for each token of it: a quarter of a step's, in which
    the forward is done twice and the backward has as many as two."""
    short, long = (
        work_of(shape_of(model, 1, 64), BatchShape(1, length), recompute=True, vertical=False).flops / length
        for length in (64, 128)
    )
    return (long - short) / 64 / 4


def test_attention_is_as_wide_as_its_queries() -> None:
    given = {**SMALL, "head_dim": 64, "model_type": "qwen3"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**given))
    assert attention(model) == 2 * 3 * 4 * 64
    assert attention(build("qwen3-32b", torch.bfloat16)) == 2 * 64 * 8192


def test_latent_attention_has_narrower_values_than_queries() -> None:
    given = {
        "model_type": "deepseek_v3", "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256,
        "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 32,
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    }  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**given))
    assert attention(model) == 2 * 3 * 4 * (16 + 32 + 32) / 2


@pytest.mark.parametrize(("kind", "active"), [("llama4_text", 8), ("mixtral", 2)])
def test_experts_that_get_no_routing_compute_every_token(kind: str, active: int) -> None:
    given = SMALL | {"model_type": kind, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size_mlp": 64}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**given))
    stacks = sum(each.numel() for name, each in model.named_parameters() if ".experts." in name)
    others = sum(
        each.numel()
        for name, each in model.named_parameters()
        if each.dim() > 1 and ".experts." not in name and "embed" not in name
    )
    assert shape_of(model, 1, 64).products == others + stacks * active / 8


@pytest.mark.parametrize(("recompute", "copies"), [(True, 2), (False, 2 + 3 - 1)])
def test_adapters_of_experts_take_a_copy_of_the_stacks(
    recompute: bool, copies: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_shape, "trace_block", lambda *_: None)  # a model with such adapters cannot be traced
    mixture = {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "head_dim": 16,
        "vocab_size": 32,
    }
    model = build(directory(tmp_path, **mixture), torch.bfloat16)

    def peak() -> float:
        return work_of(shape_of(model, 1, 64), BatchShape(1, 64), recompute=recompute, vertical=False).peak_bytes

    before, stacks = peak(), 8 * (2 * 32 * 64 + 64 * 32)
    adapt(model, 4, experts=True)
    assert peak() - before == pytest.approx(copies * 2 * stacks, rel=0.01)


def test_experts_are_no_blocks_of_the_model() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(16))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(32, 64)
            self.layers = nn.ModuleList(Block() for _ in range(3))

    assert attention(Model()) == 2 * 3 * 64
