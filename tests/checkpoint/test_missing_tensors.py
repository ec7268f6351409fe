"""Checkpoints under another head: what they lack is initialized as transformers does it, and the rest is streamed."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import infinity
from infinity.checkpoint.missing_tensors import keeping
from infinity.runtime.deferred_parameters import values_of
from tests.models import bert, gpt2, llama, t5, tied_llama

CLASSIFIES: dict[str, Any] = {"model_class": hf.AutoModelForSequenceClassification, "num_labels": 3, "pad_token_id": 0}
TAGS: dict[str, Any] = {"model_class": hf.AutoModelForTokenClassification, "num_labels": 5}
ANSWERS: dict[str, Any] = {"model_class": hf.AutoModelForQuestionAnswering}
REWARDS = CLASSIFIES | {"num_labels": 1}
POOLED = {"bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"}
RESIZED = CLASSIFIES | {"ignore_mismatched_sizes": True}


def body() -> nn.Module:
    return hf.LlamaModel(llama()[0].config)


def masked() -> nn.Module:
    return hf.BertForMaskedLM(bert()[0].config)


def tagger() -> nn.Module:
    config = bert()[0].config
    config.num_labels = 2
    return hf.BertForTokenClassification(config)


def classifier() -> nn.Module:
    config = llama()[0].config
    config.num_labels, config.pad_token_id = 2, 0
    return hf.LlamaForSequenceClassification(config)


def saved(make: Callable[[], Any], directory: Path) -> Path:
    made = make()
    model: Any = made[0] if isinstance(made, tuple) else made
    model.save_pretrained(directory)
    return directory


def plain_of(path: Path, model_class: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return model_class.from_pretrained(path, dtype=torch.float32, **options)


def deferred_of(path: Path, swap_config: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return infinity.load_pretrained(path, swap_config("nvme"), dtype=torch.float32, defer=True, **options)


@pytest.fixture
def reported(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Messages of transformers while a model is loaded, each once: with CI in the environment its logger propagates,
    too."""
    reporter = logging.getLogger("transformers")
    monkeypatch.setattr(reporter, "propagate", False)
    hf.logging.set_verbosity_warning()
    reporter.addHandler(caplog.handler)
    yield lambda: [each.getMessage() for each in caplog.records if each.name.startswith("transformers")]
    reporter.removeHandler(caplog.handler)
    hf.logging.set_verbosity_error()


@pytest.mark.parametrize(
    ("make", "options", "lacking"),
    [
        (llama, CLASSIFIES, {"score.weight"}),
        (llama, REWARDS, {"score.weight"}),
        (llama, TAGS, {"score.weight", "score.bias"}),
        (tied_llama, REWARDS, {"score.weight"}),
        (body, ANSWERS, {"qa_outputs.weight", "qa_outputs.bias"}),
        (body, {"model_class": hf.AutoModelForCausalLM}, {"lm_head.weight"}),
        (gpt2, ANSWERS, {"qa_outputs.weight", "qa_outputs.bias"}),
        (t5, ANSWERS, {"qa_outputs.weight", "qa_outputs.bias"}),
        (masked, CLASSIFIES, POOLED),
        (classifier, {"model_class": hf.AutoModelForCausalLM}, {"lm_head.weight"}),
        (classifier, RESIZED, {"score.weight"}),
        (classifier, RESIZED | TAGS, {"score.weight", "score.bias"}),
        (tagger, RESIZED, POOLED),  # draws for the pooler, too
    ],
)
def test_a_new_head_has_the_values_of_plain_transformers_and_only_the_head_is_in_memory(
    make: Callable[[], Any], options: Any, lacking: set[str], swap_config: Any, tmp_path: Path
) -> None:
    path = saved(make, tmp_path / "in")
    plain = plain_of(path, **options)
    after = torch.get_rng_state(), random.getstate()
    model = deferred_of(path, swap_config, **options)
    assert (torch.get_rng_state().tolist(), random.getstate()) == (after[0].tolist(), after[1])
    expected = dict(plain.named_parameters())
    with values_of(model) as values:
        names = [name for name, _ in model.named_parameters()]
        assert names == list(expected)
        assert {name for name in names if values.in_memory(name)} == lacking
        for name in names:
            assert torch.equal(values(name), expected[name]), name


@pytest.mark.parametrize("defer", [False, True])
def test_a_model_with_a_new_head_trains_as_torch_trains_the_plain_one(
    defer: bool, swap_config: Any, tmp_path: Path
) -> None:
    path, batch = saved(llama, tmp_path / "in"), llama()[1]["input_ids"]
    plain, config = plain_of(path, **REWARDS).train(), swap_config("nvme")
    torch.manual_seed(0)
    model = infinity.load_pretrained(path, config, dtype=torch.float32, defer=defer, **REWARDS)
    if defer:
        infinity.offload(model, config)
    losses: list[list[float]] = []
    for each, kind in ((plain, torch.optim.AdamW), (model, infinity.AdamW)):
        optim = kind(each.parameters(), lr=1e-3)
        losses.append([])
        for _ in range(3):
            loss = -nn.functional.logsigmoid(each(batch[:1]).logits - each(batch[1:]).logits).mean()
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses[-1].append(loss.item())
    infinity.close(model)
    assert losses[1][0] == losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_run_with_a_new_head_goes_on_with_the_head_that_it_trained(config: Any, tmp_path: Path) -> None:
    path, batch = saved(llama, tmp_path / "in"), llama()[1]["input_ids"]
    model = infinity.load_pretrained(path, config("swap"), dtype=torch.float32, **REWARDS)
    optim = infinity.AdamW(model.parameters(), lr=1e-3)
    model(batch).logits.sum().backward()
    optim.step()
    trained = dict(infinity.state_dict(model))["score.weight"].clone()
    infinity.close(model)
    model = infinity.load_pretrained(path, config("swap"), dtype=torch.float32, resume=True, **REWARDS)
    resumed = dict(infinity.state_dict(model))["score.weight"].clone()
    infinity.close(model)
    assert torch.equal(resumed, trained)


@pytest.mark.parametrize(
    ("make", "options", "named"),
    [
        (llama, CLASSIFIES, ["score.weight", "lm_head.weight"]),
        (classifier, RESIZED, ["score.weight"]),
        (classifier, RESIZED | TAGS, ["score.weight", "score.bias"]),
        (classifier, CLASSIFIES | {"num_labels": 2, "ignore_mismatched_sizes": True}, []),
    ],
)
def test_transformers_reports_once_what_it_initialized(
    make: Callable[[], Any], options: Any, named: list[str], swap_config: Any, tmp_path: Path, reported: Any
) -> None:
    path = saved(make, tmp_path / "in")
    deferred_of(path, swap_config, **options)
    (said,) = reported() if named else ("",)
    assert not [name for name in named if name not in said]
    assert len(reported()) == bool(named)


def test_a_body_that_is_not_there_is_no_new_head(swap_config: Any, tmp_path: Path) -> None:
    """The checkpoint says that it is this very model."""
    path = saved(classifier, tmp_path / "in")
    hf.LlamaModel.from_pretrained(path).save_pretrained(tmp_path / "body")
    (tmp_path / "body/config.json").write_text((path / "config.json").read_text())
    with pytest.raises(infinity.ModelError, match=r"no tensor for parameter 'score\.weight'; is the checkpoint comp"):
        deferred_of(tmp_path / "body", swap_config, **CLASSIFIES | {"num_labels": 2})


def test_parameters_in_memory_are_kept_while_a_model_is_loaded() -> None:
    with keeping() as kept:
        layer = nn.Linear(2, 2, bias=False)
        hidden = nn.Linear(2, 2, device="meta")
    after = nn.Linear(2, 2)
    assert kept == {(layer, "weight"): layer.weight}
    assert {hidden, after}.isdisjoint(module for module, _ in kept)
