"""infinity.tile_tokens: a module in tiles of tokens computes the same, and keeps only its input for the backward."""

from __future__ import annotations

import copy
import gc
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import infinity
from infinity.coordinator import registry
from infinity.errors import ConfigError, ModelError, StaleWeightsError
from infinity.runtime.token_tiles import TokenTiledModule
from infinity.state.live_bytes import LiveBytes
from tests import models
from tests.conftest import require_no_leaks, weights_of
from tests.models import VOCABULARY, Batch, loss_of
from tests.runtime.alike import tight
from tests.runtime.vertically import grads, is_vertical
from tests.sim.fixtures import Simulate, simulate

__all__ = ["simulate"]

TILES = 3
_SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}


def _decoder(kind: str) -> tuple[Any, Batch]:
    config = hf.AutoConfig.for_model(kind, **_SIZES, num_hidden_layers=3, vocab_size=VOCABULARY)
    ids = models._ids()
    return hf.AutoModelForCausalLM.from_config(config), {"input_ids": ids, "labels": ids}


MODELS: dict[str, Callable[[], tuple[Any, Batch]]] = {
    "llama": partial(_decoder, "llama"),
    "qwen2": partial(_decoder, "qwen2"),
    "mistral": partial(_decoder, "mistral"),
    "gpt2": models.gpt2,
}
RECOMPUTES = ("nothing", "reentrant", "non-reentrant")


def mlps(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if name.split(".")[-1] == "mlp"}


def tiled(model: Any, tiles: int = TILES) -> Any:
    for module in mlps(model).values():
        infinity.tile_tokens(module, tiles)
    return model


def made(name: str, recomputes: str = "nothing", dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Batch]:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model = model.to(dtype).train()
    if recomputes != "nothing":
        options = {"use_reentrant": recomputes == "reentrant"}
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
        model.enable_input_require_grads()  # reentrant checkpoints need an input with a gradient
    return model, batch


def in_mlp(name: str) -> bool:
    return ".mlp." in name


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def require_same_but_order(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Require equal gradients; the sums of the MLPs' weights may be rounded in another order."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if in_mlp(name):
            assert relative(found[name], value) <= 2**-7, name
        else:
            assert torch.equal(found[name], value), name


def results(module: nn.Module, given: torch.Tensor, came: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the output, the gradient of the input and the gradients of the parameters."""
    given = given.detach().clone().requires_grad_()
    module.zero_grad()
    output = module(given)
    output.backward(came.to(output.dtype))
    assert given.grad is not None
    return output.detach(), given.grad, *(each.grad for each in module.parameters() if each.grad is not None)


# -- offloaded models -------------------------------------------------------------------------------------------------


@pytest.mark.covering(most=8)
@pytest.mark.parametrize("vertical", [False, True], ids=["ordinary", "vertical"])
@pytest.mark.parametrize("recomputes", RECOMPUTES)
@pytest.mark.parametrize("name", MODELS)
def test_an_offloaded_model_computes_the_same_in_tiles(
    name: str, recomputes: str, vertical: bool, offload: Any
) -> None:
    """All gradients but those of the tiled weights are equal exactly if the outputs and the gradients of the inputs of
    all tiled modules are equal.
    """
    found = []
    for tiles in (1, TILES):
        model, batch = made(name, recomputes)
        model = offload(tiled(model, tiles), memory=tight(model))
        batches = [{key: value.roll(index, 0)[:, : 16 - index] for key, value in batch.items()} for index in range(2)]
        losses = infinity.backward(model, partial(loss_of, model), batches, vertical=vertical)
        assert is_vertical(model) == vertical
        found.append((losses, grads(model)))
        infinity.AdamW(model.parameters(), lr=1e-3).step()
        require_no_leaks(model)
        infinity.close(model)
    (losses, wanted), (losses_in_tiles, gradients) = found
    assert losses_in_tiles == losses
    require_same_but_order(gradients, wanted)


@pytest.mark.parametrize("recomputes", RECOMPUTES)
def test_one_gradient_lands_per_weight_and_backward(recomputes: str, offload: Any, monkeypatch: Any) -> None:
    model, batch = made("llama", recomputes)
    model = offload(tiled(model), memory=tight(model))
    coordinator, landed = registry.coordinator_of(model), Counter[str]()
    land = coordinator.land_gradient

    def count(parameter: Any, place: Any, *args: Any, accumulate: bool, **options: Any) -> None:
        landed[place.spec.name, accumulate] += 1
        land(parameter, place, *args, accumulate=accumulate, **options)

    monkeypatch.setattr(coordinator, "land_gradient", count)
    names = [name for name, _ in model.named_parameters()]
    for accumulate in (False, True):
        landed.clear()
        loss_of(model, batch).backward()
        assert landed == dict.fromkeys([(name, accumulate) for name in names], 1)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("recomputes", RECOMPUTES)
@pytest.mark.parametrize("frozen", ["bf16", "nf4"])
def test_adapters_inside_the_tiled_modules_train(frozen: str, recomputes: str, offload: Any) -> None:
    from peft import LoraConfig, get_peft_model

    found = []
    for tiles in (1, TILES):
        model, batch = made("llama", recomputes)
        lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        torch.manual_seed(1)
        model = get_peft_model(model, lora)
        model = offload(tiled(model, tiles), frozen=frozen)
        loss = loss_of(model, batch)
        loss.backward()
        found.append((loss.detach(), grads(model)))
        infinity.close(model)
    (loss, wanted), (loss_in_tiles, gradients) = found
    assert torch.equal(loss_in_tiles, loss)
    assert any(in_mlp(name) for name in wanted)
    require_same_but_order(gradients, wanted)


@pytest.mark.parametrize("recompute", ["blocks", "none"])
def test_the_tokens_that_a_module_in_tiles_keeps_may_rest_in_ram(
    recompute: str, simulate: Simulate, offload: Any
) -> None:
    simulate()
    found = []
    for activations in ("keep", "host"):
        model, batch = made("llama")
        batch = {key: value.repeat(1, 32) for key, value in batch.items()}  # small tensors are not moved
        model = offload(tiled(model), "host", recompute=recompute, activations=activations)
        loss = loss_of(model, batch)
        loss.backward()
        found.append((loss.detach(), grads(model)))
        infinity.close(model)
    (loss, wanted), (loss_in_ram, gradients) = found
    assert torch.equal(loss_in_ram, loss)
    assert all(torch.equal(gradients[name], value) for name, value in wanted.items())


class CallsPart(nn.Module):
    """A model that calls a part of each block and never the block itself, so that no hook fetches the block."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.mlp(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CallsPart.Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block.mlp(x)
        return x.square().mean()


def test_weights_that_no_hook_has_fetched_are_fetched(offload: Any) -> None:
    x, found = torch.randn(2, 12, 32), []
    for tiles in (1, TILES):
        torch.manual_seed(0)
        model = CallsPart()
        model = offload(tiled(model, tiles), memory=tight(model))
        with torch.no_grad():
            model(x)  # the first call in tiles, which tries the modules, also fetches
        loss = model(x)
        loss.backward()
        found.append((loss.detach(), grads(model)))
        infinity.close(model)
    (loss, wanted), (loss_in_tiles, gradients) = found
    torch.testing.assert_close(loss_in_tiles, loss)
    torch.testing.assert_close(gradients, wanted)


def test_an_offloaded_model_can_be_put_into_tiles_and_trains(offload: Any) -> None:
    weights = []
    for offloaded_first in (False, True):
        model, batch = made("llama")
        model = model if offloaded_first else tiled(model)
        offload(model, memory=tight(model))
        model = tiled(model) if offloaded_first else model
        optim = infinity.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            loss_of(model, batch).backward()
            optim.step()
            optim.zero_grad()
        weights.append(weights_of(model))
        infinity.close(model)
    for name, value in weights[0].items():
        assert torch.equal(weights[1][name], value), name


def test_weights_that_were_changed_since_the_forward_are_refused_by_its_backward(offload: Any) -> None:
    model, batch = made("llama")
    offload(tiled(model))
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    late = loss_of(model, batch)
    loss_of(model, batch).backward()
    optim.step()
    with pytest.raises(StaleWeightsError):
        late.backward()


@pytest.mark.long
def test_a_compiled_model_computes_the_same_in_tiles(offload: Any) -> None:
    found = []
    for compiles in (False, True):
        model, batch = made("llama")
        model = offload(tiled(model))
        run = torch.compile(model, backend="eager") if compiles else model
        loss = loss_of(run, batch)
        loss.backward()
        found.append((loss.detach(), grads(model)))
        infinity.close(model)
    assert torch.equal(found[1][0], found[0][0])
    for name, value in found[0][1].items():
        assert torch.equal(found[1][1][name], value), name


# -- arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 48), (2, 37), (48,)], ids=str)
@pytest.mark.parametrize("tiles", [2, 5])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_of_inputs_have_the_bits_of_the_whole_module(
    name: str, tiles: int, shape: tuple[int, ...]
) -> None:
    module = next(iter(mlps(made(name)[0]).values()))
    given, came = (torch.randn(*shape, 64).bfloat16() for _ in range(2))
    output, of_given, *_ = results(copy.deepcopy(module), given, came)
    output_in_tiles, of_given_in_tiles, *_ = results(infinity.tile_tokens(module, tiles), given, came)
    assert torch.equal(output_in_tiles, output)
    assert torch.equal(of_given_in_tiles, of_given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tiles", [2, 8, 64])
def test_gradients_of_weights_are_about_as_near_to_the_exact_ones_as_those_of_the_whole_module(
    tiles: int, dtype: torch.dtype
) -> None:
    module = next(iter(mlps(made("llama", dtype=dtype)[0]).values()))
    given, came = (torch.randn(1, 512, 64).to(dtype) for _ in range(2))
    exact = results(copy.deepcopy(module).double(), given.double(), came.double())
    whole = results(copy.deepcopy(module), given, came)
    for wanted, ordinary, ours in zip(
        exact, whole, results(infinity.tile_tokens(module, tiles), given, came), strict=True
    ):
        assert relative(ours, wanted) <= 1.5 * relative(ordinary, wanted)


def test_the_gradients_of_tiles_are_added_in_fp32() -> None:
    """Each further tile adds 2⁻⁹, which a sum in bf16 would lose."""
    module = nn.Linear(1, 1, bias=False).bfloat16()
    given = torch.tensor([1.0, *[2**-9] * 8]).bfloat16().view(-1, 1)
    module(given).sum().backward()
    wanted, module.weight.grad = module.weight.grad, None
    infinity.tile_tokens(module, 9)(given).sum().backward()
    assert torch.equal(module.weight.grad, wanted)
    assert module.weight.grad.item() == 1 + 2**-6


def test_the_backward_draws_the_random_numbers_of_the_forward() -> None:
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Dropout(0.5))
    nn.init.eye_(module[0].weight)
    given = torch.ones(1, 50, 8, requires_grad=True)
    output = infinity.tile_tokens(module, 4)(given)
    after = torch.get_rng_state()
    torch.randn(5)
    output.sum().backward()
    assert torch.equal(given.grad, output.detach())
    torch.set_rng_state(after)
    again = infinity.tile_tokens(module, 4)(given)
    assert not torch.equal(again, output)


def test_autocast_of_the_forward_holds_in_the_backward() -> None:
    module = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    given, came = torch.randn(1, 24, 32), torch.randn(1, 24, 32)
    found = []
    for each in (module, infinity.tile_tokens(copy.deepcopy(module), 4)):
        tokens = given.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            output = each(tokens)
        assert output.dtype == torch.bfloat16
        output.backward(came.bfloat16())
        found.append((output.detach(), tokens.grad, each[0].weight.grad))
    assert torch.equal(found[1][0], found[0][0])
    assert torch.equal(found[1][1], found[0][1])
    assert relative(found[1][2], found[0][2]) <= 2**-7


def test_frozen_weights_and_inputs_without_gradients_get_none() -> None:
    module = next(iter(mlps(made("llama")[0]).values()))
    module.up_proj.requires_grad_(False)
    given = torch.randn(1, 12, 64).bfloat16()
    infinity.tile_tokens(module, 3)(given).sum().backward()
    assert given.grad is None
    assert module.up_proj.weight.grad is None
    assert module.down_proj.weight.grad is not None
    module.requires_grad_(False)
    assert not module(given).requires_grad


def test_a_graph_that_is_kept_can_be_run_backward_again() -> None:
    module = infinity.tile_tokens(next(iter(mlps(made("gpt2")[0]).values())), 3)
    given = torch.randn(1, 12, 64).bfloat16().requires_grad_()
    output = module(given)
    first = torch.autograd.grad(output.sum(), [given, module.c_fc.weight], retain_graph=True)
    second = torch.autograd.grad(output.sum(), [given, module.c_fc.weight])
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_a_call_with_one_token_or_without_values_runs_the_module_as_a_whole() -> None:
    module = infinity.tile_tokens(next(iter(mlps(made("llama")[0]).values())), 3)
    output = module(torch.randn(2, 1, 64).bfloat16())
    assert "TokenTiles" not in output.grad_fn.name()
    assert "TokenTiles" in module(torch.randn(1, 2, 64).bfloat16()).grad_fn.name()
    assert "TokenTiles" not in module.to("meta")(torch.empty(1, 2, 64, device="meta").bfloat16()).grad_fn.name()


def test_a_copy_of_a_module_in_tiles_has_weights_of_its_own() -> None:
    module = infinity.tile_tokens(nn.Linear(8, 8), 2)
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.weight.zero_()
        other.bias.zero_()
    given = torch.randn(4, 8)
    assert not other(given).any()
    assert module(given).any()
    assert list(module.state_dict()) == ["weight", "bias"]


def test_one_tile_makes_the_module_whole_again() -> None:
    module = infinity.tile_tokens(infinity.tile_tokens(nn.Linear(8, 8), 4), 1)
    assert "TokenTiles" not in module(torch.randn(4, 8)).grad_fn.name()


# -- memory -----------------------------------------------------------------------------------------------------------


def _peaks(module: nn.Module, tokens: int) -> tuple[int, int]:
    """Return the bytes that the module keeps for its backward, and the peak of its forward and backward."""
    given = torch.randn(1, tokens, 64).bfloat16().requires_grad_()
    module(given[:, :TILES])
    gc.collect()
    came = torch.ones_like(given)
    with LiveBytes() as live:
        output = module(given)
        kept = live.now - output.nbytes
        output.backward(came)
    return kept, live.peak


def test_a_module_in_tiles_keeps_its_input_and_needs_the_memory_of_one_tile() -> None:
    tokens, tiles, width, inner = 4096, 16, 64, 160
    module = next(iter(mlps(made("llama")[0]).values()))
    weights = sum(each.numel() for each in module.parameters())
    whole_kept, whole_peak = _peaks(copy.deepcopy(module), tokens)
    kept, peak = _peaks(infinity.tile_tokens(module, tiles), tokens)
    assert whole_kept == 2 * tokens * 4 * inner
    assert kept == 0  # the input existed before
    fixed = 2 * 2 * tokens * width  # output and gradient of the input
    assert peak <= fixed + (whole_peak - fixed) // tiles + (4 + 2) * weights + 2 * 2 * (tokens // tiles) * width


# -- refusals ---------------------------------------------------------------------------------------------------------


class Mixes(nn.Module):
    """A module whose layers act on each token alone, and whose forward does not."""

    def __init__(self, how: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(self.linear(x))


MIXED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda x: x + 1e-30 * x.mean(-2, keepdim=True),
    "before": lambda x: x.cumsum(-2),
    "position": lambda x: x + torch.arange(x.shape[-2])[:, None],
    "number": lambda x: x * x.shape[-2],
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x, x, x),
    "pooled": lambda x: x.mean(-2),
    "random": lambda x: x + torch.rand_like(x),
}


@pytest.mark.parametrize("how", MIXED)
def test_the_first_call_refuses_a_module_that_does_not_treat_each_token_alone(how: str) -> None:
    module = infinity.tile_tokens(Mixes(MIXED[how]), 2)
    with pytest.raises(ModelError, match="a Mixes cannot run in tiles of tokens"):
        module(torch.randn(2, 6, 8))
    assert module.training
    with pytest.raises(ModelError, match="a Mixes cannot run in tiles of tokens"):
        module(torch.randn(6, 8))


def test_a_module_is_tried_with_random_tokens_until_its_output_is_finite() -> None:
    """Tokens of an input may all be equal, which would hide a mean. Infinite weights hide every dependence."""
    module = infinity.tile_tokens(Mixes(MIXED["mean"]), 2)
    with pytest.raises(ModelError, match="beside other tokens"):
        module(torch.ones(1, 6, 8))
    bias = module.linear.bias.detach().clone()
    with torch.no_grad():
        module.linear.bias.fill_(float("inf"))
    module(torch.ones(1, 6, 8))
    with torch.no_grad():
        module.linear.bias.copy_(bias)
    with pytest.raises(ModelError, match="beside other tokens"):
        module(torch.ones(1, 6, 8))


@pytest.mark.parametrize(
    ("args", "options"), [((1,), {}), ((), {}), ((torch.ones(8),), {}), ((torch.ones(4, 8),), {"scale": 2.0})]
)
def test_a_call_with_other_arguments_than_tokens_is_refused(args: Any, options: Any) -> None:
    with pytest.raises(ModelError, match="other arguments than one tensor"):
        infinity.tile_tokens(Mixes(torch.relu), 2)(*args, **options)
    torch.testing.assert_close(infinity.tile_tokens(Mixes(torch.relu), 2)(x=torch.ones(4, 8)).shape, (4, 8))


def _row_tiles() -> nn.Module:
    return nn.Sequential(infinity.tile(nn.Linear(8, 8), 2))


def _replaced() -> nn.Module:
    module = nn.Linear(8, 8)
    module.forward = torch.relu  # type: ignore[method-assign]
    return module


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "experts": (
        lambda: models.mixtral()[0].model.layers[0].mlp,
        "'gate' (MixtralTopKRouter) has parameters or buffers",
    ),
    "convolution": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Conv1d(8, 8, 3)), "'1' (Conv1d) has parameters"),
    "batch norm": (lambda: nn.BatchNorm1d(8, affine=False), "a BatchNorm1d has parameters or buffers"),
    "rows": (_row_tiles, "'0' (TiledLinear) is in tiles of its rows"),
    "replaced": (_replaced, "the forward of this Linear was replaced"),
    "activation": (nn.GELU, "takes a module with weights"),
}


@pytest.mark.parametrize("which", REFUSED)
def test_modules_that_are_not_known_to_act_on_each_token_alone_are_refused(which: str) -> None:
    make, why = REFUSED[which]
    module = make()
    before = type(module)
    with pytest.raises(ModelError, match=re.escape(why)):
        infinity.tile_tokens(module, 2)
    assert type(module) is before


@pytest.mark.parametrize("tiles", [0, -1, True, 2.0])
def test_the_number_of_tiles_is_a_positive_integer(tiles: Any) -> None:
    with pytest.raises(ConfigError, match="1 or more tiles of tokens"):
        infinity.tile_tokens(nn.Linear(8, 8), tiles)


def test_layers_that_were_added_after_the_call_are_seen() -> None:
    module = infinity.tile_tokens(nn.Sequential(nn.Linear(8, 8)), 2)
    module.append(nn.Conv1d(8, 8, 1))
    with pytest.raises(ModelError, match=r"'1' \(Conv1d\) has parameters"):
        module(torch.randn(1, 4, 8))


def test_a_module_whose_parts_are_fetched_apart_is_refused(offload: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mlp(x).square().mean()

    model = offload(tiled(Model()))
    assert isinstance(model.mlp, TokenTiledModule)
    with pytest.raises(ModelError, match="weights are fetched in 2 units: 'mlp.0' and others"):
        model(torch.randn(1, 6, 64))


def test_a_second_derivative_is_refused() -> None:
    module = infinity.tile_tokens(nn.Linear(8, 8), 2)
    given = torch.randn(4, 8, requires_grad=True)
    (first,) = torch.autograd.grad(module(given).square().sum(), given, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
