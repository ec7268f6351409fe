"""Frozen weights that rest in 4 or 8 bits: what is trained beside them trains as on the decoded values in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity import _native
from infinity.checkpoint.generation import newest_stored_generation, open_stores
from infinity.coordinator import registry
from infinity.errors import ModelError, PlanError, ResumeError, SwapCorruptionError, SwapIOError
from infinity.state.codec import decode as decoded_values
from infinity.state.codec import encode, encoded_bytes
from infinity.state.frozen_codecs import codecs_of
from infinity.tiers import slots
from tests import sampling
from tests.conftest import Offload, require_no_leaks, weights_of
from tests.models import Batch, gpt2, llama, loss_of, mixtral, tied_llama

CODECS = ("nf4", "int8")
MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "llama": llama, "tied llama": tied_llama, "gpt2": gpt2, "mixtral": mixtral,
}  # fmt: skip
STEPS = sampling.number(2, 3)


def with_adapters(model: nn.Module) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    return get_peft_model(
        model,
        LoraConfig(
            r=4,
            target_modules=["q_proj", "v_proj", "c_attn", "up_proj", "down_proj", "o_proj"],
            init_lora_weights=False,
        ),
    )


def replaced(model: nn.Module, blocks: str, codec: Any) -> dict[str, torch.Tensor]:
    """Give the frozen weights of the blocks the values that they decode to. Returns these."""
    layers = model.get_submodule(blocks)
    found = codecs_of(model, list(layers.children()), codec)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    values = {}
    for parameter in found:
        flat = parameter.detach().reshape(-1)
        data = torch.zeros(encoded_bytes(codec, parameter.shape), dtype=torch.uint8)
        encode("", flat, codec, memoryview(data.numpy()), _native.ThreadPool(1))
        value = decoded_values(data, codec, parameter.shape, parameter.dtype)
        assert 0 < (value - parameter.detach()).abs().max() < 0.2 * parameter.detach().abs().max()
        with torch.no_grad():
            parameter.copy_(value)
        values[names[id(parameter)]] = value
    assert values
    return values


def trained(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model, batch)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


BLOCKS = {"gpt2": "base_model.model.transformer.h"}


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("tier", ["host", "nvme"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_train_as_on_the_decoded_values_in_memory(
    codec: Any, tier: str, name: str, dtype: torch.dtype, offload: Offload
) -> None:
    model, batch = MODELS[name]()
    ours = with_adapters(model.to(dtype))
    plain = copy.deepcopy(ours)
    values = replaced(plain, BLOCKS.get(name, "base_model.model.model.layers"), codec)
    expected = trained(plain, batch, torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2))
    offload(ours, tier, frozen=codec, overlap="off")
    found = trained(ours, batch, infinity.AdamW([p for p in ours.parameters() if p.requires_grad], lr=1e-2))
    assert found == pytest.approx(expected, rel=1e-6 if dtype == torch.float32 else 2e-2)
    assert found[0] == expected[0]  # before the first update: the same weights, the same bits
    now = weights_of(ours)
    assert all(torch.equal(now[name], value) for name, value in values.items())
    require_no_leaks(ours)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("overlap", ["off", "before_forward", "during_backward"])
@pytest.mark.parametrize("weights", ["host", "nvme", "auto"])
@pytest.mark.parametrize("room", ["2 units", "all"])
def test_every_placement_ends_in_the_same_bits(
    codec: Any, overlap: str, weights: str, room: str, offload: Offload
) -> None:
    model, batch = llama()
    ends = []
    for options in ({"overlap": "off", "weights": "nvme"}, {"overlap": overlap, "weights": weights}):
        ours = with_adapters(copy.deepcopy(model).to(torch.bfloat16))
        device = {"2 units": "700KiB", "all": "64MiB"}[room]
        offload(ours, "nvme", frozen=codec, memory={"device": device, "host": "512MiB"}, **options)
        losses = trained(ours, batch, infinity.AdamW([p for p in ours.parameters() if p.requires_grad], lr=1e-2))
        require_no_leaks(ours)
        ends.append((losses, weights_of(ours)))
        infinity.close(ours)
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(value, ends[1][1][name]) for name, value in ends[0][1].items())


def test_what_trains_or_is_no_matrix_of_a_block_stays_as_it_is(offload: Offload) -> None:
    model, _ = llama()
    ours = with_adapters(model.to(torch.bfloat16))
    offload(ours, frozen="nf4")
    codecs = {
        spec.name: group.codec
        for record in registry.coordinator_of(ours).units
        for group in record.full.groups
        for spec in group.specs
    }
    for name, codec in codecs.items():
        encoded = ".layers." in name and "lora" not in name and "norm" not in name
        assert codec == ("nf4" if encoded else None), name


@pytest.mark.parametrize("codec", CODECS)
def test_the_bytes_of_a_step_are_those_of_the_encoded_form(codec: Any, offload: Offload) -> None:
    model, batch = llama()
    ours = with_adapters(model.to(torch.bfloat16))
    offload(ours, frozen=codec, memory={"device": "700KiB", "host": "512MiB"}, overlap="off")
    coordinator = registry.coordinator_of(ours)
    assert coordinator.resources.plan.layout.encoded_bytes > 0
    optimizer = infinity.AdamW([p for p in ours.parameters() if p.requires_grad], lr=1e-2)
    trained(ours, batch, optimizer)
    before = infinity.statistics(ours)
    trained(ours, batch, optimizer)
    after = infinity.statistics(ours)
    planned = coordinator.resources.plan.forecast
    assert after.read_bytes - before.read_bytes <= STEPS * planned.read_bytes
    assert after.written_bytes - before.written_bytes <= STEPS * planned.written_bytes


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_no_code_stands_for_is_refused_by_name(value: float, offload: Offload) -> None:
    model, _ = llama()
    ours = with_adapters(model)
    weight = ours.get_submodule("base_model.model.model.layers.2.mlp.up_proj.base_layer").weight
    with torch.no_grad():
        weight[3, 5] = value
    with pytest.raises(ModelError, match=r"layers\.2\.mlp\.up_proj\.base_layer\.weight.*frozen: bf16"):
        offload(ours, frozen="nf4")


@pytest.mark.cpu_only("a device keeps the decoded weights")
def test_on_the_cpu_weights_on_the_device_are_not_decoded(offload: Offload) -> None:
    ours = with_adapters(llama()[0])
    with pytest.raises(PlanError, match="weights: host or auto, or frozen: bf16"):
        offload(ours, frozen="nf4", weights="device", optimizer="host")


def begun(config: dict[str, Any], seed: int = 5) -> Any:
    torch.manual_seed(seed)
    return with_adapters(llama()[0].to(torch.bfloat16))


def optimizer_of(model: Any) -> infinity.AdamW:
    return infinity.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)


@pytest.mark.covering(strength=1, most=2)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(
    codec: Any, tier: str, swap_config: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    config = swap_config(tier, frozen=codec, commit_every=1)
    batch = llama()[1]
    first = infinity.offload(begun(config), config)
    optimizer = optimizer_of(first)
    trained(first, batch, optimizer)
    infinity.close(first)
    there = infinity.resume(begun(config, seed=6), config)  # whose own values do not matter
    went_on = trained(there, batch, optimizer_of(there))
    ends = weights_of(there)
    infinity.close(there)
    whole = infinity.offload(begun(config), config | {"nvme": {"paths": [str(tmp_path / "whole")]}})
    optimizer = optimizer_of(whole)
    trained(whole, batch, optimizer)
    assert trained(whole, batch, optimizer) == went_on
    assert all(torch.equal(value, ends[name]) for name, value in weights_of(whole).items())
    infinity.close(whole)


@pytest.mark.parametrize("other", ["bf16", "int8"])
def test_a_run_is_not_resumed_with_another_form(other: str, swap_config: Callable[..., dict[str, Any]]) -> None:
    config = swap_config(frozen="nf4", commit_every=1)
    first = infinity.offload(begun(config), config)
    trained(first, llama()[1], optimizer_of(first))
    infinity.close(first)
    with pytest.raises(ResumeError, match="Resume with the model, optimizer and config"):
        infinity.resume(begun(config), config | {"frozen": other})
    infinity.close(infinity.resume(begun(config), config))


def test_what_reads_a_generation_finds_the_decoded_values(
    swap_config: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    config = swap_config(frozen="nf4", commit_every=1)
    model = infinity.offload(begun(config), config)
    trained(model, llama()[1], optimizer_of(model))
    expected = weights_of(model)
    infinity.close(model)
    with open_stores([Path(config["nvme"]["paths"][0])]) as stores:
        generation = newest_stored_generation(stores)
        assert {name for of_unit in generation.shapes() for name in of_unit} == expected.keys()
        for name, value in expected.items():
            assert torch.equal(generation.weight(name), value), name


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", ["flip", "error"])
def test_a_disk_that_fails_or_lies_about_encoded_weights_is_named(codec: Any, kind: Any, offload: Offload) -> None:
    batch = llama()[1]
    plain = offload(begun({}), frozen=codec, memory=TIGHT)
    unit = registry.coordinator_of(plain).units[2]
    home = next(home for _, home in unit.homes.weights.encoded())
    begin = home.stored().offset
    infinity.close(plain)
    fault = _native.Fault(0, kind, 5 if kind == "error" else 0, operation="read", begin=begin, end=begin + home.nbytes)
    model = offload(begun({}), frozen=codec, memory=TIGHT, faults=[fault])
    optimizer = optimizer_of(model)
    expected = {"flip": SwapCorruptionError, "error": SwapIOError}[kind]
    with pytest.raises(expected, match=unit.name):
        trained(model, batch, optimizer)
    optimizer.zero_grad()
    assert len(trained(model, batch, optimizer)) == STEPS  # the disk answers again
    require_no_leaks(model)


TIGHT = {"device": "700KiB", "host": "512MiB"}


def test_encoded_weights_are_read_and_written_as_the_error_says_only(offload: Offload) -> None:
    model = offload(begun({}), frozen="nf4")
    before = weights_of(model)
    name = "base_model.model.model.layers.1.self_attn.k_proj.weight"
    with infinity.gathered(model):
        assert torch.equal(model.get_parameter(name), before[name])
    with pytest.raises(ModelError, match=r"k_proj\.weight.*is stored as nf4.*Nothing was written"):  # noqa: SIM117
        with infinity.gathered(model, write=True), torch.no_grad():
            model.get_parameter(name).zero_()
    with infinity.gathered(model, write=True), torch.no_grad():
        model.get_parameter("base_model.model.model.layers.1.self_attn.q_proj.lora_A.default.weight").zero_()
    after = weights_of(model)
    assert torch.equal(after[name], before[name])
    assert not after["base_model.model.model.layers.1.self_attn.q_proj.lora_A.default.weight"].any()
    require_no_leaks(model)
    infinity.close(model)
    for frozen in ("nf4", "bf16"):
        model = begun({})
        if frozen == "nf4":
            torch.nn.init.zeros_(model.get_parameter(name))
        offload(model, frozen=frozen)
        if frozen == "bf16":
            with infinity.gathered(model, write=True), torch.no_grad():
                model.get_parameter(name).zero_()
        assert not weights_of(model)[name].any()
        infinity.close(model)


def test_a_device_that_cannot_decode_loses_no_memory(
    computes_on: Any, offload: Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    if computes_on is None:
        pytest.skip("the CPU decodes in the native core")
    batch = llama()[1]
    model = offload(begun({}), frozen="nf4", memory=TIGHT)
    optimizer = optimizer_of(model)

    def fails(*given: Any) -> None:
        raise torch.OutOfMemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(slots, "decode_on_device", fails)
        with pytest.raises(torch.OutOfMemoryError):
            trained(model, batch, optimizer)
    optimizer.zero_grad()
    assert len(trained(model, batch, optimizer)) == STEPS
    require_no_leaks(model)
