"""Checkpoints that bitsandbytes quantized are read as they are, without bitsandbytes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import infinity
from infinity.coordinator import registry
from infinity.errors import ModelError
from infinity.state.codec import encoded_bytes
from infinity.state.frozen_codecs import encoded_form
from tests.checkpoint.quantized import QUANTIZATIONS, decoded_by_bitsandbytes, plain_from, quantize, tensors_of
from tests.conftest import weights_of
from tests.models import gpt2, llama, loss_of, mixtral, tied_llama

CODECS = ("nf4", "nf4_fp32", "int8_rows")
LAYER = "model.layers.1.mlp.up_proj.weight"
STEPS = 2


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("base")
    llama()[0].bfloat16().save_pretrained(path)
    return path


@pytest.fixture(autouse=True, scope="module")
def _bitsandbytes(bitsandbytes: Any) -> None:
    """All tests need it."""


@pytest.fixture(scope="module")
def checkpoints(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("quantized")
    return {kind: quantize(base, path / kind, kind) for kind in QUANTIZATIONS}


@pytest.fixture
def deferred(swap_config: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def load(path: Path, **options: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "bitsandbytes", None)  # importing it fails
            return infinity.load_pretrained(path, swap_config("nvme"), defer=True, **options)

    return load


@pytest.fixture
def offloaded(swap_config: Any) -> Iterator[Callable[[Any], Any]]:
    opened: list[Any] = []

    def offload(model: Any, **changes: Any) -> Any:
        infinity.offload(model, swap_config("nvme", **changes))
        opened.append(model)
        return model

    yield offload
    for model in opened:
        infinity.close(model)


def damaged(checkpoint: Path, out: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Write a copy of a checkpoint with changed tensors, and return its folder."""
    out.mkdir()
    (out / "config.json").write_text((checkpoint / "config.json").read_text())
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def with_state(tensors: dict[str, torch.Tensor], name: str, **values: Any) -> None:
    """Say something else of a 4-bit weight."""
    key = f"{name}.quant_state.bitsandbytes__nf4"
    said = json.loads(bytes(tensors[key].tolist())) | values
    tensors[key] = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)


def quantized_as(tensors: dict[str, torch.Tensor], name: str, values: torch.Tensor, **options: Any) -> torch.Tensor:
    """Quantize a weight as bitsandbytes does with these options, in place. Returns what it decodes to."""
    from bitsandbytes import functional

    for key in [key for key in tensors if key.startswith(name)]:
        del tensors[key]
    codes, state = functional.quantize_4bit(values, quant_type="nf4", **options)
    tensors |= {name: codes} | {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}
    decoded: torch.Tensor = functional.dequantize_4bit(codes, state)
    return decoded


def with_adapters(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(model, lora)


def trained(model: Any) -> list[float]:
    batch, losses = llama()[1], []
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = infinity.AdamW(trained, lr=1e-2)
    for _ in range(STEPS):
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# -- what is read -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CODECS)
def test_every_weight_has_the_values_that_bitsandbytes_decodes(
    kind: str, checkpoints: dict[str, Path], deferred: Any
) -> None:
    model, tensors, quantized = deferred(checkpoints[kind]), tensors_of(checkpoints[kind]), 0
    for name, parameter in model.named_parameters():
        decoded, known = decoded_by_bitsandbytes(tensors, name), encoded_form(parameter)
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter.clone(), tensors[name] if decoded is None else decoded), name
        assert (known is None) == (decoded is None)
        if known is not None:
            assert known.codec == kind
            assert known.read().numel() == encoded_bytes(kind, parameter.shape)  # type: ignore[arg-type]
            quantized += 1
    assert quantized == 4 * 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_model_of_another_dtype_has_the_same_weights(
    dtype: torch.dtype, checkpoints: dict[str, Path], deferred: Any
) -> None:
    weight = deferred(checkpoints["nf4"], dtype=dtype).get_parameter(LAYER)
    decoded = decoded_by_bitsandbytes(tensors_of(checkpoints["nf4"]), LAYER, dtype)
    assert weight.dtype == dtype
    assert torch.equal(weight.clone(), decoded)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", CODECS)
def test_a_checkpoint_in_shards_is_the_same_model(
    kind: str, base: Path, checkpoints: dict[str, Path], deferred: Any, tmp_path: Path
) -> None:
    quantize(base, tmp_path / "shards", kind, max_shard_size="20KB")
    assert (tmp_path / "shards/model.safetensors.index.json").is_file()
    whole, shards = deferred(checkpoints[kind]), deferred(tmp_path / "shards")
    for (name, one), another in zip(whole.named_parameters(), shards.parameters(), strict=True):
        assert torch.equal(one.clone(), another.clone()), name
        assert (encoded_form(one) is None) == (encoded_form(another) is None)


def test_tied_weights_stay_tied(deferred: Any, tmp_path: Path) -> None:
    tied_llama()[0].bfloat16().save_pretrained(tmp_path / "base")
    model = deferred(quantize(tmp_path / "base", tmp_path / "nf4", "nf4"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert encoded_form(model.lm_head.weight) is None
    assert encoded_form(model.get_parameter(LAYER)) is not None


@pytest.mark.parametrize(
    ("options", "codec"),
    [
        ({"blocksize": 64, "compress_statistics": True}, "nf4"),
        ({"blocksize": 128, "compress_statistics": True}, "nf4_fp32"),
        ({"blocksize": 256, "compress_statistics": False}, "nf4_fp32"),
        ({"blocksize": 64, "compress_statistics": False, "quant_storage": torch.bfloat16}, "nf4_fp32"),
        ({"blocksize": 64, "compress_statistics": True, "quant_storage": torch.bfloat16}, "nf4"),
    ],
)
def test_larger_blocks_and_other_storage_are_read(
    options: dict[str, Any], codec: str, checkpoints: dict[str, Path], deferred: Any, tmp_path: Path
) -> None:
    values, decoded = torch.randn(128, 64).bfloat16(), []

    def change(tensors: dict[str, torch.Tensor]) -> None:
        # The C code of bitsandbytes begins a block with each row; so a row has whole blocks here.
        flat = quantized_as(tensors, LAYER, values.reshape(32, 256), **options)
        with_state(tensors, LAYER, shape=[128, 64])
        decoded.append(flat.reshape(128, 64))

    weight = deferred(damaged(checkpoints["nf4"], tmp_path / "other", change)).get_parameter(LAYER)
    assert encoded_form(weight).codec == codec  # type: ignore[union-attr]
    assert torch.equal(weight.clone(), decoded[0])


def test_nested_scales_with_another_map_are_computed(
    checkpoints: dict[str, Path], deferred: Any, tmp_path: Path
) -> None:
    """The last bits of the map depend on the processor that made it."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        key = f"{LAYER}.nested_quant_map"
        tensors[key] = torch.nextafter(tensors[key], torch.tensor(2.0))

    path = damaged(checkpoints["nf4"], tmp_path / "other", change)
    weight = deferred(path).get_parameter(LAYER)
    assert encoded_form(weight).codec == "nf4_fp32"  # type: ignore[union-attr]
    assert torch.equal(weight.clone(), decoded_by_bitsandbytes(tensors_of(path), LAYER))  # type: ignore[arg-type]


# -- what a deferred parameter keeps ----------------------------------------------------------------------------------


def test_the_encoded_form_stays_with_values_that_stay(
    checkpoints: dict[str, Path], deferred: Any, offloaded: Any
) -> None:
    """DoRA reads the weights, and PiSSA changes them."""
    model = deferred(checkpoints["nf4"]).requires_grad_(False)
    read, changed, converted = (model.get_parameter(LAYER.replace("1", number)) for number in "123")
    known = encoded_form(converted)
    converted.data = converted.to(torch.float32)
    assert torch.isfinite(read.data.sum())
    changed.data.mul_(2)
    model.to(torch.bfloat16)
    offloaded(model)
    assert encoded_form(read) is not None
    assert encoded_form(changed) is None
    assert encoded_form(converted) == known
    specs = {
        spec.name: group
        for unit in registry.coordinator_of(model).units
        for group in unit.full.groups
        for spec in group.specs
    }
    assert [specs[LAYER.replace("1", number)].codec for number in "123"] == ["nf4", None, "nf4"]
    decoded = decoded_by_bitsandbytes(tensors_of(checkpoints["nf4"]), LAYER.replace("1", "2"))
    assert torch.equal(weights_of(model)[LAYER.replace("1", "2")], 2 * decoded)  # type: ignore[operator]


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.covering(most=2)
@pytest.mark.parametrize("kind", CODECS)
def test_adapters_train_as_on_the_decoded_weights(
    kind: str, base: Path, checkpoints: dict[str, Path], deferred: Any, offloaded: Any, tmp_path: Path
) -> None:
    plain = with_adapters(deferred(plain_from(checkpoints[kind], base, tmp_path / "plain")))
    model = offloaded(with_adapters(deferred(checkpoints[kind])))
    losses = trained(model)
    codecs = {group.codec for unit in registry.coordinator_of(model).units for group in unit.full.groups}
    assert codecs == {None, kind}
    assert losses == trained(offloaded(plain, nvme={"paths": [str(tmp_path / "other")]}))
    plain_weights = weights_of(plain)
    for name, value in weights_of(model).items():
        assert torch.equal(value, plain_weights[name]), name


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("frozen", ["nf4", "int8"])
@pytest.mark.parametrize("kind", CODECS)
def test_a_form_that_is_said_outright_is_the_one_that_weights_rest_in(
    kind: str, frozen: str, base: Path, checkpoints: dict[str, Path], deferred: Any, offloaded: Any, tmp_path: Path
) -> None:
    """The file's form is kept if it has as many bits. Otherwise the decoded weights are encoded."""
    model = offloaded(with_adapters(deferred(checkpoints[kind])), frozen=frozen)
    codecs = {group.codec for unit in registry.coordinator_of(model).units for group in unit.full.groups}
    kept = kind.startswith(frozen)
    assert codecs == {None, kind if kept else frozen}
    plain = with_adapters(deferred(plain_from(checkpoints[kind], base, tmp_path / "plain")))
    offloaded(plain, nvme={"paths": [str(tmp_path / "other")]}, frozen="bf16" if kept else frozen)
    plain_weights = weights_of(plain)
    for name, value in weights_of(model).items():
        assert torch.equal(value, plain_weights[name]), name


def test_a_model_that_is_trained_whole_begins_with_the_decoded_weights(
    base: Path, checkpoints: dict[str, Path], swap_config: Any, tmp_path: Path
) -> None:
    losses = []
    for path in (checkpoints["nf4"], plain_from(checkpoints["nf4"], base, tmp_path / "plain")):
        model = infinity.load_pretrained(path, swap_config("nvme", nvme={"paths": [str(tmp_path / path.name)]}))
        losses.append(trained(model))
        infinity.close(model)
    assert losses[0] == losses[1]


def test_frozen_bf16_gives_up_the_encoded_form(checkpoints: dict[str, Path], deferred: Any, offloaded: Any) -> None:
    model = offloaded(deferred(checkpoints["nf4"]).requires_grad_(False), frozen="bf16")
    assert {group.codec for unit in registry.coordinator_of(model).units for group in unit.full.groups} == {None}
    decoded = decoded_by_bitsandbytes(tensors_of(checkpoints["nf4"]), LAYER)
    assert torch.equal(weights_of(model)[LAYER], decoded)  # type: ignore[arg-type]


def test_what_is_saved_is_not_called_quantized(
    checkpoints: dict[str, Path], deferred: Any, offloaded: Any, tmp_path: Path
) -> None:
    model = offloaded(deferred(checkpoints["nf4"]).requires_grad_(False))
    infinity.save_pretrained(model, tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    decoded = decoded_by_bitsandbytes(tensors_of(checkpoints["nf4"]), LAYER)
    assert torch.equal(saved.get_parameter(LAYER), decoded)  # type: ignore[arg-type]


def test_saved_adapters_name_the_quantized_base(
    checkpoints: dict[str, Path], deferred: Any, offloaded: Any, tmp_path: Path
) -> None:
    from peft import PeftModel

    model = offloaded(with_adapters(deferred(checkpoints["nf4"])))
    batch = llama()[1]
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"]).logits.clone()
    infinity.save_pretrained(model, tmp_path / "adapters")
    named = json.loads((tmp_path / "adapters/adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == str(checkpoints["nf4"])
    again = offloaded(
        PeftModel.from_pretrained(deferred(Path(named)), tmp_path / "adapters"), nvme={"paths": [str(tmp_path / "b")]}
    )
    again.eval()
    with torch.no_grad():
        assert torch.equal(again(input_ids=batch["input_ids"]).logits, logits)


# -- what is refused --------------------------------------------------------------------------------------------------


def _of_another_map(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}.quant_map"] = tensors[f"{LAYER}.quant_map"] * 0.5


def _without_scales(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{LAYER}.absmax"]


def _with_few_scales(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}.absmax"] = tensors[f"{LAYER}.absmax"][:-1].clone()


def _with_few_codes(tensors: dict[str, torch.Tensor]) -> None:
    tensors[LAYER] = tensors[LAYER][:-1].clone()


def _of_another_shape(tensors: dict[str, torch.Tensor]) -> None:
    with_state(tensors, LAYER, shape=[64, 64])


def _of_small_blocks(tensors: dict[str, torch.Tensor]) -> None:
    with_state(tensors, LAYER, blocksize=32)


def _without_a_shape(tensors: dict[str, torch.Tensor]) -> None:
    with_state(tensors, LAYER, shape=None)


def _without_a_state(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{LAYER}.quant_state.bitsandbytes__nf4"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_of_another_map, f"model.safetensors: the 4-bit codes of '{LAYER}' have other values .quant_map"),
        (_without_scales, f"there is no '{LAYER}.absmax', which a quantized weight needs"),
        (_with_few_scales, f"model.safetensors: '{LAYER}' is quantized, and its scales does not have the size"),
        (_with_few_codes, f"model.safetensors: '{LAYER}' is quantized, and its codes does not have the size"),
        (_of_another_shape, f"'{LAYER}' is quantized with shape .64, 64., and is .128, 64. in the model"),
        (_of_small_blocks, f"'{LAYER}' is quantized in blocks of 32; infinity reads blocks of 64 and multiples"),
        (_without_a_shape, f"the quantization state that bitsandbytes wrote for '{LAYER}' cannot be read"),
        (_without_a_state, f"has '{LAYER}' as torch.uint8, but none of the tensors"),
    ],
)
def test_a_damaged_checkpoint_is_named(
    change: Any, message: str, checkpoints: dict[str, Path], deferred: Any, offloaded: Any, tmp_path: Path
) -> None:
    path = damaged(checkpoints["nf4"], tmp_path / "damaged", change)
    with pytest.raises(ModelError, match=message) as caught:
        offloaded(deferred(path).requires_grad_(False))
    assert "\n" not in str(caught.value)


def test_fp4_is_refused(checkpoints: dict[str, Path], deferred: Any) -> None:
    with pytest.raises(ModelError, match="model.safetensors: '.*proj.weight' is quantized as fp4; infinity reads only"):
        deferred(checkpoints["fp4"])


def test_int8_in_the_order_of_an_old_gpu_is_refused(
    checkpoints: dict[str, Path], deferred: Any, tmp_path: Path
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{LAYER}_format"] = torch.tensor(2, dtype=torch.uint8)

    path = damaged(checkpoints["int8_rows"], tmp_path / "damaged", change)
    with pytest.raises(ModelError, match=f"'{LAYER}' has its int8 values in the order col_turing"):
        deferred(path)


@pytest.mark.parametrize("method", ["gptq", "awq", "quark", "compressed-tensors"])
def test_other_methods_are_refused_by_name(method: str, base: Path, deferred: Any, tmp_path: Path) -> None:
    path = damaged(base, tmp_path / "other", lambda _: None)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
    with pytest.raises(ModelError, match=f"is quantized by {method} .*frozen: nf4 or int8") as caught:
        deferred(path)
    assert "\n" not in str(caught.value)


def test_a_layer_that_bitsandbytes_turned_is_refused(deferred: Any, tmp_path: Path) -> None:
    gpt2()[0].bfloat16().save_pretrained(tmp_path / "base")
    with pytest.raises(ModelError, match=r"is quantized with shape .192, 64., and is .64, 192.*was transposed"):
        deferred(quantize(tmp_path / "base", tmp_path / "nf4", "nf4"))


def test_experts_that_transformers_merges_are_refused(
    checkpoints: dict[str, Path], deferred: Any, tmp_path: Path
) -> None:
    """Versions before 5 saved a linear layer for each expert."""
    mixtral()[0].bfloat16().save_pretrained(tmp_path / "base")
    (tmp_path / "quantized").mkdir()
    config = json.loads((tmp_path / "base/config.json").read_text())
    config["quantization_config"] = json.loads((checkpoints["nf4"] / "config.json").read_text())["quantization_config"]
    (tmp_path / "quantized/config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "base/model.safetensors")
    for name in [name for name in tensors if "experts" in name and tensors[name].dim() == 2]:
        quantized_as(tensors, name, tensors[name], compress_statistics=True)
    save_file(tensors, tmp_path / "quantized/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="experts.*quantized, and transformers joins this tensor"):
        deferred(tmp_path / "quantized")
