"""Names in a quantization_config, in the forms in which public checkpoints have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infinity.checkpoint.quantization_config import _METHODS
from infinity.errors import ModelError

pytestmark = pytest.mark.cpu_only("no model is offloaded")

STACK, DOWN = "model.layers.3.mlp.experts.gate_up_proj", "model.layers.3.mlp.experts.down_proj"
ATTENTION = "model.layers.3.self_attn.q_proj.weight"
EXPERTS = [f"model.layers.3.mlp.experts.{at}.{part}_proj" for at in range(4) for part in ("gate", "up", "down")]
INT4 = {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group", "symmetric": True}
FP4 = {"num_bits": 4, "type": "float", "group_size": 16}


def integers(targets: Any = "Linear", ignore: Any = (), **changes: Any) -> dict[str, Any]:
    groups = {"group_0": {"weights": INT4 | changes, "targets": targets}}
    return {"format": "pack-quantized", "config_groups": groups, "ignore": list(ignore)}


def fp8(*skipped: str, **changes: Any) -> dict[str, Any]:
    return {"weight_block_size": [128, 128], "modules_to_not_convert": list(skipped)} | changes


def codec(method: str, values: dict[str, Any], name: str) -> str | None:
    shape = torch.Size((4, 256, 128)) if ".experts." in name else torch.Size((256, 128))
    return _METHODS[method]("model", values).codec_of(name, shape)


@pytest.mark.parametrize(
    ("targets", "ignore", "encoded"),
    [
        (["Linear"], [], {STACK, DOWN, ATTENTION}),
        ("Linear", ["lm_head", "re:.*mlp.gate$"], {STACK, DOWN, ATTENTION}),
        ([r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"], [], {STACK, DOWN}),
        (["re:.*mlp.experts.*"], [], {STACK, DOWN}),
        (EXPERTS, [], {STACK, DOWN}),
        (["Linear"], EXPERTS, {ATTENTION}),
        (["Linear"], [r"re:.*layers\.3\.mlp\.experts\.\d+\..*"], {ATTENTION}),
        (["Linear"], [r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:.*self_attn.*"], {STACK, DOWN}),
        (["Linear"], ["model.language_model.layers.3.self_attn.q_proj"], {STACK, DOWN}),
    ],
)
def test_modules_of_compressed_tensors_are_those_that_the_config_names(
    targets: Any, ignore: list[str], encoded: set[str]
) -> None:
    values = integers(targets, ignore)
    found = {name for name in (STACK, DOWN, ATTENTION) if codec("compressed-tensors", values, name)}
    assert found == encoded


@pytest.mark.parametrize(
    ("skipped", "encoded"),
    [
        ([], {STACK, DOWN, ATTENTION}),
        (["lm_head", "model.layers.3.mlp.gate", "mlp.gate"], {STACK, DOWN, ATTENTION}),
        (["model.layers.*.self_attn"], {STACK, DOWN}),
        (["re:.*self_attn.*"], {STACK, DOWN}),
        (["self_attn"], {STACK, DOWN}),
        (["model.layers.3.self_attn.q_pro"], {STACK, DOWN, ATTENTION}),
        (["model.language_model.layers.3.self_attn.q_proj"], {STACK, DOWN}),
        (EXPERTS, {ATTENTION}),
        (["("], {STACK, DOWN, ATTENTION}),
    ],
)
def test_modules_that_fp8_excludes_are_those_that_the_config_names(skipped: list[str], encoded: set[str]) -> None:
    assert {name for name in (STACK, DOWN, ATTENTION) if codec("fp8", fp8(*skipped), name)} == encoded


def test_a_stack_of_which_one_matrix_is_quantized_is_refused() -> None:
    for targets in (["re:.*gate_proj$"], ["re:.*up_proj$"]):
        with pytest.raises(ModelError, match=f"names one of the matrices of '{STACK}', and not the other"):
            codec("compressed-tensors", integers(targets), STACK)
    assert codec("compressed-tensors", integers(["re:.*gate_proj$"]), DOWN) is None


@pytest.mark.parametrize(
    ("method", "values"),
    [
        ("modelopt", {"quant_algo": "NVFP4", "config_groups": {"group_0": {"weights": FP4}}}),
        ("compressed-tensors", {"format": "nvfp4-pack-quantized", "config_groups": {"group_0": {"weights": FP4}}}),
    ],
)
def test_a_plan_refuses_experts_that_cannot_be_joined_as_loading_does(method: str, values: dict[str, Any]) -> None:
    assert codec(method, values, ATTENTION)
    with pytest.raises(ModelError, match="infinity cannot join quantized weights of this form"):
        codec(method, values, STACK)
    assert codec(method, values | {"ignore": ["*mlp.experts*"]}, STACK) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"sparsity_config": {"format": "dense", "global_sparsity": 0.1, "sparsity_structure": "unstructured"}},
        {"sparsity_config": {}},
        {"quantization_status": "frozen"},
        {"quantization_status": "compressed"},
    ],
    ids=str,
)
def test_what_says_nothing_about_the_weights_is_accepted(changes: dict[str, Any]) -> None:
    assert codec("compressed-tensors", integers() | changes, ATTENTION) == "int4_group:32:bf16"


def test_scales_of_activations_are_not_used() -> None:
    assert codec("fp8", fp8(activation_scheme="static"), ATTENTION) == "fp8_block:128x128:fp32"


@pytest.mark.parametrize("order", ["group", "dynamic", True])
def test_permuted_columns_are_refused(order: Any) -> None:
    with pytest.raises(ModelError, match="without actorder: group"):
        codec("compressed-tensors", integers(actorder=order), ATTENTION)
    assert codec("compressed-tensors", integers(actorder="weight"), ATTENTION)
