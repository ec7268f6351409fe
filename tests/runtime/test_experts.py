"""Experts apart: each expert is a unit, and training ends in the bits of experts that are together."""

from __future__ import annotations

import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.checkpoint.merged_adapters import computing_merged, save_merged
from infinity.config import SwapConfig
from infinity.coordinator import registry
from infinity.coordinator.coordinator import Coordinator
from infinity.plan.disk import DiskLimits
from infinity.plan.planner import make_plan
from infinity.runtime import experts
from infinity.sizes import PAGE_BYTES
from infinity.state.discover import discover
from infinity.state.layer_tiles import rows_of
from infinity.state.offload_arguments import OffloadArguments
from infinity.units.gradients import GroupGradients
from tests import sampling
from tests.conftest import require_no_leaks
from tests.mixture import Mixture, in_plain_torch
from tests.models import VOCABULARY, Batch, loss_of
from tests.runtime.alike import tight

STEPS = sampling.number(2, 3)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "pad_token_id": 0,
}
LATENT = {
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 8},
    "Qwen3Moe": {"num_experts": 8},
    "DeepseekV3": LATENT,
    "Glm4Moe": {"n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "GptOss": {"num_local_experts": 8},
    "Qwen2Moe": {"num_experts": 8, "shared_expert_intermediate_size": 32},
    "Olmoe": {"num_experts": 8, "intermediate_size": 32},
    "GraniteMoe": {"num_local_experts": 8, "intermediate_size": 32},
}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the banks of small models, too: three experts in a tile."""
    monkeypatch.setattr(experts, "_each", lambda nbytes: 3)


def make(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Batch]:
    torch.manual_seed(0)
    config = getattr(hf, f"{name}Config")(**SIZES | MIXTURES[name] | options)
    model = hf.AutoModelForCausalLM.from_config(config, experts_implementation="grouped_mm")
    ids = torch.randint(3, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(1))
    return model.to(dtype).train(), {"input_ids": ids, "labels": ids}


def recompute(model: Any, kind: str) -> Any:
    if kind != "none":
        model.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
    return model


def train(model: nn.Module, batch: Batch, steps: int = STEPS, first: int = 0) -> list[torch.Tensor]:
    optim = infinity.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(model, {name: torch.roll(value, step, 1) for name, value in batch.items()})
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.detach())
    return losses


KINDS = pytest.mark.parametrize("kind", ["none", "non-reentrant", "reentrant"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
NAMES = pytest.mark.parametrize("name", MIXTURES)


@pytest.mark.covering(strength=2)
@KINDS
@DTYPES
@NAMES
def test_a_bank_has_the_loss_and_the_gradients_of_grouped_mm(name: str, dtype: torch.dtype, kind: str) -> None:
    wanted: dict[str, torch.Tensor | None] = {}
    losses = []
    for apart in (False, True):
        model, batch = make(name, dtype)
        recompute(model, kind)
        if apart:
            experts.cut_banks(model, "apart")
        loss = loss_of(model, batch)
        loss.backward()
        losses.append(loss.detach())
        rows = rows_of({key: each.shape for key, each in model.named_parameters()})
        assert bool(rows) == apart
        for key, parameter in model.named_parameters():
            if not apart:
                wanted[key] = parameter.grad
                continue
            place = rows.get(key)
            expected = wanted[key] if place is None else wanted[place.whole]
            if place is not None and expected is not None:
                expected = expected[place.begin : place.end]
            assert (parameter.grad is None) == (expected is None), key
            assert expected is None or torch.equal(parameter.grad.to_dense(), expected), key
    assert torch.equal(*losses)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("tier", ["host", "nvme"])
@KINDS
@DTYPES
@NAMES
def test_experts_apart_end_in_the_bits_of_experts_together(
    name: str, dtype: torch.dtype, kind: str, tier: str, offload: Any, tmp_path: Path
) -> None:
    results = []
    for choice in ("together", "apart"):
        model, batch = make(name, dtype)
        recompute(model, kind)
        offload(model, tier, experts=choice, nvme={"paths": [str(tmp_path / choice)]})
        losses = train(model, batch)
        results.append((losses, dict(infinity.state_dict(model))))
        require_no_leaks(model)
    (wanted, before), (found, after) = results
    assert torch.equal(torch.stack(found), torch.stack(wanted))
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert torch.equal(after[key], value), key


def read_bytes(model: nn.Module) -> int:
    """Return how many bytes of weights were read from the store so far."""
    return infinity.statistics(model).weight_bytes_read


@pytest.fixture
def visited(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the tiles of experts that are called, in the order of the calls."""
    names: list[str] = []
    original = experts._Experts.forward

    def forward(self: Any, *args: Any) -> Any:
        found = registry.find(next(self.parameters()))
        names.extend([found[1].unit.name] if found else [])
        return original(self, *args)

    monkeypatch.setattr(experts._Experts, "forward", forward)
    return names


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("pass_", ["evaluation", "none", "non-reentrant"])
@pytest.mark.parametrize("tokens", [1, 16, 256])
@pytest.mark.parametrize(("count", "chosen"), [(16, 2), (128, 8)])
@pytest.mark.parametrize("name", ["Qwen3Moe", "DeepseekV3", "Glm4Moe"])
def test_only_the_weights_of_routed_experts_are_read(
    name: str,
    count: int,
    chosen: int,
    tokens: int,
    pass_: str,
    visited: list[str],
    offload: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are read once for the forward and once for the backward, also if a shared expert follows them."""
    monkeypatch.setattr(experts, "_each", lambda nbytes: 1)
    numbers = dict.fromkeys(("num_experts", "n_routed_experts"), count)
    model, _ = make(name, num_experts_per_tok=chosen, moe_intermediate_size=64, **numbers)
    if pass_ != "evaluation":
        recompute(model, pass_)
    experts.cut_banks(model, "apart")
    offload(model, experts="apart", memory=tight(model))
    ids = torch.randint(3, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(tokens))
    coordinator = registry.coordinator_of(model)
    sizes = {unit.name: unit.full.weight_bytes for unit in coordinator.units}
    others = sum(unit.full.weight_bytes for unit in coordinator.units if not unit.full.routed)
    layers, training = 2 if name == "Qwen3Moe" else 1, pass_ != "evaluation"
    for iteration in range(3):
        visited.clear()
        before = read_bytes(model)
        with torch.set_grad_enabled(training):
            made = model(ids, use_cache=False).logits.sum()
        if training:
            made.backward()
            model.zero_grad()
            coordinator.fetcher.end_iteration()
        read = read_bytes(model) - before
        assert tokens > 1 or len(visited) == layers * chosen
        assert len(visited) == len(set(visited))  # a recomputation does not compute them
        assert not iteration or read <= 1.02 * (1 + training) * (others + sum(sizes[each] for each in visited))


@pytest.mark.parametrize(("count", "chosen"), [(16, 2), (128, 8)])
def test_a_forward_of_one_token_reads_less_than_experts_together(
    count: int, chosen: int, offload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "_each", lambda nbytes: 1)
    read = []
    for choice in ("together", "apart"):
        model, _ = make("Qwen3Moe", num_experts=count, num_experts_per_tok=chosen, moe_intermediate_size=128)
        if choice == "apart":
            experts.cut_banks(model, "apart")
        offload(model, experts=choice, memory=tight(model))
        with torch.no_grad():
            model(torch.tensor([[5]]))
            before = read_bytes(model)
            model(torch.tensor([[6]]))
        read.append(read_bytes(model) - before)
        infinity.close(model)
    assert read[1] <= 0.4 * read[0]


class Scaled(Mixture):
    """Mixture whose block saves the result of the experts for the backward."""

    def __init__(self, width: int) -> None:
        super().__init__(width, shared=True)
        self.scale = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (super().forward(x) - x) * self.scale


class Shifting(Mixture):
    """Mixture that routes tokens to other experts in each call."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside, self.calls = x, self.calls + 1
        factors, chosen = self.gate(inside).softmax(-1).topk(self.chosen)
        made = self.experts(inside, (chosen + self.calls) % self.experts.num_experts, factors)
        return x + made + self.shared(inside)


class Inner(Mixture):
    """Mixture with a gradient that is computed in the forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = super().forward(x)
        return made + torch.autograd.grad(made.sum(), x, retain_graph=True)[0]


class Stack(nn.Module):
    """Checkpointed blocks."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


def stack(kind: type[Mixture]) -> tuple[Stack, torch.Tensor]:
    torch.manual_seed(0)
    options = {} if kind is Scaled else {"shared": True}
    return Stack(kind(16, **options), nn.Linear(16, 16), kind(16, **options)), torch.randn(5, 16)


def test_a_result_of_experts_that_the_block_saves_is_computed_again(offload: Any) -> None:
    wanted, x = stack(Scaled)
    in_plain_torch(wanted)(x).backward()
    model, _ = stack(Scaled)
    offload(model)
    model(x).backward()
    parameters = dict(model.named_parameters())
    with infinity.gathered(model, grads=True):
        for name, parameter in wanted.named_parameters():
            assert torch.equal(parameters[name].grad, parameter.grad), name


def test_a_router_that_is_not_deterministic_is_named(offload: Any) -> None:
    model, x = stack(Shifting)
    offload(model)
    with pytest.raises(infinity.ModelError, match="of 'blocks.2.experts' routed tokens to other experts"):
        model(x).backward()


def test_a_gradient_in_a_checkpointed_block_of_experts_is_refused(offload: Any) -> None:
    model, x = stack(Inner)
    offload(model)
    with pytest.raises(infinity.ModelError, match="computes gradients inside the block"):
        model(x).backward()


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("overlap", ["during_backward", "off"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_idle_experts_end_in_the_bits_of_experts_together(
    tier: str, weight_decay: float, overlap: str, offload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts have their first token in any step, and then none for some steps."""
    monkeypatch.setattr(experts, "_each", lambda nbytes: 1)
    results = []
    for choice in ("together", "apart"):
        model, _ = make("Qwen3Moe", torch.bfloat16, num_experts=32)
        offload(model, tier, experts=choice, overlap=overlap)
        optim = infinity.AdamW(model.parameters(), lr=1e-2, weight_decay=weight_decay)
        losses = []
        for token in (5, 6, 7, 5, 8):
            ids = torch.tensor([[token, token + 1]])
            losses.append(loss_of(model, {"input_ids": ids, "labels": ids}))
            losses[-1].backward()
            optim.step()
            optim.zero_grad()
        results.append((torch.stack(losses), dict(infinity.state_dict(model))))
        require_no_leaks(model)
        infinity.close(model)
    (wanted, before), (found, after) = results
    assert torch.equal(found, wanted)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_idle_experts_keep_their_steps_through_a_resume(swap_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "_each", lambda nbytes: 1)

    def run(begin: int, end: int) -> dict[str, torch.Tensor]:
        model, _ = make("Mixtral", num_local_experts=32)
        open_ = infinity.resume if begin else infinity.offload
        model = open_(model, swap_config(experts="apart", commit_every=1))
        optim = infinity.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        for token in range(5 + begin, 5 + end):
            model(torch.tensor([[token]])).logits.square().mean().backward()
            optim.step()
            optim.zero_grad()
        assert all(optim.state[parameter]["step"] == end for parameter in model.parameters())
        found = dict(infinity.state_dict(model))
        infinity.close(model, discard=end == 4 and not begin)
        return found

    wanted = run(0, 4)
    run(0, 2)
    found = run(2, 4)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_experts_without_a_token_so_far_move_no_bytes_if_nothing_decays(
    visited: list[str], offload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "_each", lambda nbytes: 1)
    landed = set[str]()
    take = GroupGradients.take
    monkeypatch.setattr(
        GroupGradients,
        "take",
        lambda self, spec, *given, **how: (landed.add(spec.name), take(self, spec, *given, **how)),
    )
    written = []
    for weight_decay in (0.0, 0.1):
        model, _ = make("Qwen3Moe", num_experts=32)
        offload(model, experts="apart", commit_every=0)
        optim = infinity.AdamW(model.parameters(), lr=1e-2, weight_decay=weight_decay)
        visited.clear()
        landed.clear()
        before = infinity.statistics(model).written_bytes
        ids = torch.tensor([[5]])
        model(ids).logits.sum().backward()
        assert {name.rpartition(".")[0] for name in landed if "experts" in name} == set(visited)
        assert all(parameter.grad is not None for parameter in model.parameters())
        optim.step()
        infinity.synchronize(model)
        written.append(infinity.statistics(model).written_bytes - before)
        coordinator = registry.coordinator_of(model)
        moved = sum(
            12 * unit.full.numel + 4 * PAGE_BYTES
            for unit in coordinator.units
            if unit.name in visited or not unit.full.routed
        )
        assert written[-1] <= moved or weight_decay
        assert all(optim.state[parameter]["step"] == 1 for parameter in model.parameters())
        infinity.close(model)
    assert written[0] < 0.5 * written[1]


def test_no_gradient_outlives_the_backward_of_its_experts(offload: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients that exist at the same time are those of two tiles at most."""
    model, batch = make("Qwen3Moe", num_experts=32)
    experts.cut_banks(model, "apart")
    tile = max(unit.weight_bytes for unit in discover(model).units if unit.routed)
    offload(model, experts="apart")
    there, most = list[Any](), [0]
    land = Coordinator.land_gradient

    def landed(self: Any, parameter: Any, place: Any, gradient: torch.Tensor, *given: Any, **how: Any) -> None:
        if place.unit.routed and not gradient.is_sparse:
            there.append((weakref.ref(gradient.untyped_storage()), gradient.nbytes))
            most[0] = max(most[0], sum(nbytes for storage, nbytes in there if storage() is not None))
        land(self, parameter, place, gradient, *given, **how)

    monkeypatch.setattr(Coordinator, "land_gradient", landed)
    loss_of(model, batch).backward()
    assert 0 < most[0] <= 2 * tile


@pytest.mark.parametrize("kind", ["none", "non-reentrant", "reentrant"])
def test_a_layer_three_times_as_large_as_the_memory_of_the_device_trains(kind: str, offload: Any) -> None:
    losses = []
    for choice in ("together", "apart"):
        model, batch = make("Qwen3Moe", num_experts=32, moe_intermediate_size=64, num_hidden_layers=2)
        layer_bytes = sum(each.numel() * 4 for each in model.model.layers[0].parameters())
        recompute(model, kind)
        memory = {"device": "64MiB", "host": "512MiB"}
        if choice == "apart":
            memory["device"] = str(layer_bytes // 3)
        offload(model, experts=choice, memory=memory)
        losses.append(torch.stack(train(model, batch)))
        require_no_leaks(model)
        infinity.close(model)
    assert torch.equal(*losses)


def test_router_losses_are_those_of_experts_together(offload: Any) -> None:
    losses = []
    for choice in ("together", "apart"):
        model, batch = make("Qwen3Moe", output_router_logits=True)
        offload(model, experts=choice)
        losses.append(torch.stack(train(model, batch)))
        infinity.close(model)
    assert torch.equal(*losses)


def test_micro_batches_add_up_as_with_experts_together(offload: Any) -> None:
    results = []
    for choice, vertical in (("together", False), ("apart", False), ("apart", True)):
        model, batch = make("DeepseekV3", torch.bfloat16)
        offload(model, experts=choice)
        optim = infinity.AdamW(model.parameters(), lr=1e-2)
        batches = [{name: torch.roll(each, shift, 1) for name, each in batch.items()} for shift in range(3)]
        for _ in range(STEPS):
            infinity.backward(model, lambda each, model=model: loss_of(model, each) / 3, batches, vertical=vertical)
            optim.step()
            optim.zero_grad()
        results.append(dict(infinity.state_dict(model)))
        infinity.close(model)
    for other in results[1:]:
        assert all(torch.equal(other[name], value) for name, value in results[0].items())


def test_a_run_with_experts_apart_resumes(swap_config: Any) -> None:
    def run(steps: int, *, resume: bool) -> dict[str, torch.Tensor]:
        model, batch = make("Mixtral")
        config = swap_config(experts="together" if resume else "apart", commit_every=1)  # a run keeps its tiles
        model = infinity.resume(model, config) if resume else infinity.offload(model, config)
        train(model, batch, steps, 2 * resume)
        found = dict(infinity.state_dict(model))
        infinity.close(model, discard=steps == 4)
        return found

    wanted = run(4, resume=False)
    run(2, resume=False)
    found = run(2, resume=True)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_generation_is_that_of_experts_together(offload: Any) -> None:
    made = []
    for choice in ("together", "apart"):
        model, batch = make("GptOss")
        offload(model.eval(), experts=choice)
        with torch.no_grad():
            made.append(model.generate(batch["input_ids"], max_new_tokens=6, do_sample=False))
        infinity.close(model)
    assert torch.equal(*made)


@pytest.mark.parametrize("trained", ["attention", "experts"])
def test_a_part_of_a_mixture_can_be_frozen(trained: str, offload: Any) -> None:
    losses = []
    for choice in ("together", "apart"):
        model, batch = make("Qwen3Moe")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(("experts" in name) == (trained == "experts"))
        offload(model, experts=choice)
        losses.append(torch.stack(train(model, batch)))
        infinity.close(model)
    assert torch.equal(*losses)


def test_experts_stay_together_where_the_log_says_so(
    offload: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", logger="infinity")
    eager = make("Mixtral")[0]
    eager.set_experts_implementation("eager")
    offload(eager)
    assert "experts: together in 2 of 2 layers: the model computes its experts with 'eager'" in caplog.text
    infinity.close(eager)
    caplog.clear()
    monkeypatch.setattr(experts, "has_others", lambda: True)
    several = make("Mixtral")[0]
    config = {"experts": "apart", "ranks": {"wire": "gloo"}}
    experts.cut_banks(several, "apart", lambda: experts.why_together(SwapConfig.model_validate(config)))
    assert "experts: together in 2 of 2 layers: with several ranks and ranks.wire: gloo" in caplog.text
    assert not any(isinstance(module, experts.ExpertBank) for module in several.modules())


def test_stacks_of_a_bank_can_be_read_but_not_written(offload: Any) -> None:
    model, _ = make("Mixtral")
    stack = model.model.layers[0].mlp.experts.gate_up_proj.detach().clone()
    experts.cut_banks(model, "apart")
    bank = model.model.layers[0].mlp.experts
    assert torch.equal(bank.gate_up_proj, stack)
    with pytest.raises(infinity.ModelError, match="temporary copy for reading"):
        bank.gate_up_proj.mul_(2)
    other, _ = make("Mixtral")
    other.load_state_dict(model.state_dict())
    model.load_state_dict(other.state_dict())


def test_weights_of_experts_that_changed_since_the_forward_are_refused(offload: Any) -> None:
    model, batch = make("Mixtral")
    offload(model, experts="apart")
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    late = loss_of(model, batch)
    loss_of(model, batch).backward()
    optim.step()
    with pytest.raises(infinity.errors.StaleWeightsError):
        late.backward()


def test_a_plan_of_thousands_of_experts_takes_seconds() -> None:
    """Every expert is fetched once for the forward and once for the backward, as a step of many tokens routes all."""
    config = hf.Qwen3MoeConfig(num_hidden_layers=24, num_experts=128)
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation="grouped_mm")
    experts.cut_banks(model, "auto")
    found = discover(model)
    memory = {"device": "8GiB", "host": "16GiB"}
    swap = SwapConfig.model_validate(
        {"weights": "nvme", "optimizer": "nvme", "commit_every": 0, "memory": memory, "nvme": {"paths": ["/mnt/swap"]}}
    )
    terms = OffloadArguments(swap, torch.device("cpu"))
    begun = time.process_time()
    plan = make_plan(found.units, terms, can_recompute=True, sites=found.sites, disks=DiskLimits(1 << 44))
    assert time.process_time() - begun < 20
    count = sum(unit.routed for unit in found.units)
    assert count == 24 * 43  # three experts in a tile
    assert f"  experts      {count} units of 27.00 MiB: only routed ones are fetched" in plan.describe()
    experts_bytes = sum(unit.weight_bytes for unit in found.units if unit.routed)
    assert 2 * experts_bytes <= plan.forecast.read_bytes


def test_experts_with_a_norm_behind_them_stay_together() -> None:
    model, _ = make("Mixtral")
    for layer in model.model.layers:
        layer.mlp.experts.has_post_expert_norm = True
    experts.cut_banks(model, "apart")
    assert not any(isinstance(module, experts.ExpertBank) for module in model.modules())


STACKS = ["experts.gate_up_proj", "experts.down_proj"]
ADAPTED = pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral", "DeepseekV3", "GptOss"])


def adapt(model: Any, **more: Any) -> Any:
    """Return a PEFT model with adapters of attention and of experts."""
    import peft

    torch.manual_seed(2)
    attention = "q_b_proj" if hasattr(model.model.layers[0].self_attn, "q_b_proj") else "q_proj"
    lora = peft.LoraConfig(
        r=2, target_modules=[attention], target_parameters=STACKS, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, lora, **more).train()


class Largest(TorchDispatchMode):
    """Number of elements of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor) and not func.is_view:
                self.numel = max(self.numel, each.numel())
        return made


@pytest.mark.covering(strength=1)
@KINDS
@DTYPES
@ADAPTED
def test_adapters_of_a_bank_have_the_gradients_of_peft(name: str, dtype: torch.dtype, kind: str) -> None:
    losses, gradients = list[torch.Tensor](), list[dict[str, torch.Tensor]]()
    for choice in ("together", "apart"):
        model, batch = make(name, dtype)
        stack = max(each.numel() for each in model.parameters() if each.dim() == 3)
        model = adapt(recompute(model, kind))
        if kind == "reentrant":
            model.enable_input_require_grads()
        experts.cut_banks(model, choice)
        with Largest() as largest:
            loss = loss_of(model, batch)
            loss.backward()
        assert (largest.numel < stack) == (choice == "apart")
        losses.append(loss.detach())
        gradients.append({key: each.grad.clone() for key, each in model.named_parameters() if each.requires_grad})
    assert gradients[0].keys() == gradients[1].keys()
    assert sum(".experts." in key for key in gradients[0])
    exact = dtype == torch.float32
    for key, expected in gradients[0].items():
        near = 1e-6 if exact else 0.05 * expected.abs().max().item()
        assert (gradients[1][key] - expected).abs().max().item() <= near, key
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6 if exact else 2e-2, atol=0)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("frozen", ["bf16", "nf4"])
@pytest.mark.parametrize("tier", ["host", "nvme"])
@KINDS
@ADAPTED
def test_adapters_of_experts_train_as_on_a_plain_base(
    name: str, kind: str, tier: str, frozen: str, offload: Any, tmp_path: Path
) -> None:
    """The plain base has the values that the offloaded base decodes to. The adapters' files are PEFT's."""
    import peft

    model, batch = make(name)
    model.save_pretrained(tmp_path / "base")
    plain = adapt(hf.AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    model = adapt(recompute(model, kind))
    if kind == "reentrant":
        model.enable_input_require_grads()
    model = offload(model, experts="apart", frozen=frozen, weights=tier, optimizer=tier)
    with infinity.gathered(model):
        plain.load_state_dict(model.state_dict())
    losses = train(model, batch)
    optim = torch.optim.AdamW([each for each in plain.parameters() if each.requires_grad], lr=1e-2, weight_decay=0)
    for step in range(STEPS):
        loss = loss_of(plain, {key: torch.roll(value, step, 1) for key, value in batch.items()})
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optim.step()
        optim.zero_grad()
        torch.testing.assert_close(losses[step], loss.detach(), rtol=2e-5, atol=0)
    infinity.save_pretrained(model, tmp_path / "adapters")
    base = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").state_dict()
    trained = {key: value for key, value in dict(infinity.state_dict(model)).items() if ".lora_" in key}
    assert sum(".experts." in key for key in trained) >= 4
    for key, value in trained.items():
        assert torch.equal(loaded[key], value), key


@pytest.mark.covering(most=2)
@ADAPTED
def test_merged_experts_have_the_bits_of_peft(name: str, offload: Any, tmp_path: Path) -> None:
    model, batch = make(name)
    model.save_pretrained(tmp_path / "base")
    plain = adapt(hf.AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    model = offload(adapt(model), experts="apart")
    save_merged(model, tmp_path / "merged")
    plain.merge_and_unload().save_pretrained(tmp_path / "plain")
    found, expected = (hf.AutoModelForCausalLM.from_pretrained(tmp_path / each) for each in ("merged", "plain"))
    for key, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[key], value), key
    with torch.no_grad(), computing_merged(model.eval()):
        logits = model(**batch).logits
    with torch.no_grad():
        assert torch.equal(found(**batch).logits, logits)
        assert not torch.equal(model(**batch).logits, logits), "adapters beside their base round otherwise"
    with infinity.gathered(model, write=True):
        model.merge_adapter(safe_merge=True)
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, logits)
    with infinity.gathered(model, write=True):
        model.unmerge_adapter()
    with torch.no_grad():
        assert not torch.equal(model(**batch).logits, logits)


def test_disabled_adapters_of_experts_are_not_computed(offload: Any) -> None:
    model, batch = make("Qwen3Moe")
    wanted = loss_of(model, batch).detach()
    model = offload(adapt(model), experts="apart")
    with model.disable_adapter():
        assert torch.equal(loss_of(model, batch).detach(), wanted)
    assert not torch.equal(loss_of(model, batch).detach(), wanted)


def test_a_backward_after_a_step_that_changed_adapters_is_refused(offload: Any) -> None:
    model, batch = make("Qwen3Moe")
    model = adapt(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name and ".experts." in name)
    model = offload(model, experts="apart")
    optim = infinity.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    loss, late = loss_of(model, batch), loss_of(model, batch)
    loss.backward()
    optim.step()
    with pytest.raises(infinity.StaleWeightsError, match="adapters of experts from before they were changed"):
        late.backward()


def test_a_backward_after_a_step_that_changed_experts_is_refused(offload: Any) -> None:
    """All other weights are frozen, so that only the bank can see it."""
    model, batch = make("Qwen3Moe")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." in name)
    model = offload(model, experts="apart")
    optim = infinity.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    loss, late = loss_of(model, batch), loss_of(model, batch)
    loss.backward()
    optim.step()
    with pytest.raises(infinity.StaleWeightsError, match="weights of experts from before they were changed"):
        late.backward()


def test_adapters_of_biases_leave_experts_together() -> None:
    import peft

    model, batch = make("GptOss")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj_bias"])
    model = peft.get_peft_model(model, lora)
    experts.cut_banks(model, "apart")
    assert not any(isinstance(module, experts.ExpertBank) for module in model.modules())
    loss_of(model, batch).backward()


def test_a_broken_adapter_is_not_merged_at_all(offload: Any) -> None:
    model, batch = make("Qwen3Moe")
    model = offload(adapt(model), experts="apart")
    with torch.no_grad():
        logits = model(**batch).logits
    with infinity.gathered(model, write=True):
        adapter = next(each for name, each in model.named_parameters() if "experts.base_layer.lora_B" in name)
        kept = adapter.detach().clone()
        with torch.no_grad():
            adapter.view(len(adapter), -1, 8)[..., 7] = torch.nan  # the last expert
        wrapper = next(each for each in model.modules() if getattr(each, "parameter_name", "") == "gate_up_proj")
        with pytest.raises(ValueError, match="the merged weights are not finite"):
            wrapper.merge(safe_merge=True)
        assert not wrapper.merged
        with torch.no_grad():
            adapter.copy_(kept)
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, logits)
