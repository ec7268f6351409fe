"""Copies of a loaded model, and modules that a script puts around one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, Trainer, TrainingArguments

import infinity
from infinity.coordinator import registry
from tests.integrations.conftest import Launch

Script = Callable[[], list[float]]
MEMORY = {"device": "2MiB", "host": "96MiB"}


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(1))


def load(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint)


def same_as_plain(script: Script, launch: Launch) -> None:
    losses = []
    for context in (nullcontext(), launch(memory=MEMORY)):
        with context:
            torch.manual_seed(0)
            losses.append(script())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def steps(loss_of: Callable[[], torch.Tensor], *optims: torch.optim.Optimizer, count: int = 4) -> list[float]:
    losses = []
    for _ in range(count):
        loss = loss_of()
        loss.backward()
        for optim in optims:
            optim.step()
            optim.zero_grad()
        losses.append(loss.item())
    return losses


def is_trained(model: nn.Module) -> bool:
    return registry.coordinator_of(model).plan.layout.trainable_numel > 0


# -- copies -----------------------------------------------------------------------------------------------------------


def test_a_copy_is_the_reference_of_what_it_was_copied_from(
    checkpoint: Path, launch: Launch, ids: torch.Tensor
) -> None:
    """Many scripts for preferences copy the model as their reference."""

    def script() -> list[float]:
        model = load(checkpoint)
        reference = copy.deepcopy(model).eval()
        optim = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def loss() -> torch.Tensor:
            with torch.no_grad():
                expected = reference(input_ids=ids).logits
            difference: torch.Tensor = (model(input_ids=ids).logits - expected - 1).square().mean()
            return difference

        losses = steps(loss, optim)
        if registry.is_offloaded(model):
            assert [is_trained(each) for each in (model, reference)] == [True, False]
        return losses

    same_as_plain(script, launch)


@pytest.mark.parametrize("adapted", [False, True])
def test_a_copy_is_trained_by_its_own_optimizer(
    adapted: bool, checkpoint: Path, launch: Launch, ids: torch.Tensor
) -> None:
    def script() -> list[float]:
        model = load(checkpoint)
        if adapted:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
        copied = copy.deepcopy(model)
        optim = torch.optim.AdamW(copied.parameters(), lr=1e-2)
        losses = steps(lambda: copied(input_ids=ids, labels=ids).loss, optim)
        if registry.is_offloaded(copied):
            assert not registry.is_offloaded(model)
        with torch.no_grad():
            return [*losses, model(input_ids=ids, labels=ids).loss.item()]

    same_as_plain(script, launch)


# -- modules around it ------------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    def __init__(self, checkpoint: Path) -> None:
        super().__init__()
        self.backbone = AutoModel.from_pretrained(checkpoint)
        self.head = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 3))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.backbone(input_ids=ids).last_hidden_state.mean(1)
        return nn.functional.cross_entropy(self.head(hidden), labels)


LABELS = torch.tensor([0, 2])


@pytest.mark.parametrize("first", ["train", "evaluate"])
def test_a_scripts_own_module_is_trained_with_its_layers(
    first: str, checkpoint: Path, launch: Launch, ids: torch.Tensor
) -> None:
    def script() -> list[float]:
        model = Classifier(checkpoint)
        before = []
        if first == "evaluate":
            with torch.no_grad():
                before.append(model.eval()(ids, LABELS).item())
        optim = torch.optim.AdamW(model.train().parameters(), lr=1e-3)
        losses = steps(lambda: model(ids, LABELS), optim)
        if registry.is_offloaded(model):
            assert is_trained(model)
        with torch.no_grad():
            return [*before, *losses, model.eval()(ids, LABELS).item()]

    same_as_plain(script, launch)


def test_in_groups_of_their_own_the_layers_have_their_own_learning_rate(
    checkpoint: Path, launch: Launch, ids: torch.Tensor
) -> None:
    def script() -> list[float]:
        model = nn.Sequential(Classifier(checkpoint))[0]
        groups = [{"params": model.head.parameters(), "lr": 1e-2}, {"params": model.backbone.parameters()}]
        optim = torch.optim.AdamW(groups, lr=1e-4)
        assert optim.param_groups[0]["lr"] == 1e-2
        return steps(lambda: model(ids, LABELS), optim)

    same_as_plain(script, launch)


@pytest.mark.parametrize("given", ["iterator", "values", "names", "groups", "tuple"])
def test_an_optimizer_takes_parameters_in_every_form_that_torch_takes(
    given: str, checkpoint: Path, launch: Launch
) -> None:
    with launch():
        model = load(checkpoint)
        forms: dict[str, Any] = {
            "iterator": model.parameters(),
            "values": dict(model.named_parameters()).values(),
            "names": model.named_parameters(),
            "groups": [{"params": dict(model.named_parameters()).values()}],
            "tuple": tuple(model.parameters()),
        }
        optim = torch.optim.AdamW(forms[given])
        assert registry.is_offloaded(model)
        assert len(optim.param_groups[0]["params"]) == len(list(model.parameters()))


def test_layers_may_have_an_optimizer_of_their_own(checkpoint: Path, launch: Launch, ids: torch.Tensor) -> None:
    def script() -> list[float]:
        model = Classifier(checkpoint)
        optims = torch.optim.AdamW(model.backbone.parameters(), lr=1e-3), torch.optim.SGD(model.head.parameters())
        if registry.is_offloaded(model.backbone):
            assert type(optims[1]) is torch.optim.SGD
        return steps(lambda: model(ids, LABELS), *optims)

    same_as_plain(script, launch)


def test_two_loaded_models_in_one_module_are_trained_by_one_optimizer(
    checkpoint: Path, launch: Launch, ids: torch.Tensor
) -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = (AutoModel.from_pretrained(checkpoint) for _ in range(2))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            left, right = self.left(input_ids=ids), self.right(input_ids=ids.flip(1))
            return (left.last_hidden_state - right.last_hidden_state).square().mean()

    def script() -> list[float]:
        model = Towers()
        return steps(lambda: model(ids), torch.optim.AdamW(model.parameters(), lr=1e-3))

    same_as_plain(script, launch)


def test_layers_that_are_in_no_module_with_the_model_are_refused_with_the_fix(
    checkpoint: Path, launch: Launch, ids: torch.Tensor
) -> None:
    with launch():
        model, head = AutoModel.from_pretrained(checkpoint), nn.Linear(64, 3)
        with pytest.raises(infinity.ModelError, match=r"2 others, the first of shape \(3, 64\)\. Put both into one"):
            torch.optim.AdamW([*model.parameters(), *head.parameters()])


def test_a_module_whose_model_was_trained_already_is_refused_with_the_fix(
    checkpoint: Path, launch: Launch, ids: torch.Tensor
) -> None:
    with launch():
        model = Classifier(checkpoint)
        model(ids, LABELS)
        with pytest.raises(infinity.ModelError, match="before the first forward pass"):
            torch.optim.AdamW(model.parameters())


class Around(nn.Module):
    """Has no parameters of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.inner(input_ids=input_ids, labels=labels)


def test_a_trainer_of_a_module_around_a_model_trains_as_plain(
    checkpoint: Path, rows: list[dict[str, torch.Tensor]], launch: Launch, tmp_path: Path
) -> None:
    def script() -> list[float]:
        args = TrainingArguments(
            str(tmp_path), max_steps=3, logging_steps=1, report_to=[], use_cpu=True, save_strategy="no"
        )
        one = Trainer(Around(load(checkpoint)), args, train_dataset=rows)
        one.train()
        return [entry["loss"] for entry in one.state.log_history if "loss" in entry]

    same_as_plain(script, launch)
