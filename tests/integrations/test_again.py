"""Models under infinity run that are offloaded a second time, or are otherwise than when they were loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import infinity
from infinity.access.exact import exact_value
from infinity.coordinator import registry
from tests.integrations.conftest import Launch

LR = 1e-3


def loaded(checkpoint: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, **options)


def evaluated(model: Any) -> Any:
    model.eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(16)[None]).logits


def numel(model: Any) -> int:
    return infinity.statistics(model).trainable_numel


def test_an_evaluated_model_whose_embeddings_are_resized_has_no_states(checkpoint: Path, launch: Launch) -> None:
    plain = loaded(checkpoint)
    with launch():
        model = loaded(checkpoint)
        evaluated(model)
        for each in (plain, model):
            torch.manual_seed(3)
            each.resize_token_embeddings(150)
        assert torch.equal(evaluated(model), evaluated(plain))
        assert numel(model) == 0
        torch.optim.AdamW(model.parameters(), lr=LR)
        assert numel(model) == infinity.statistics(model).numel


def test_a_model_that_was_frozen_used_and_unfrozen_is_trained(checkpoint: Path, launch: Launch) -> None:
    ids = torch.arange(16)[None]
    losses = []
    for context in (None, launch()):
        if context is not None:
            context.__enter__()
        model = loaded(checkpoint)
        model.requires_grad_(False)
        model(input_ids=ids)
        model.requires_grad_(True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        for _ in range(3):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if context is not None:
            context.__exit__(None, None, None)
    assert losses[3:] == pytest.approx(losses[:3], rel=1e-6)


def test_after_a_plan_that_does_not_fit_the_script_can_go_on(checkpoint: Path, launch: Launch) -> None:
    with launch(memory={"device": "640KiB", "host": "1MiB"}, optimizer="host"):
        model = loaded(checkpoint)
        model.requires_grad_(False)
        model.lm_head.requires_grad_(True)
        model(input_ids=torch.arange(16)[None])
        model.requires_grad_(True)
        with pytest.raises(infinity.PlanError, match=r"memory\.host"):
            torch.optim.AdamW(model.parameters(), lr=LR)
        model.requires_grad_(False)
        model.lm_head.requires_grad_(True)
        torch.optim.AdamW(model.lm_head.parameters(), lr=LR)
        assert numel(model) == model.lm_head.weight.numel()


@pytest.mark.parametrize("touched", [False, True])
def test_a_model_with_a_new_head_keeps_its_fp32_values_as_the_master(
    touched: bool, checkpoint: Path, launch: Launch
) -> None:
    with launch() as run:
        model = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=2)
        with torch.set_grad_enabled(touched):  # an operation with a graph brings the values for good
            values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        run.computes_in("bf16")
        torch.optim.AdamW(model.parameters(), lr=LR)
        coordinator = registry.coordinator_of(model)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        for _, place in coordinator.places():
            assert torch.equal(exact_value(coordinator, place), values[place.spec.name])


def test_generate_gives_the_same_tokens_in_training_mode(checkpoint: Path, launch: Launch) -> None:
    """Checkpointing, which infinity turns on, does without the cache of a layer in training mode."""
    ids = torch.arange(8)[None]
    expected = loaded(checkpoint).train().generate(ids, max_new_tokens=8, do_sample=False)
    with launch(activations="recompute"):
        model = loaded(checkpoint).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), expected)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), expected)
        assert registry.coordinator_of(model).plan.placement.recompute
