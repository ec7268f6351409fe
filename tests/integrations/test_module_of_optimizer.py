"""Under `infinity run` a script's own module, which nobody loaded, is offloaded when an optimizer is made for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import infinity
from infinity.coordinator import registry
from infinity.errors import ModelError
from infinity.integrations import module_of_optimizer
from tests.integrations.conftest import Launch
from tests.models import llama


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_of_optimizer, "WORTH_NUMEL", 1000)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unsqueeze(1) for each in self.qkv(x).split(x.shape[-1], dim=-1))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(width), Attention(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.attention(self.norm(x)))


class GPT(nn.Module):
    """A model like nanoGPT: everything in a ModuleDict whose forward nobody calls, and a head that is the embedding."""

    def __init__(self, words: int = 64, width: int = 32) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(words, width),
            "h": nn.ModuleList([Block(width) for _ in range(2)]),
            "ln_f": nn.LayerNorm(width),
        })  # fmt: skip
        self.lm_head = nn.Linear(width, words, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        for name, parameter in self.named_parameters():
            if name.endswith("out.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.transformer.wte(ids)
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 64), ids[:, 1:].reshape(-1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        named = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [each for each in named if each.dim() >= 2], "weight_decay": 0.1},
            {"params": [each for each in named if each.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)


IDS = torch.arange(24).view(2, 12) % 64


def of_nanogpt() -> tuple[Any, torch.optim.Optimizer, Callable[[Any], torch.Tensor]]:
    model = GPT()
    return model, model.configure_optimizers(), lambda model: model(IDS)


def of_a_config() -> tuple[Any, torch.optim.Optimizer, Callable[[Any], torch.Tensor]]:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), lambda model: model(input_ids=IDS, labels=IDS).loss


def of_layers() -> tuple[Any, torch.optim.Optimizer, Callable[[Any], torch.Tensor]]:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    holder = nn.ModuleDict({"net": model, "other": nn.Linear(4, 4)})  # larger, and around it
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert holder is not None
    return model, optim, lambda model: model(torch.ones(2, 32)).square().mean()


@pytest.mark.parametrize("made", [of_nanogpt, of_a_config, of_layers])
def test_it_is_offloaded_and_trains_as_plain(made: Any, launch: Launch, caplog: Any) -> None:
    def script() -> list[float]:
        torch.manual_seed(0)
        model, optim, loss_of = made()
        losses = []
        for _ in range(4):
            loss = loss_of(model)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optim.step()
            optim.zero_grad(set_to_none=True)
            losses.append(loss.item())
        offloaded.append(registry.is_offloaded(model))
        return losses

    offloaded: list[bool] = []
    plain = script()
    with launch():
        under = script()
    assert offloaded == [False, True]
    assert under == pytest.approx(plain, rel=1e-6)
    assert "NOTHING WAS OFFLOADED" not in caplog.text


class Wide(nn.Module):
    """Its second layer is larger than what memory.device has for weights."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large, self.out = nn.Linear(32, 256), nn.Linear(256, 512), nn.Linear(512, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.large(self.small(x)).relu()).square().mean()


@pytest.mark.cpu_only("about memory.device to the byte")
@pytest.mark.parametrize(
    "given",
    [
        lambda model: model.parameters(),
        lambda model: list(model.named_parameters()),
        lambda model: [{"params": list(model.parameters())[:2]}, {"params": list(model.parameters())[2:], "lr": 1e-3}],
        lambda model: [{"params": each} for each in model.parameters()],
    ],
    ids=["parameters", "named", "two groups", "a group for each"],
)
def test_an_optimizer_takes_the_tiles_of_a_layer_that_was_tiled_for_it(given: Any, launch: Launch) -> None:
    def script() -> list[float]:
        torch.manual_seed(0)
        model = Wide()
        optim = torch.optim.AdamW(given(model), lr=1e-2)
        tiled.append(hasattr(model.large, "tiles"))
        losses = []
        for _ in range(4):
            loss = model(torch.ones(2, 32))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optim.step()
            optim.zero_grad()
            losses.append(loss.item())
        return losses

    tiled: list[bool] = []
    plain = script()
    with launch(memory={"device": "512KiB", "host": "96MiB"}):
        under = script()
    assert tiled == [False, True]
    assert under == pytest.approx(plain, rel=1e-5)


@pytest.mark.cpu_only("about memory.device to the byte")
def test_a_list_with_the_weight_of_a_layer_that_was_tiled_says_so_when_it_is_asked_for_gradients(
    launch: Launch,
) -> None:
    with launch(memory={"device": "512KiB", "host": "96MiB"}):
        model = Wide()
        before = list(model.parameters())
        torch.optim.AdamW(before)
        model(torch.ones(2, 32)).backward()
        with pytest.raises(ModelError, match="the weight of a 256 to 512 linear layer.*Take model.parameters"):
            torch.nn.utils.clip_grad_norm_(before, 1.0)
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 0


def test_a_fabric_that_computes_in_bf16_has_masters_in_fp32(launch: Launch) -> None:
    def script() -> list[float]:
        torch.manual_seed(0)
        fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
        model: Any = fabric.setup(GPT())
        optim = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
        losses = []
        for _ in range(4):
            loss = model(IDS)
            fabric.backward(loss)
            fabric.clip_gradients(model, optim, max_norm=1.0)
            optim.step()
            optim.zero_grad()
            losses.append(loss.item())
        dtypes.append(next(model.parameters()).dtype)
        return losses

    dtypes: list[torch.dtype] = []
    plain = script()
    with launch():
        under = script()
    assert dtypes == [torch.float32, torch.bfloat16]
    assert under == pytest.approx(plain, rel=2e-2)


def test_an_optimizer_for_each_parameter_says_to_make_one_for_all(launch: Launch) -> None:
    with launch():
        model = GPT()
        torch.optim.AdamW([model.lm_head.weight])  # a part that is worth offloading
        with pytest.raises(ModelError, match="has an optimizer. Make .* one optimizer for all of its parameters"):
            torch.optim.AdamW([model.transformer.ln_f.weight])


def test_what_is_small_or_in_no_module_stays_and_the_run_says_that_nothing_was_offloaded(
    launch: Launch, caplog: Any
) -> None:
    with launch():
        torch.optim.AdamW(nn.Linear(4, 4).parameters())
        torch.optim.AdamW([nn.Parameter(torch.ones(64, 64))])
        one, other = nn.Linear(64, 64), nn.Linear(64, 64)
        torch.optim.AdamW([*one.parameters(), *other.parameters()])
        assert not registry.is_offloaded(one)
    assert caplog.text.count("NOTHING WAS OFFLOADED, the script ran as without infinity") == 1


@pytest.mark.parametrize("made", [torch.optim.RMSprop, type("Mine", (torch.optim.AdamW,), {})])
def test_an_optimizer_that_stays_in_memory_is_named_when_it_is_made(made: Any, launch: Launch, caplog: Any) -> None:
    with launch():
        module, named = nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64))
        made(module.parameters())
        made(nn.Linear(4, 4).parameters())  # too small to be worth a line
        assert caplog.text.count("and the Linear for which it was made are not offloaded") == 1
        assert f"{made.__module__}.{made.__name__} and the Linear" in caplog.text
        torch.optim.Adagrad(named.parameters())  # one that the line names
        assert registry.is_offloaded(named)
    assert "NOTHING WAS OFFLOADED" not in caplog.text


def test_a_script_that_offloads_its_module_itself_is_not_told_that_nothing_was(launch: Launch, caplog: Any) -> None:
    with launch():
        module = infinity.offload(nn.Sequential(nn.Linear(8, 8)), {"weights": "host", "optimizer": "host"})
        infinity.close(module)
    assert "NOTHING WAS OFFLOADED" not in caplog.text


@pytest.mark.parametrize(
    "error", [ValueError("its own"), SystemExit(3), infinity.PlanError("too small"), KeyboardInterrupt()], ids=repr
)
def test_the_error_of_a_script_that_fails_stands_alone(error: BaseException, launch: Launch, caplog: Any) -> None:
    with pytest.raises(type(error)) as ended, launch():
        raise error
    assert ended.value is error
    assert "NOTHING WAS OFFLOADED" not in caplog.text


def test_a_model_in_a_module_gets_all_of_the_memory(checkpoint: Path, launch: Launch) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm: Any = LlamaForCausalLM.from_pretrained(checkpoint)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.lm(input_ids=ids, labels=ids).loss
            return loss

    with launch(memory={"device": "2MiB", "host": "96MiB"}) as run:
        model = Around()
        torch.optim.AdamW(model.parameters(), lr=1e-3)
        plan = registry.coordinator_of(model).plan
        assert plan.host_budget_bytes == 96 << 20 if hasattr(plan, "host_budget_bytes") else run._claims(model) == []
        model(llama()[1]["input_ids"]).backward()
