"""Checkpoints in NVFP4 of both producers, in groups of 4-bit integers, and gpt-oss in MXFP4 are read byte for byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import infinity
from infinity.coordinator import registry
from infinity.errors import ModelError
from infinity.sizes import PAGE_BYTES
from infinity.state.frozen_codecs import encoded_form
from tests.checkpoint.fp8 import batch, changed, configure
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
from tests.checkpoint.packed import ATTENTION, FORMS, Form
from tests.models import loss_of

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors, Form], None]
NAMES = list(FORMS)
every_form = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: form.write(tmp_path_factory.mktemp("fp4") / "base") for name, form in FORMS.items()}


# -- reading ----------------------------------------------------------------------------------------------------------


@every_form
def test_every_weight_has_the_values_of_its_formula(name: str, checkpoints: dict[str, Path], deferred: Any) -> None:
    form, path = FORMS[name], checkpoints[name]
    model, expected, encoded = deferred(path), form.decoded(path), 0
    for parameter, value in model.named_parameters():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value.clone(), expected[parameter]), parameter
        known = encoded_form(value)
        assert (known is not None) == form.is_encoded(parameter)
        assert known is None or known.codec in form.codec
        encoded += known is not None
    assert encoded == form.matrices
    unquantized = form.make().state_dict()[form.layer].float()
    assert (expected[form.layer].float() - unquantized).abs().max() < unquantized.abs().max() / 3  # no other weight


@every_form
def test_the_store_has_the_bytes_of_the_file(
    name: str, checkpoints: dict[str, Path], deferred: Any, offloaded: Any
) -> None:
    form, path = FORMS[name], checkpoints[name]
    model = offloaded(deferred(path).requires_grad_(False))
    parts = {part: partial(_named, form, part) for part in form.names(form.layer)}
    assert same_bytes_as_in_file(model, load_file(path / "model.safetensors"), parts) == form.matrices


@pytest.mark.parametrize("name", ["compressed-tensors", "integers", "gpt-oss"])
def test_the_codes_are_not_read_before_their_values_are_needed(
    name: str, checkpoints: dict[str, Path], deferred: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers would read them all, convert them to bf16, and drop them."""
    loading = pytest.importorskip("transformers.core_model_loading")
    materialize, read = loading._materialize_copy, []

    def noted(tensor: Any, *how: Any) -> torch.Tensor:
        read.append(tensor.get_dtype())
        result: torch.Tensor = materialize(tensor, *how)
        return result

    monkeypatch.setattr(loading, "_materialize_copy", noted)
    model = deferred(checkpoints[name])
    assert set(read) == {"BF16"}
    assert torch.equal(
        model.get_parameter(FORMS[name].layer).clone(), FORMS[name].decoded(checkpoints[name])[FORMS[name].layer]
    )


def _named(form: Form, part: str, parameter: str) -> str:
    return form.names(parameter)[part]


@pytest.mark.parametrize(
    ("name", "device", "per_weight"),
    [
        ("modelopt", "2MiB", 0.5625),
        ("compressed-tensors", "2MiB", 0.5625),
        ("integers", "2MiB", 0.5625),
        ("gpt-oss", "512KiB", 0.53125),
    ],
)
def test_a_pass_reads_the_bytes_of_the_form_and_writes_none(
    name: str, device: str, per_weight: float, checkpoints: dict[str, Path], deferred: Any, offloaded: Any
) -> None:
    model = offloaded(deferred(checkpoints[name]).requires_grad_(False), memory={"device": device, "host": "64MiB"})
    layout = registry.coordinator_of(model).resources.plan.layout
    homes = [group for unit in layout.units for group in unit.groups]
    encoded = [group for group in homes if group.group.codec is not None]
    exact = per_weight * sum(spec.numel for group in encoded for spec in group.group.specs)
    padding = sum(PAGE_BYTES + 2 * 64 * len(group.group.specs) for group in encoded)
    assert exact <= sum(group.weight.nbytes for group in encoded) <= exact + padding
    logits_of(model)
    before = infinity.statistics(model)
    logits_of(model)
    after = infinity.statistics(model)
    assert 0 < after.read_bytes - before.read_bytes <= sum(group.weight.nbytes for group in homes)
    assert after.written_bytes == before.written_bytes


# -- training ---------------------------------------------------------------------------------------------------------


@every_form
def test_adapters_train_as_on_the_decoded_weights(
    name: str, checkpoints: dict[str, Path], deferred: Any, offloaded: Any, tmp_path: Path
) -> None:
    form, path = FORMS[name], checkpoints[name]
    model = offloaded(with_adapters(deferred(path), ATTENTION))
    losses = trained(model)
    assert codecs_in(model) == {None, *form.codec}
    plain = offloaded(
        with_adapters(deferred(form.plain_from(path, tmp_path / "plain")), ATTENTION),
        nvme={"paths": [str(tmp_path / "other")]},
    )
    assert losses == trained(plain)
    assert losses[-1] < losses[0]
    assert codecs_in(plain) == {None}
    require_same(model, plain)


@pytest.mark.covering(strength=1, most=2)
@every_form
@pytest.mark.parametrize("frozen", ["bf16", "int8", "nf4"])
def test_another_form_begins_with_the_decoded_weights(
    frozen: str, name: str, checkpoints: dict[str, Path], deferred: Any, offloaded: Any, tmp_path: Path
) -> None:
    form, path = FORMS[name], checkpoints[name]
    model = offloaded(deferred(path).requires_grad_(False), frozen=frozen)
    plain = deferred(form.plain_from(path, tmp_path / "plain")).requires_grad_(False)
    offloaded(plain, nvme={"paths": [str(tmp_path / "other")]}, frozen=frozen)
    assert codecs_in(model) == codecs_in(plain) == ({None} if frozen == "bf16" else {None, frozen})
    require_same(model, plain)


@pytest.mark.covering(strength=1, most=1)
@every_form
def test_a_model_that_is_trained_whole_begins_with_the_decoded_weights(
    name: str, checkpoints: dict[str, Path], swap_config: Any, tmp_path: Path
) -> None:
    losses = []
    for path in (checkpoints[name], FORMS[name].plain_from(checkpoints[name], tmp_path / "plain")):
        model = infinity.load_pretrained(path, swap_config("nvme", nvme={"paths": [str(tmp_path / path.name)]}))
        losses.append(trained(model, steps=2))
        infinity.close(model)
    assert losses[0] == losses[1]


@pytest.mark.covering(most=3)
@every_form
def test_a_resumed_run_has_the_bits_of_one_that_did_not_stop(
    name: str, checkpoints: dict[str, Path], deferred: Any, offloaded: Any, swap_config: Any, tmp_path: Path
) -> None:
    path = checkpoints[name]
    whole = offloaded(with_adapters(deferred(path), ATTENTION), nvme={"paths": [str(tmp_path / "whole")]})
    expected = trained(whole, steps=4)
    first = offloaded(with_adapters(deferred(path), ATTENTION), commit_every=1)
    losses = trained(first, steps=2)
    infinity.close(first)
    again = with_adapters(deferred(path), ATTENTION)
    infinity.resume(again, swap_config("nvme", commit_every=1))
    assert codecs_in(again) == {None, *FORMS[name].codec}
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


@pytest.mark.covering(most=4)
@every_form
def test_a_saved_model_is_bf16_and_has_the_names_of_the_parameters(
    name: str, checkpoints: dict[str, Path], deferred: Any, offloaded: Any, tmp_path: Path
) -> None:
    form = FORMS[name]
    model = offloaded(deferred(checkpoints[name]).requires_grad_(False))
    infinity.save_pretrained(model, tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    expected, saved = form.decoded(checkpoints[name]), load_file(tmp_path / "out/model.safetensors")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[each], expected[each]) for each in expected)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.get_parameter(form.layer), expected[form.layer])


@pytest.mark.covering(most=3)
@every_form
def test_saved_adapters_name_the_base_and_give_the_same_logits(
    name: str, checkpoints: dict[str, Path], deferred: Any, offloaded: Any, tmp_path: Path
) -> None:
    from peft import PeftModel

    model = offloaded(with_adapters(deferred(checkpoints[name]), ATTENTION))
    logits = logits_of(model)
    infinity.save_pretrained(model, tmp_path / "adapters")
    named = json.loads((tmp_path / "adapters/adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(checkpoints[name])
    again = PeftModel.from_pretrained(deferred(Path(named)), tmp_path / "adapters")
    assert torch.equal(logits_of(offloaded(again, nvme={"paths": [str(tmp_path / "b")]})), logits)


# -- refusals ---------------------------------------------------------------------------------------------------------


def _without(part: str) -> Change:
    def change(tensors: Tensors, form: Form) -> None:
        del tensors[form.names(form.layer)[part]]

    return change


def _replaced(part: str, replace: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(tensors: Tensors, form: Form) -> None:
        tensor = form.names(form.layer)[part]
        tensors[tensor] = replace(tensors[tensor]).contiguous().clone()

    return change


def _with(end: str) -> Change:
    def change(tensors: Tensors, form: Form) -> None:
        tensors[form.base(form.layer) + end] = torch.ones(1)

    return change


def _of_the_other_producer(tensors: Tensors, form: Form) -> None:
    """Change the name of the global scale."""
    ends = {FORMS[name].ends["nested_scales"] for name in ("modelopt", "compressed-tensors")}
    (other,) = ends - {form.ends["nested_scales"]}
    tensors[form.base(form.layer) + other] = tensors.pop(form.names(form.layer)["nested_scales"])


def _without_shape(tensors: Tensors, form: Form) -> None:
    del tensors[form.base(form.layer) + ".weight_shape"]


def _with_another_shape(tensors: Tensors, form: Form) -> None:
    tensors[form.base(form.layer) + ".weight_shape"][1] += 1


_UP, _GATE = "model.layers.1.mlp.up_proj", "model.layers.1.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("modelopt", _without("codes"), f"has no tensor for parameter '{_UP}.weight'"),
        ("modelopt", _without("scales"), f"'{_UP}.weight' is NVFP4, and there is no '{_UP}.weight_scale'"),
        ("modelopt", _without("nested_scales"), f"is NVFP4, and there is no '{_UP}.weight_scale_2'"),
        ("modelopt", _of_the_other_producer, f"'{_UP}.weight_global_scale': this is a global scale of compressed-"),
        ("modelopt", _with(".pre_quant_scale"), f"there is '{_UP}.pre_quant_scale': with this tensor the values"),
        ("modelopt", _replaced("codes", lambda codes: codes[:-1]), r"with shape .575, 80., and is .576, 160. in the"),
        ("modelopt", _replaced("codes", lambda codes: codes.to(torch.float8_e5m2)), "is F8_E5M2; infinity reads NVFP4"),
        ("modelopt", _replaced("scales", lambda scales: scales.float()), "is F32 with shape .576, 10.; for .* F8_E4M3"),
        ("modelopt", _replaced("scales", lambda scales: scales[:, ::2]), r"with shape .576, 5.; .* shape .576, 10."),
        ("modelopt", _replaced("nested_scales", lambda _: torch.ones(2)), r"shape .2,.; for .* F32 with shape .1,."),
        ("modelopt", _replaced("nested_scales", lambda _: torch.zeros(1)), "_scale_2' is 0.0, and must be positive"),
        ("modelopt", _replaced("nested_scales", lambda scale: scale / 0), "_scale_2' is inf, and must be positive"),
        ("modelopt", _replaced("nested_scales", lambda scale: -scale), "_scale_2' is -.*, and must be positive"),
        ("compressed-tensors", _without("codes"), f"has no tensor for parameter '{_UP}.weight'"),
        ("compressed-tensors", _without("scales"), f"_packed' is NVFP4, and there is no '{_UP}.weight_scale'"),
        ("compressed-tensors", _without("nested_scales"), f"there is no '{_UP}.weight_global_scale'"),
        ("compressed-tensors", _of_the_other_producer, f"'{_UP}.weight_scale_2': this is a global scale of modelopt"),
        ("compressed-tensors", _with(".weight_zero_point"), f"there is '{_UP}.weight_zero_point': with this tensor"),
        ("compressed-tensors", _with(".weight"), f"there is '{_UP}.weight': a weight cannot be in two forms"),
        ("compressed-tensors", _replaced("nested_scales", lambda scale: scale.double()), "is F64 with .* be F32"),
        ("integers", _without("codes"), f"has no tensor for parameter '{_UP}.weight'"),
        ("integers", _without("scales"), f"_packed' is 4-bit integers, and there is no '{_UP}.weight_scale'"),
        ("integers", _without_shape, f"is 4-bit integers, and there is no '{_UP}.weight_shape'"),
        ("integers", _with_another_shape, r"weight_shape' is .576, 161., and '.*_packed' is .576, 160. in the model"),
        ("integers", _with(".weight_g_idx"), f"there is '{_UP}.weight_g_idx': with this tensor"),
        ("integers", _replaced("codes", lambda codes: codes.view(torch.uint8)), "is U8; infinity reads 4-bit integers"),
        ("integers", _replaced("scales", lambda scales: scales.half()), "is F16 with shape .576, 5.; .* BF16 or F32"),
        ("integers", _replaced("scales", lambda scales: scales[:, :1]), r"with shape .576, 1.; .* shape .576, 5."),
        ("gpt-oss", _without("codes"), f"has no tensor for parameter '{_GATE}'"),
        ("gpt-oss", _without("scales"), f"'{_GATE}_blocks' is MXFP4, and there is no '{_GATE}_scales'"),
        ("gpt-oss", _with(""), f"'{_GATE}_blocks' is MXFP4, and there is '{_GATE}': a weight cannot be in two forms"),
        ("gpt-oss", _replaced("codes", lambda codes: codes.flatten(-2)), r"with shape .4, 192, 32., and is .4, 64"),
        ("gpt-oss", _replaced("codes", lambda codes: codes.transpose(1, 2)), r"with shape .4, 2, 192, 16., and is"),
        ("gpt-oss", _replaced("scales", lambda scales: scales[:-1]), r"is U8 with shape .3, 192, 2.; for"),
        ("gpt-oss", _replaced("scales", lambda scales: scales.view(torch.float8_e8m0fnu)), "is F8_E8M0 .* be U8"),
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_named(
    name: str, change: Change, message: str, checkpoints: dict[str, Path], deferred: Any, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        deferred(changed(checkpoints[name], tmp_path / "damaged", lambda tensors: change(tensors, FORMS[name])))
    assert "\n" not in str(caught.value)


def _weights(**changes: Any) -> dict[str, Any]:
    return {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16} | changes}}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("modelopt", {"quant_algo": "NVFP4_AWQ"}, "by modelopt with quant_algo: 'NVFP4_AWQ' .*infinity reads NVFP4"),
        ("modelopt", {"quant_algo": "FP8"}, "by modelopt with quant_algo: 'FP8'"),
        ("modelopt", {"quant_algo": "MIXED_PRECISION"}, "by modelopt with quant_algo: 'MIXED_PRECISION'"),
        ("modelopt", {"config_groups": _weights(group_size=32)}, "config_groups.group_0.weights: .*a scale for 16 el"),
        ("modelopt", {"config_groups": _weights(type="int")}, "config_groups.group_0.weights: .*a scale for 16"),
        ("modelopt", {"config_groups": {}}, "config_groups: {} .*groups of weights"),
        ("modelopt", {"config_groups": {"a": 3}}, "config_groups.a: 3 .*groups of weights"),
        ("modelopt", {"ignore": [3]}, r"with ignore: \[3\] .*a list of names"),
        ("modelopt", {"ignore": ["re:("]}, "with ignore: 're:.' .*regular expressions"),
        ("modelopt", {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
         "no tensor of its files is NVFP4"),
        ("compressed-tensors", {"format": "naive-quantized"}, "format: 'naive-quantized' .*reads nvfp4-pack-quantized"),
        ("compressed-tensors", {"format": "pack-quantized"}, "group_0.format: 'nvfp4-pack-quantized'"),
        ("compressed-tensors", {"format": "mixed-precision"}, "with format: 'mixed-precision'"),
        ("compressed-tensors", {"quantization_status": "initialized"}, "'initialized' .*reads compressed or frozen"),
        ("compressed-tensors", {"transform_config": {"u": 1}}, "transform_config: {'u': 1} .*weights without it"),
        ("compressed-tensors", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: .*without it"),
        ("compressed-tensors", {"config_groups": _weights(symmetric=False)}, "group_0.weights: .*a scale for 16"),
        ("compressed-tensors", {"quant_method": "modelopt", "quant_algo": "NVFP4"},
         "has no tensor for parameter '.*q_proj.weight' .*does the config.json belong to it"),
        ("integers", {"config_groups": _weights(type="int", num_bits=8)}, "group_0.weights: .*symmetric 4-bit"),
        ("integers", {"config_groups": _weights(type="int", group_size=24)}, "group_0.weights: .*symmetric 4-bit"),
        ("integers", {"config_groups": _weights(type="int", symmetric=False)}, "group_0.weights: .*symmetric 4-bit"),
        ("integers", {"config_groups": _weights(type="int", actorder="group")}, "groups, without actorder: group"),
        ("integers", {"config_groups": _weights(type="int", strategy="channel")}, r"weight_scale' is BF16 .*\d, 1."),
        ("gpt-oss", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "config_groups: None"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_read_or_contradicts_the_files_is_named(
    name: str, changes: dict[str, Any], message: str, checkpoints: dict[str, Path], deferred: Any, tmp_path: Path
) -> None:
    path = changed(checkpoints[name], tmp_path / "other", lambda _: None)
    configure(path, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        deferred(path)
    assert "\n" not in str(caught.value)


@every_form
def test_codes_without_a_quantization_config_are_refused(
    name: str, checkpoints: dict[str, Path], deferred: Any, offloaded: Any, tmp_path: Path
) -> None:
    path = changed(checkpoints[name], tmp_path / "other", lambda _: None)
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="as torch.(uint8|float8_e4m3fn), but|has no tensor for parameter"):
        offloaded(deferred(path))


@every_form
def test_a_config_beside_files_without_codes_is_refused(name: str, deferred: Any, tmp_path: Path) -> None:
    FORMS[name].make().save_pretrained(tmp_path / "base")
    configure(tmp_path / "base", **FORMS[name].config)
    with pytest.raises(
        ModelError, match=f"according to its config.json, and no tensor of its files is {FORMS[name].name}"
    ):
        deferred(tmp_path / "base")


@every_form
def test_a_truncated_file_is_named(name: str, checkpoints: dict[str, Path], deferred: Any, tmp_path: Path) -> None:
    path = changed(checkpoints[name], tmp_path / "cut", lambda _: None)
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match="model.safetensors: .*incomplete"):
        deferred(path)
