"""Checkpoints in FP8 with a scale for each block of rows and columns are read byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import infinity
from infinity.errors import ModelError
from infinity.state.frozen_codecs import encoded_form
from tests.checkpoint.fp8 import SCALES, batch, changed, configure, decoded, plain_from, qwen3, write_fp8
from tests.checkpoint.frozen_bases import (
    codecs_in,
    logits_of,
    require_same,
    same_bytes_as_in_file,
    trained,
    with_adapters,
)
from tests.checkpoint.frozen_bases import deferred as deferred
from tests.checkpoint.frozen_bases import offloaded as offloaded
from tests.models import loss_of

LAYER = "model.layers.1.mlp.up_proj.weight"  # 576 rows
SCALE = f"{LAYER}_scale_inv"
CODEC = "fp8_block:128x128:fp32"
MATRICES = 3 * 7


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fp8(qwen3(), tmp_path_factory.mktemp("fp8") / "base")


# -- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("block", [(128, 128), (64, 32), (1, 32)], ids=str)
@pytest.mark.parametrize("kind", SCALES)
def test_every_weight_is_its_code_times_the_scale_of_its_block(
    kind: str, block: tuple[int, int], deferred: Any, tmp_path: Path
) -> None:
    path = write_fp8(qwen3(), tmp_path / "fp8", kind, block)
    model, expected, encoded = deferred(path), decoded(path, block), 0
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter.clone(), expected[name]), name
        known = encoded_form(parameter)
        assert (known is None) == ("_proj" not in name)
        assert known is None or known.codec == f"fp8_block:{block[0]}x{block[1]}:{kind}"
        encoded += known is not None
    assert encoded == MATRICES


def test_scales_in_bytes_are_e8m0_if_the_config_says_so(deferred: Any, tmp_path: Path) -> None:
    path = write_fp8(qwen3(), tmp_path / "e8m0", "e8m0")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {name: value.view(torch.uint8) for name, value in tensors.items() if name.endswith("_scale_inv")}

    in_bytes = changed(path, tmp_path / "bytes", change)
    with pytest.raises(ModelError, match="_scale_inv' is U8; infinity reads scales in fp32, bf16 or e8m0"):
        deferred(in_bytes)
    configure(in_bytes, scale_fmt="ue8m0")
    assert torch.equal(deferred(in_bytes).get_parameter(LAYER).clone(), decoded(path)[LAYER])


def test_a_model_of_another_dtype_has_the_products_before_rounding(checkpoint: Path, deferred: Any) -> None:
    weight = deferred(checkpoint, dtype=torch.float32).get_parameter(LAYER)
    assert weight.dtype == torch.float32
    assert torch.equal(weight.bfloat16(), decoded(checkpoint)[LAYER])


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("kind", SCALES)
def test_the_store_has_the_bytes_of_the_file(kind: str, deferred: Any, offloaded: Any, tmp_path: Path) -> None:
    path = write_fp8(qwen3(), tmp_path / "fp8", kind)
    model = offloaded(deferred(path).requires_grad_(False))
    names = {"codes": lambda name: name, "scales": lambda name: f"{name}_scale_inv"}
    assert same_bytes_as_in_file(model, load_file(path / "model.safetensors"), names) == MATRICES


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.covering(strength=1, most=2)
@pytest.mark.parametrize("kind", SCALES)
def test_adapters_train_as_on_the_decoded_weights(kind: str, deferred: Any, offloaded: Any, tmp_path: Path) -> None:
    path = write_fp8(qwen3(), tmp_path / "fp8", kind)
    model = offloaded(with_adapters(deferred(path)))
    losses = trained(model)
    assert codecs_in(model) == {None, f"fp8_block:128x128:{kind}"}
    plain = offloaded(
        with_adapters(deferred(plain_from(path, qwen3(), tmp_path / "plain"))),
        nvme={"paths": [str(tmp_path / "other")]},
    )
    assert losses == trained(plain)
    assert codecs_in(plain) == {None}
    require_same(model, plain)


@pytest.mark.covering(strength=1, most=2)
@pytest.mark.parametrize("frozen", ["bf16", "int8", "nf4"])
def test_another_form_begins_with_the_decoded_weights(
    frozen: str, checkpoint: Path, deferred: Any, offloaded: Any, tmp_path: Path
) -> None:
    model = offloaded(deferred(checkpoint).requires_grad_(False), frozen=frozen)
    plain = deferred(plain_from(checkpoint, qwen3(), tmp_path / "plain")).requires_grad_(False)
    offloaded(plain, nvme={"paths": [str(tmp_path / "other")]}, frozen=frozen)
    assert codecs_in(model) == codecs_in(plain) == ({None} if frozen == "bf16" else {None, frozen})
    require_same(model, plain)


def test_a_model_that_is_trained_whole_begins_with_the_decoded_weights(
    checkpoint: Path, swap_config: Any, tmp_path: Path
) -> None:
    losses = []
    for path in (checkpoint, plain_from(checkpoint, qwen3(), tmp_path / "plain")):
        model = infinity.load_pretrained(path, swap_config("nvme", nvme={"paths": [str(tmp_path / path.name)]}))
        losses.append(trained(model, steps=2))
        infinity.close(model)
    assert losses[0] == losses[1]


def test_a_resumed_run_has_the_bits_of_one_that_did_not_stop(
    checkpoint: Path, deferred: Any, offloaded: Any, swap_config: Any, tmp_path: Path
) -> None:
    whole = offloaded(with_adapters(deferred(checkpoint)), nvme={"paths": [str(tmp_path / "whole")]})
    expected = trained(whole, steps=4)
    first = offloaded(with_adapters(deferred(checkpoint)), commit_every=1)
    losses = trained(first, steps=2)
    infinity.close(first)
    again = with_adapters(deferred(checkpoint))
    infinity.resume(again, swap_config("nvme", commit_every=1))
    assert codecs_in(again) == {None, CODEC}
    optimizer = infinity.AdamW([each for each in again.parameters() if each.requires_grad], lr=1e-2)
    for _ in range(2):
        loss = loss_of(again, batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == expected
    require_same(again, whole)
    infinity.close(again)


def test_a_saved_model_is_bf16_and_not_called_quantized(
    checkpoint: Path, deferred: Any, offloaded: Any, tmp_path: Path
) -> None:
    model = offloaded(deferred(checkpoint).requires_grad_(False))
    infinity.save_pretrained(model, tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {parameter.dtype for parameter in saved.parameters()} == {torch.bfloat16}
    assert torch.equal(saved.get_parameter(LAYER), decoded(checkpoint)[LAYER])


def test_saved_adapters_name_the_base_and_give_the_same_logits(
    checkpoint: Path, deferred: Any, offloaded: Any, tmp_path: Path
) -> None:
    from peft import PeftModel

    model = offloaded(with_adapters(deferred(checkpoint)))
    logits = logits_of(model)
    infinity.save_pretrained(model, tmp_path / "adapters")
    named = json.loads((tmp_path / "adapters/adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(checkpoint)
    again = PeftModel.from_pretrained(deferred(Path(named)), tmp_path / "adapters")
    assert torch.equal(logits_of(offloaded(again, nvme={"paths": [str(tmp_path / "b")]})), logits)


# -- refusals ---------------------------------------------------------------------------------------------------------


def _without_scales(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[SCALE]


def _with_a_scale_for_each_row(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}_scale"] = torch.ones(tensors[LAYER].shape[0], 1)
    del tensors[SCALE]


def _with_one_scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors[SCALE] = torch.tensor(1.0)


def _with_few_scales(tensors: dict[str, torch.Tensor]) -> None:
    tensors[SCALE] = tensors[SCALE][:-1].clone()


def _with_turned_scales(tensors: dict[str, torch.Tensor]) -> None:
    tensors[SCALE] = tensors[SCALE].t().contiguous()


def _with_scales_in_fp16(tensors: dict[str, torch.Tensor]) -> None:
    tensors[SCALE] = tensors[SCALE].half()


def _in_e5m2(tensors: dict[str, torch.Tensor]) -> None:
    tensors[LAYER] = tensors[LAYER].float().to(torch.float8_e5m2)


def _of_another_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[LAYER] = tensors[LAYER][:-1].clone()


def _flat(tensors: dict[str, torch.Tensor]) -> None:
    tensors[LAYER] = tensors[LAYER].flatten()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_scales, f"model.safetensors: '{LAYER}' is FP8, and there is no '{SCALE}'"),
        (_with_a_scale_for_each_row, f"It has '{LAYER}_scale', which the config.json does not say"),
        (_with_one_scale, rf"'{SCALE}' has shape \(\); .* a scale for each block of 128 x 128, .* it must be .5, 2."),
        (_with_few_scales, f"'{SCALE}' has shape .4, 2.; the config.json has a scale for each block of 128 x 128"),
        (_with_turned_scales, f"'{SCALE}' has shape .2, 5.; the config.json has a scale for each block of 128 x 128"),
        (_with_scales_in_fp16, f"'{SCALE}' is F16; infinity reads scales in fp32, bf16 or e8m0"),
        (_in_e5m2, f"'{LAYER}' is f8_e5m2; infinity reads e4m3 only"),
        (_of_another_shape, f"'{LAYER}' is FP8 with shape .575, 160., and is .576, 160. in the model"),
        (_flat, f"'{LAYER}' is FP8 with shape .92160,., and is .576, 160. in the model"),
    ],
)
def test_a_damaged_checkpoint_is_named(
    change: Any, message: str, checkpoint: Path, deferred: Any, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        deferred(changed(checkpoint, tmp_path / "damaged", change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_block_size": None}, "has shape .2, 2.; .* a scale for the matrix, .* it must be .1,."),
        ({"weight_block_size": [128]}, r"with weight_block_size: \[128\] .*reads two positive numbers"),
        ({"weight_block_size": [128, 0]}, r"with weight_block_size: \[128, 0\]"),
        ({"weight_block_size": [128, True]}, r"with weight_block_size: \[128, True\]"),
        ({"weight_block_size": "128x128"}, "with weight_block_size: '128x128'"),
        ({"weight_block_size": [64, 128]}, "_scale_inv' has shape .*; .*each block of 64 x 128, so"),
        ({"weight_block_size": [128, 64]}, "_scale_inv' has shape .*; .*each block of 128 x 64, so"),
        ({"fmt": "e5m2"}, "with fmt: 'e5m2' .*infinity reads e4m3"),
        ({"expert_dtype": "fp4"}, "with expert_dtype: 'fp4' .*infinity reads fp8"),
        ({"modules_to_not_convert": [3]}, r"with modules_to_not_convert: \[3\] .*a list of names"),
        ({"quant_method": "fbgemm_fp8"}, "is quantized by fbgemm_fp8 .quantization_config in its config.json"),
    ],
)
def test_a_config_that_cannot_be_read_or_contradicts_the_files_is_named(
    changes: dict[str, Any], message: str, checkpoint: Path, deferred: Any, tmp_path: Path
) -> None:
    path = changed(checkpoint, tmp_path / "other", lambda _: None)
    configure(path, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        deferred(path)
    assert "\n" not in str(caught.value)


def test_a_matrix_may_have_one_scale(checkpoint: Path, deferred: Any, tmp_path: Path) -> None:
    """Mistral publishes FP8 so: weight_block_size is null, and a scale has no dimensions."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            tensors[name] = tensors[name].flatten()[0].bfloat16().clone()

    path = changed(checkpoint, tmp_path / "other", change)
    configure(path, weight_block_size=None, activation_scheme="static")
    tensors, encoded = load_file(path / "model.safetensors"), 0
    for name, parameter in deferred(path).named_parameters():
        if f"{name}_scale_inv" in tensors:
            expected = (tensors[name].float() * tensors[f"{name}_scale_inv"].float()).bfloat16()
            assert torch.equal(parameter.clone(), expected), name
            encoded += 1
    assert encoded == 21


def test_fp8_without_a_quantization_config_is_refused(
    checkpoint: Path, deferred: Any, offloaded: Any, tmp_path: Path
) -> None:
    path = changed(checkpoint, tmp_path / "other", lambda _: None)
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="as torch.float8_e4m3fn, but no quantization_config in its config.json says"):
        offloaded(deferred(path))


def test_a_config_of_fp8_beside_files_without_fp8_is_refused(deferred: Any, tmp_path: Path) -> None:
    qwen3().save_pretrained(tmp_path / "base")
    configure(tmp_path / "base", quant_method="fp8", weight_block_size=[128, 128])
    with pytest.raises(ModelError, match="quantized by fp8 according to its config.json, and no tensor of its files"):
        deferred(tmp_path / "base")


def test_a_truncated_file_is_named(checkpoint: Path, deferred: Any, tmp_path: Path) -> None:
    path = changed(checkpoint, tmp_path / "cut", lambda _: None)
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match="model.safetensors: .*incomplete"):
        deferred(path)
