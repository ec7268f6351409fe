"""Experts that a checkpoint has in an encoded form: each is a unit with the bytes of its file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import infinity
from infinity.coordinator import registry
from infinity.errors import ModelError
from infinity.runtime import experts
from infinity.state.codec import parts_of
from infinity.state.frozen_codecs import encoded_form
from infinity.state.layer_tiles import rows_of
from tests.checkpoint.fp8 import SCALES, changed, configure, decoded, write_fp8
from tests.checkpoint.frozen_bases import codecs_in, require_same, stored_bytes, trained
from tests.checkpoint.frozen_bases import deferred as deferred
from tests.checkpoint.frozen_bases import offloaded as offloaded
from tests.checkpoint.packed import FORMS, values_of
from tests.runtime.test_experts import LATENT, SIZES, STACKS

BLOCK = (32, 32)
GATE = "model.layers.1.mlp.experts.5.gate_proj.weight"
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 8},
    "DeepseekV3": {**LATENT, "kv_lora_rank": 40},  # matrices of 48 rows, which are not a multiple of 32
}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the banks of small models, too: three experts in a tile."""
    monkeypatch.setattr(experts, "_each", lambda nbytes: 3)


def mixture(name: str, **sizes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(hf, f"{name}Config")(**SIZES | MODELS[name] | sizes)
    return hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def plain_from(checkpoint: Path, out: Path, name: str) -> Path:
    """Save a checkpoint's decoded weights in bf16, expert by expert, as they are published; return the directory."""
    mixture(name).save_pretrained(out)
    save_file(decoded(checkpoint, BLOCK), out / "model.safetensors", metadata={"format": "pt"})
    return out


def nvme(checkpoint: Path) -> dict[str, Any]:
    """Return a config of a directory for the states of this checkpoint's model."""
    return {"paths": [str(checkpoint.with_suffix(".swap"))]}


def with_adapters(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["o_proj"], target_parameters=STACKS))


@pytest.fixture(params=MODELS)
def checkpoints(request: Any, tmp_path: Path) -> tuple[Path, Path]:
    """Return the directories of a checkpoint in FP8, and of one with the same values in bf16."""
    path = write_fp8(mixture(request.param), tmp_path / "fp8", block=BLOCK)
    return path, plain_from(path, tmp_path / "plain", request.param)


def test_every_expert_is_its_code_times_the_scale_of_its_block(checkpoints: tuple[Path, Path], deferred: Any) -> None:
    model, plain = (deferred(path) for path in checkpoints)
    codecs = Counter[str]()
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.clone(), expected.clone()), name
        known = encoded_form(parameter)
        codecs[known.codec if known else ""] += parameter.dim() == 3
    assert set(codecs) == {"", "fp8_block:32x32:fp32"}
    assert codecs["fp8_block:32x32:fp32"] in (2, 4)  # DeepSeek's first layer has no experts


@pytest.mark.parametrize("choice", ["apart", "together"])
def test_the_store_has_the_bytes_of_the_file(
    choice: str, checkpoints: tuple[Path, Path], deferred: Any, offloaded: Any
) -> None:
    path, _ = checkpoints
    tensors = load_file(path / "model.safetensors")
    model = offloaded(deferred(path).requires_grad_(False), experts=choice)
    rows = rows_of({name: each.shape for name, each in model.named_parameters()})
    assert bool(rows) == (choice == "apart")
    compared = 0
    for unit in registry.coordinator_of(model).units:
        for index, group in enumerate(unit.full.groups):
            for name, (begin, _) in group.encoded.items() if group.codec else ():
                shape = next(spec.shape for spec in group.specs if spec.name == name)
                if len(shape) < 3:
                    continue
                stored = stored_bytes(model, unit, index)
                whole, first = (rows[name].whole, rows[name].begin) if name in rows else (name, 0)
                layer, _, key = whole.rpartition(".")
                keys = ["gate_proj", "up_proj"] if key == "gate_up_proj" else ["down_proj"]
                names = [f"{layer}.{first + at}.{each}.weight" for at in range(shape[0]) for each in keys]
                for part, end in (("codes", ""), ("scales", "_scale_inv")):
                    at, nbytes = parts_of(group.codec, shape)[part]
                    expected = b"".join(tensors[each + end].view(torch.uint8).numpy().tobytes() for each in names)
                    assert stored[begin + at : begin + at + nbytes] == expected, name
                compared += shape[0] * len(keys)
    assert compared == sum(".experts." in name and not name.endswith("_inv") for name in tensors)


@pytest.mark.parametrize("choice", ["apart", "together"])
def test_adapters_train_as_on_the_decoded_weights(
    choice: str, checkpoints: tuple[Path, Path], deferred: Any, offloaded: Any
) -> None:
    losses, models = [], []
    for path in checkpoints:
        models.append(offloaded(with_adapters(deferred(path)), experts=choice, nvme=nvme(path)))
        losses.append(trained(models[-1]))
    assert codecs_in(models[0]) == {"fp8_block:32x32:fp32", None}
    assert codecs_in(models[1]) == {None}
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
    require_same(*models)


def test_experts_that_are_trained_begin_with_the_decoded_weights(
    checkpoints: tuple[Path, Path], deferred: Any, offloaded: Any
) -> None:
    models = [offloaded(deferred(path), experts="apart", nvme=nvme(path)) for path in checkpoints]
    assert codecs_in(models[0]) == {None}
    require_same(*models)


@pytest.mark.covering(strength=1, most=2)
@pytest.mark.parametrize("kind", SCALES)
def test_a_resumed_run_has_the_bits_of_one_that_did_not_stop(
    kind: str, deferred: Any, swap_config: Any, tmp_path: Path
) -> None:
    path = write_fp8(mixture("Qwen3Moe"), tmp_path / "fp8", kind, BLOCK)
    config = swap_config("nvme", experts="apart", commit_every=1)
    model = infinity.offload(with_adapters(deferred(path)), config)
    trained(model, 2)
    infinity.close(model)
    model = infinity.resume(with_adapters(deferred(path)), config)
    losses = trained(model, 2)
    assert codecs_in(model) == {f"fp8_block:32x32:{kind}", None}
    infinity.close(model, discard=True)
    model = infinity.offload(with_adapters(deferred(path)), config)
    assert trained(model, 4)[2:] == losses
    infinity.close(model, discard=True)


def test_experts_of_gpt_oss_are_units_in_their_form(deferred: Any, offloaded: Any, tmp_path: Path) -> None:
    form = FORMS["gpt-oss"]
    path = form.write(tmp_path / "mxfp4")
    plain = form.plain_from(path, tmp_path / "plain")
    losses, models = [], []
    for each in (path, plain):
        model = offloaded(with_adapters(deferred(each)), experts="apart", nvme=nvme(each))
        assert sum(unit.full.routed for unit in registry.coordinator_of(model).units) == 3 * 2
        models.append(model)
        losses.append(trained(model))
    assert codecs_in(models[0]) == {*form.codec, None}
    assert losses[0] == losses[1]
    require_same(*models)


@pytest.mark.parametrize("choice", ["apart", "together"])
def test_experts_in_4_bit_integers_keep_their_bytes(choice: str, deferred: Any, offloaded: Any, tmp_path: Path) -> None:
    form = FORMS["integers"]
    model, out = mixture("Qwen3Moe"), tmp_path / "int4"
    model.save_pretrained(out)
    tensors = load_file(out / "model.safetensors")
    plain = dict(tensors)
    for weight in [weight for weight in tensors if weight.endswith("_proj.weight")]:
        parts, base = form.parts(tensors.pop(weight)), form.base(weight)
        tensors |= {base + end: part.contiguous() for end, part in parts.items()}
        plain[weight] = values_of(parts)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    model.save_pretrained(tmp_path / "plain")
    save_file(plain, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    configure(out, **form.config)
    losses, models = [], []
    for path in (out, tmp_path / "plain"):
        models.append(offloaded(with_adapters(deferred(path)), experts=choice, nvme=nvme(path)))
        losses.append(trained(models[-1]))
    codecs = codecs_in(models[0]) - {None}
    assert {str(each).partition(":")[0] for each in codecs} == {each.partition(":")[0] for each in form.codec}
    units = registry.coordinator_of(models[0]).units
    shapes = [spec.shape for unit in units for group in unit.full.groups if group.codec for spec in group.specs]
    assert sum(shape[0] for shape in shapes if len(shape) == 3) == 2 * 2 * 8  # stacks, layers and experts
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
    require_same(*models)


def test_experts_with_a_global_scale_each_are_refused(deferred: Any, tmp_path: Path) -> None:
    form = FORMS["modelopt"]
    path = form.write(tmp_path / "nvfp4", mixture("Qwen3Moe"))
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        parts = form.parts(tensors.pop(name))
        tensors |= {form.base(name) + end: part.contiguous() for end, part in parts.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"experts.*infinity cannot join quantized weights of this form"):
        deferred(path)


def _odd(tensors: dict[str, torch.Tensor]) -> None:
    """Give one expert a scale of another dtype."""
    tensors[f"{GATE}_scale_inv"] = tensors[f"{GATE}_scale_inv"].bfloat16()


def _in_bf16(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{GATE}_scale_inv"]
    tensors[GATE] = tensors[GATE].bfloat16()


def _up_in_bf16(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("up_proj.weight")]:
        del tensors[f"{name}_scale_inv"]
        tensors[name] = tensors[name].bfloat16()


def _smaller(tensors: dict[str, torch.Tensor]) -> None:
    tensors[GATE], scale = tensors[GATE][:, :32].contiguous(), f"{GATE}_scale_inv"
    tensors[scale] = tensors[scale][:, :1].contiguous()


def _without_a_scale(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{GATE}_scale_inv"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_odd, f"'{GATE}' is one of the experts of a layer, of which some are quantized"),
        (_in_bf16, f"'{GATE}' .* all have the same form and shape, with a multiple of 32 rows"),
        (_up_in_bf16, "all have the same form and shape"),
        (_smaller, rf"'{GATE}' is FP8 with shape \(\d+, 32\), and is \(\d+, 64\) in the model"),
        (_without_a_scale, rf"there is no '{GATE}_scale_inv'"),
    ],
)
def test_experts_that_do_not_fit_each_other_are_named(change: Any, says: str, deferred: Any, tmp_path: Path) -> None:
    path = write_fp8(mixture("Qwen3Moe"), tmp_path / "fp8", block=BLOCK)
    with pytest.raises(ModelError, match=says):
        deferred(changed(path, tmp_path / "changed", change))


def test_experts_whose_rows_are_no_complete_blocks_are_refused(deferred: Any, tmp_path: Path) -> None:
    path = write_fp8(mixture("Qwen3Moe", moe_intermediate_size=48), tmp_path / "fp8", block=BLOCK)
    with pytest.raises(ModelError, match=r"experts\.0\.gate_proj.* with a multiple of 32 rows"):
        deferred(path)


def test_a_layer_that_the_model_does_not_use_is_ignored(deferred: Any, tmp_path: Path) -> None:
    """DeepSeek-V3's files have a layer that predicts more tokens, which the model lacks."""
    path = write_fp8(mixture("DeepseekV3"), tmp_path / "fp8", block=BLOCK)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.1.")]:
            tensors[name.replace("layers.1.", "layers.2.")] = tensors[name].clone()

    model, plain = deferred(changed(path, tmp_path / "more", add)), deferred(path)
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.clone(), expected.clone()), name
        assert (encoded_form(parameter) is None) == (encoded_form(expected) is None)
