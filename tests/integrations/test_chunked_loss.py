"""A language model of transformers with its loss computed without whole logits."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import infinity
from infinity import use_chunked_loss
from infinity.coordinator import registry
from tests import models
from tests.integrations.test_architectures import LANGUAGE, SMALL

IDS = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(1))
LABELS = IDS.clone().index_fill_(1, torch.arange(5), -100)
NO_DROPOUT = {"attention_dropout": 0.0, "dropout": 0.0, "hidden_dropout": 0.0}


def made(name: str) -> Any:
    torch.manual_seed(0)
    given = {key: value for key, value in (SMALL | LANGUAGE[name]).items() if value is not None}
    config = getattr(hf, f"{name}Config")(**given)
    for key, value in NO_DROPOUT.items():
        if hasattr(config, key):
            setattr(config, key, value)
    model = hf.AutoModelForCausalLM.from_config(config).train()
    with torch.no_grad():
        for parameter in model.parameters():  # so that caps and scales matter
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model


def stepped(model: Any, **options: Any) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(input_ids=IDS, labels=LABELS, **options).loss
    loss.backward()
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return loss.item(), found


def require_close(found: tuple[float, dict[str, Any]], wanted: tuple[float, dict[str, Any]]) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in found[1].items():
        assert (gradient - wanted[1][name]).norm() <= 5e-6 * wanted[1][name].norm() + 1e-7, name


HEADS = ["Qwen2", "Qwen3Moe", "Gemma2", "Phi", "OPT", "Bloom", "GPTJ", "Cohere", "Granite", "Mamba"]
"""Heads with a bias, a scale or a cap, tied or not. `make test` tries these, and the long forms try all."""


@pytest.mark.cpu_only("nothing is offloaded")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in HEADS else pytest.mark.long) for name in LANGUAGE]
)
def test_every_causal_model_of_the_list_can_do_without_its_logits(name: str) -> None:
    model = made(name)
    wanted = stepped(model), stepped(model, num_items_in_batch=17)
    assert use_chunked_loss(model) == ""
    require_close(stepped(model), wanted[0])
    require_close(stepped(model, num_items_in_batch=17), wanted[1])
    with torch.no_grad():
        assert model(input_ids=IDS).logits.isfinite().all()


@pytest.mark.cpu_only("nothing is offloaded")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (models.t5, "its loss is|does not compute|could not be tried|`"),
        (models.bert, "its loss is ForMaskedLMLoss, not the loss of a causal model"),
        (lambda: (nn.Linear(3, 3), {}), "Linear contains no language model of transformers"),
    ],
)
def test_other_models_keep_their_loss_and_the_reason_is_named(make: Any, why: str) -> None:
    model, batch = make()
    before = dict(model.__dict__)
    found = use_chunked_loss(model)
    assert re.search(why, found), found
    assert model.__dict__.keys() == before.keys()
    if batch:
        assert model(**batch).loss.isfinite()


def test_a_model_that_uses_its_logits_otherwise_keeps_its_loss() -> None:
    class Softer(hf.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            out = super().forward(input_ids, labels=labels, **kwargs)
            out.loss = out.loss + 0.1 * out.logits.square().mean()
            return out

    model = Softer(models.llama()[0].config).train()
    assert "of logits, which infinity.use_chunked_loss does not compute completely" in use_chunked_loss(model)
    assert model(input_ids=IDS, labels=IDS).loss.isfinite()
    use_chunked_loss(model, False)
    assert model(input_ids=IDS, labels=IDS).logits.square().mean().isfinite()


def test_reading_the_logits_is_an_error_that_says_why() -> None:
    model = models.llama()[0]
    assert use_chunked_loss(model) == ""
    out = model(input_ids=IDS, labels=LABELS)
    assert out.logits.shape == (2, 24, models.VOCABULARY)
    assert "never computed" in repr(out.logits)
    with pytest.raises(infinity.ModelError, match=r"`argmax` of logits.*infinity\.use_chunked_loss"):
        out.logits.argmax(-1)


def half_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss / 2


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_an_offloaded_model_trains_the_same(offload: Any, tmp_path: Path, recomputes: bool, tied: bool) -> None:
    losses, norms = [], []
    for chunked in (False, True):
        torch.manual_seed(0)
        model = models.llama(4, tie_word_embeddings=tied)[0].train()
        if recomputes:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        paths = {"paths": [str(tmp_path / f"swap{chunked}")]}
        model = offload(model, memory={"device": "1280KiB", "host": "64MiB"}, nvme=paths)
        if chunked:
            assert use_chunked_loss(model) == ""
        optim = infinity.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
        for _ in range(2):
            found = infinity.backward(model, partial(half_loss, model), [IDS, IDS + 1])
            optim.step()
            optim.zero_grad()
            losses.append([loss.item() for loss in found])
            norms.append(optim.last_grad_norm)
    torch.testing.assert_close(torch.tensor(losses[2:]), torch.tensor(losses[:2]), rtol=2e-6, atol=1e-6)
    # Adam's first step is ±lr even where a gradient is mere rounding; the norm of the second step shows the difference.
    torch.testing.assert_close(torch.tensor(norms[2:]), torch.tensor(norms[:2]), rtol=2e-5, atol=0)


def test_the_head_of_an_offloaded_model_is_announced_before_its_backward(offload: Any) -> None:
    """Its window for gradients that spill is ready then."""
    model = offload(models.llama()[0].train())
    assert use_chunked_loss(model) == ""
    held: list[tuple[int, ...]] = []
    coordinator = registry.coordinator_of(model)
    hold = type(coordinator).begin_units_backward

    def seen(self: Any, indices: Any) -> Any:
        held.append(tuple(indices))
        return hold(self, indices)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(coordinator), "begin_units_backward", seen)
        model(input_ids=IDS, labels=LABELS).loss.backward()
    places = {place.spec.name: place.unit.index for _, place in coordinator.places()}
    assert places["lm_head.weight"] in held[0]


def test_adapters_around_a_model_and_a_frozen_head(offload: Any) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base = models.llama()[0]
    plain = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")).train()
    wanted = stepped(plain)
    assert use_chunked_loss(plain) == ""
    require_close(stepped(plain), wanted)


def test_the_ordinary_loss_can_be_had_again() -> None:
    model = models.llama()[0]
    assert use_chunked_loss(model) == use_chunked_loss(model) == ""
    before = model(input_ids=IDS, labels=LABELS)
    assert use_chunked_loss(model, False) == use_chunked_loss(model, False) == ""
    after = model(input_ids=IDS, labels=LABELS)
    assert after.loss.item() == pytest.approx(before.loss.item(), rel=1e-6)
    assert after.logits.isfinite().all()
