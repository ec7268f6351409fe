"""Automatic tiles of tokens: only if a block's peak does not fit otherwise, and as many as it needs."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import infinity
from infinity.coordinator import registry
from infinity.runtime.auto_tile_tokens import (
    BlockPeak,
    block_peaks,
    tile_tokens_of_plan,
    tile_tokens_to_fit,
    tiles_for,
)
from infinity.runtime.token_tiles import TokenTiledModule
from infinity.sizes import format_bytes
from infinity.state.live_bytes import LiveBytes
from tests import models
from tests.models import loss_of
from tests.sim.fixtures import Simulate, simulate

__all__ = ["simulate"]

_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 896,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "vocab_size": models.VOCABULARY,
}
TOKENS = 2048


def decoder(kind: str, **options: Any) -> Any:
    config = hf.AutoConfig.for_model(kind, **(_SIZES | options))
    return hf.AutoModelForCausalLM.from_config(config).bfloat16().train()


def in_tiles(model: nn.Module) -> dict[str, int]:
    return {name: each.token_tiles for name, each in model.named_modules() if isinstance(each, TokenTiledModule)}


def peak_of(model: Any) -> BlockPeak:
    return next(block_peaks(model))


def measured_peak(model: Any, tokens: int) -> int:
    """Return the peak of the forward and backward of the model's first block."""
    block, call = model.model.layers[0], dict[str, Any]()

    def stop(module: nn.Module, args: Any, kwargs: Any) -> None:
        call.update(kwargs, hidden_states=args[0].detach().requires_grad_())
        raise StopIteration

    model.model(torch.zeros(1, 4, dtype=torch.long))  # the first call in tiles runs a few more tokens
    handle = block.register_forward_pre_hook(stop, with_kwargs=True)
    with pytest.raises(StopIteration):
        model.model(torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    handle.remove()
    gc.collect()
    came = torch.ones_like(call["hidden_states"])
    with LiveBytes() as live:
        block(**call).backward(came)
    return live.peak


@pytest.mark.long
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_predicted_peak_of_a_block_is_near_the_measured_one(kind: str) -> None:
    model = decoder(kind)
    for tiles in (1, 8):
        predicted = peak_of(model).nbytes(TOKENS, tiles)
        if tiles > 1:
            assert tile_tokens_to_fit(model, TOKENS, predicted) == tiles
        assert 0.95 <= predicted / measured_peak(model, TOKENS) <= 1.2


def test_a_block_that_fits_runs_as_a_whole(caplog: Any) -> None:
    model = decoder("llama")
    caplog.set_level(logging.INFO, "infinity")
    assert tile_tokens_to_fit(model, TOKENS, peak_of(model).nbytes(TOKENS, 1)) == 1
    assert not in_tiles(model)
    assert not caplog.records


def test_a_block_that_does_not_fit_gets_as_few_tiles_as_possible(caplog: Any) -> None:
    model = decoder("llama")
    peak = peak_of(model)
    caplog.set_level(logging.INFO, "infinity")
    assert tile_tokens_to_fit(model, TOKENS, peak.nbytes(TOKENS, 1) - 1) == 2
    assert in_tiles(model) == {
        f"model.layers.{index}.{name}": 2
        for index in range(2)
        for name in ("mlp", "input_layernorm", "post_attention_layernorm")
    }
    assert "6 modules ('model.layers.0." in caplog.text
    assert "run in 2 tiles of tokens" in caplog.text
    assert "added in another order" in caplog.text
    assert tile_tokens_to_fit(model, TOKENS, peak.nbytes(TOKENS, 4)) == 4
    assert set(in_tiles(model).values()) == {4}


def test_if_no_number_of_tiles_fits_a_warning_names_what_takes_the_memory(caplog: Any) -> None:
    model = decoder("llama")
    peak = peak_of(model)
    caplog.set_level(logging.WARNING, "infinity")
    assert tile_tokens_to_fit(model, TOKENS, 1) == 8
    least = 3 * TOKENS * 2 * (256 + 64 + 64 + 256)
    assert peak.nbytes(TOKENS, 8) > least
    assert "in tiles of tokens, and there is room for 1 B" in caplog.text
    names = ", ".join(f"self_attn.{name}_proj" for name in "qkvo")
    assert f"The outputs of {names} and their gradients take up to {format_bytes(least)}" in caplog.text


def test_tiles_have_at_least_256_tokens_and_are_no_more_than_lower_the_peak() -> None:
    peaks = list(block_peaks(decoder("llama")))
    assert [tiles_for(peaks, tokens, 1) for tokens in (511, 512, 1 << 16)] == [1, 2, 8]
    found = [peaks[0].nbytes(1 << 16, tiles) for tiles in (1, 2, 4, 8, 16)]
    assert found[:4] == sorted(set(found), reverse=True)
    assert found[4] == found[3]  # attention's backward is the peak then


def test_no_tiles_are_made_if_the_sums_of_gradients_take_more_than_the_tiles_save() -> None:
    model = decoder("llama", hidden_size=1024)
    assert tiles_for(list(block_peaks(model)), 512, 1) == 1
    model.requires_grad_(False)
    assert max(module.sums for module in peak_of(model).modules) == 0
    assert tiles_for(list(block_peaks(model)), 512, 1) == 2


def _tokens_that_just_fit(model: Any) -> int:
    peak, plan = peak_of(model), registry.coordinator_of(model).plan
    room = plan.budgets.limits.device - plan.device_bytes
    return room // (peak.nbytes(1, 1) + 2 * peak.width)  # two blocks


@pytest.mark.parametrize("recompute", ["blocks", "none"])
def test_a_plan_that_has_room_for_a_block_and_the_tensors_between_blocks_gets_no_tiles(
    recompute: str, simulate: Simulate, offload: Any
) -> None:
    simulate()
    model = offload(decoder("llama"), "host", recompute=recompute)
    tokens = _tokens_that_just_fit(model)
    assert tile_tokens_of_plan(model, tokens) == 1
    assert (tile_tokens_of_plan(model, tokens + 1) > 1) == (recompute == "blocks")
    if recompute == "blocks":
        assert tile_tokens_of_plan(model, tokens, micro_batches=64) > 2


def test_tensors_between_blocks_that_rest_in_ram_need_no_room(simulate: Simulate, offload: Any) -> None:
    simulate()
    model = offload(decoder("llama"), "host", recompute="blocks", activations="host")
    assert tile_tokens_of_plan(model, _tokens_that_just_fit(model) + 1) == 1


@pytest.mark.cpu_only("the device's memory is RAM")
def test_a_model_that_computes_in_host_memory_gets_no_tiles(offload: Any) -> None:
    model = offload(decoder("llama"), "host", recompute="blocks")
    assert tile_tokens_of_plan(model, 1 << 24) == 1
    assert not in_tiles(model)


class Attention(nn.Module):
    """Attention with layers that act on each token alone, and a forward with one argument."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(nn.functional.scaled_dot_product_attention(*self.all(x).chunk(3, -1)))


class Mixer(Attention):
    """The same under a name that says nothing."""


class Model(nn.Module):
    class Block(nn.Module):
        def __init__(self, mixer: nn.Module) -> None:
            super().__init__()
            self.mixer = mixer
            self.inner = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.mixer(x)
            return x + self.inner(x)

    def __init__(self, mixer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Model.Block(mixer()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_modules_are_found_without_their_names_and_attention_is_left_out() -> None:
    peak = peak_of(Model(Attention))
    assert [module.name for module in peak.modules] == ["blocks.0.inner"]
    assert list(peak.layers) == ["mixer.all", "mixer.out"]


def test_a_module_that_turns_out_to_mix_tokens_runs_as_a_whole_and_a_line_says_so(caplog: Any, offload: Any) -> None:
    wanted = Model(Mixer)
    model = offload(_copy_of(wanted))
    caplog.set_level(logging.WARNING, "infinity")
    assert tile_tokens_to_fit(model, TOKENS, 1) == 8
    assert "blocks.0.mixer" in in_tiles(model)
    x = torch.randn(1, 64, 32)
    loss = model(x)
    loss.backward()
    assert in_tiles(model) == {f"blocks.{index}.{name}": tiles for index in range(2) for name, tiles in _AS_FOUND}
    assert caplog.text.count("another result beside other tokens than alone, so it runs as a whole") == 2
    torch.testing.assert_close(loss.detach(), wanted(x).detach())


_AS_FOUND = (("mixer", 1), ("inner", 8))


def _copy_of(model: Model) -> Model:
    made = Model(Mixer)
    made.load_state_dict(model.state_dict())
    return made


@pytest.mark.covering(most=2)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_models_of_transformers_train_in_automatic_tiles(name: str, offload: Any) -> None:
    losses = []
    for room in (1 << 40, 1):
        torch.manual_seed(0)
        model, batch = models.ARCHITECTURES[name]()
        model = offload(model.bfloat16().train())
        assert (tile_tokens_to_fit(model, TOKENS, room) > 1) == (room == 1)
        optim = infinity.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            loss = loss_of(model, batch)
            loss.backward()
            optim.step()
            optim.zero_grad()
        losses.append(loss.item())
        infinity.close(model)
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


def test_a_model_without_modules_for_tiles_is_left_alone() -> None:
    assert tile_tokens_to_fit(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), TOKENS, 1) == 1
