"""Models that a script uses before anything says that it trains them: they have no states until it does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import infinity
from infinity.coordinator import registry
from infinity.runtime.deferred_parameters import is_deferred
from tests.integrations.conftest import Launch

Rows = list[dict[str, torch.Tensor]]
WITHOUT_GRAPH: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(1))


def load(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint)


def evaluate(model: Any, ids: torch.Tensor, without_graph: str = "no_grad") -> float:
    with WITHOUT_GRAPH[without_graph]():
        loss: float = model.eval()(input_ids=ids, labels=ids).loss.item()
    return loss


def train(model: Any, ids: torch.Tensor, steps: int = 3) -> list[float]:
    """Losses, with one evaluation at the end."""
    optim = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    losses = []
    model.train()
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
    return [*losses, evaluate(model, ids)]


def trained_numel(model: Any) -> int:
    return registry.coordinator_of(model).plan.layout.trainable_numel


def same_as_plain(script: Callable[[], list[float]], launch: Launch) -> None:
    losses = []
    for context in (nullcontext(), launch()):
        with context:
            torch.manual_seed(0)
            losses.append(script())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_a_model_that_is_only_evaluated_has_no_states(
    checkpoint: Path, launch: Launch, ids: torch.Tensor, tmp_path: Path
) -> None:
    plain = evaluate(load(checkpoint), ids)
    with launch():
        model = load(checkpoint)
        assert evaluate(model, ids) == plain
        assert evaluate(model, ids) == plain
        assert trained_numel(model) == 0
        assert registry.coordinator_of(model).resources.generations is None
        assert all(parameter.requires_grad for parameter in model.parameters())
    assert not list((tmp_path / "swap").rglob("*.infinity*"))


@pytest.mark.parametrize("without_graph", WITHOUT_GRAPH)
def test_evaluated_first_and_then_trained_gives_the_plain_losses(
    without_graph: str, checkpoint: Path, launch: Launch, ids: torch.Tensor
) -> None:
    def script() -> list[float]:
        model = load(checkpoint)
        before = evaluate(model, ids, without_graph)
        losses = train(model, ids)
        assert not registry.is_offloaded(model) or trained_numel(model) > 0
        return [before, *losses]

    same_as_plain(script, launch)


def test_a_graph_is_recorded_after_an_evaluation_without_an_optimizer(
    checkpoint: Path, launch: Launch, ids: torch.Tensor
) -> None:
    with launch():
        model = load(checkpoint)
        before = evaluate(model, ids)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        assert loss.item() == before
        assert trained_numel(model) > 0
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    plain = load(checkpoint)
    plain(input_ids=ids, labels=ids).loss.backward()
    assert norm.item() == pytest.approx(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9).item(), rel=1e-6)


def test_weights_that_were_loaded_after_an_evaluation_are_trained(
    checkpoint: Path, launch: Launch, ids: torch.Tensor
) -> None:
    def script() -> list[float]:
        model = load(checkpoint)
        before = evaluate(model, ids)
        state = model.state_dict()
        state["model.layers.1.mlp.up_proj.weight"] = state["model.layers.1.mlp.up_proj.weight"] * 3
        model.load_state_dict(state)
        return [before, evaluate(model, ids), *train(model, ids)]

    same_as_plain(script, launch)


def test_weights_that_were_in_memory_are_there_again(checkpoint: Path, launch: Launch, ids: torch.Tensor) -> None:
    """The embeddings were resized, and the other weights were never read."""

    def script() -> list[float]:
        model = load(checkpoint)
        model.resize_token_embeddings(model.config.vocab_size + 8, mean_resizing=False)
        before = evaluate(model, ids)
        assert evaluate(model, ids + 8) > 0
        return [before, *train(model, ids + 8)]

    same_as_plain(script, launch)


def test_adapters_are_attached_after_an_evaluation(checkpoint: Path, launch: Launch, ids: torch.Tensor) -> None:
    from peft import LoraConfig, get_peft_model

    def script() -> list[float]:
        model = load(checkpoint)
        before = evaluate(model, ids)
        adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False))
        return [before, evaluate(adapted, ids), *train(adapted, ids)]

    same_as_plain(script, launch)


def trainer(model: Any, rows: Rows, output: Path) -> Trainer:
    options: dict[str, Any] = {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-3}
    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "use_cpu": True}
    args = TrainingArguments(str(output), per_device_train_batch_size=2, **options, **quiet)
    return Trainer(model, args, train_dataset=rows, eval_dataset=rows[:4])


def losses_of(trainer: Trainer) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history for name in ("loss", "eval_loss") if name in entry]


@pytest.mark.covering(strength=1, most=1)
@pytest.mark.parametrize("used", ["by hand", "by the Trainer"])
def test_a_trainer_trains_what_was_evaluated_before_and_resumes_it(
    used: str, checkpoint: Path, launch: Launch, rows: Rows, ids: torch.Tensor, tmp_path: Path
) -> None:
    def begun(folder: Path, resume: Path | None = None) -> list[float]:
        model = load(checkpoint)
        if used == "by hand":
            evaluate(model, ids)
        one = trainer(model, rows, folder)
        if used == "by the Trainer" and resume is None:
            one.evaluate()
            assert not registry.is_offloaded(model) or trained_numel(model) > 0
        one.train(resume_from_checkpoint=None if resume is None else str(resume))
        return losses_of(one)[-2:]

    plain = begun(tmp_path / "plain")
    with launch():
        assert begun(tmp_path / "out") == pytest.approx(plain, rel=1e-6)
    with launch():
        assert begun(tmp_path / "out", tmp_path / "out" / "checkpoint-2") == pytest.approx(plain, rel=1e-6)


def test_a_plan_that_does_not_fit_leaves_the_model_as_it_was_loaded(
    checkpoint: Path, launch: Launch, ids: torch.Tensor
) -> None:
    with launch(memory={"device": "640KiB", "host": "500KiB"}):
        model = load(checkpoint)
        plain = evaluate(model, ids)
        with pytest.raises(infinity.PlanError):
            torch.optim.AdamW(model.parameters())
        assert is_deferred(model)
        assert evaluate(model, ids) == plain
