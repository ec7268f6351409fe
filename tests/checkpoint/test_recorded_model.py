"""A generation whose manifest says of its model what cannot be is not exported, and the error says what; what
transformers does not write or JSON does not have is no obstacle."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import infinity
from infinity.errors import ResumeError
from infinity.io import document
from infinity.io.directory import generations_in
from tests.checkpoint.runs import STEPS, Config, begin, stored, tensors_in
from tests.models import llama

Value = dict[str, Any]


def rewrite(run: Path, change: Callable[[Value], None]) -> None:
    """Change all manifests, each with a checksum that is right."""
    for path in generations_in(run).values():
        value = document.read(path, "generation", 2)
        change(value)
        path.write_bytes(b"".join(document.write("generation", value, 2)))


def config_with(**changes: Any) -> Callable[[Value], None]:
    def change(value: Value) -> None:
        model = value["body"]["model"]
        model["config"] = json.dumps(json.loads(model["config"]) | changes)

    return change


def model_with(**changes: Any) -> Callable[[Value], None]:
    return lambda value: value["body"]["model"].update(changes)


WRONG: dict[str, Callable[[Value], None]] = {
    "no JSON": model_with(config="{"),
    "deep": model_with(config="[" * 100_000),
    "a list": model_with(config="[1]"),
    "hidden_size a string": config_with(hidden_size="64"),
    "hidden_size a list": config_with(hidden_size=[64]),
    "hidden_size huge": config_with(hidden_size=1 << 62),
    "layers without end": config_with(num_hidden_layers=1 << 40, layer_types=None),
    "too many layers": config_with(num_hidden_layers=60_000, layer_types=None),
    "labels without end": config_with(num_labels=1 << 30),
    "heads 0": config_with(num_attention_heads=0, head_dim=None),
    "model_type a list": config_with(model_type=["llama"]),
    "rope a number": config_with(rope_parameters=7),
    "dtype unknown": config_with(dtype="float7"),
    "generation a list": model_with(generation_config="[]"),
    "generation deep": model_with(generation_config="[" * 100_000),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", WRONG)
def test_a_config_of_which_nothing_can_be_built_is_named(name: str, run: Path, tmp_path: Path) -> None:
    rewrite(run, WRONG[name])
    with pytest.raises(ResumeError, match="infinity has a config from which transformers cannot build a Llama"):
        infinity.export_checkpoint(run, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("name", ["Trainer", "nobody", "__loader__", "x y", "pipeline"])
def test_a_class_that_is_no_model_of_transformers_is_not_called(
    name: str, run: Path, copy: Path, tmp_path: Path
) -> None:
    rewrite(run, model_with(class_name=name))
    infinity.export_checkpoint(run, tmp_path / "second")
    first, second = tensors_in(copy), tensors_in(tmp_path / "second")
    assert all(torch.equal(first[key], second[key]) for key in first.keys() | second.keys())


def test_a_config_of_another_model_is_said(run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rewrite(run, config_with(vocab_size=200))
    with caplog.at_level(logging.WARNING, "infinity"):
        infinity.export_checkpoint(run, tmp_path / "copy")
    assert "in its config 'model.embed_tokens.weight' has the shape (200, 64), in the run (128, 64)" in caplog.text


FORMS = {
    "master": lambda groups: groups[0].update(master="none"),
    "moments": lambda groups: groups[0].update(moments="bf16"),
    "frozen": lambda groups: groups[0].update(trainable=False),
    "dtype": lambda groups: groups[0].update(dtype="float32"),
}


@pytest.mark.parametrize("form", FORMS)
def test_states_are_not_read_in_another_form_than_they_were_written(form: str, run: Path, tmp_path: Path) -> None:
    rewrite(run, lambda value: FORMS[form](value["body"]["model"]["groups"]))
    with pytest.raises(ResumeError, match="says that|trained|no room|no such state|with a split16 master"):
        infinity.export_checkpoint(run, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_manifest_of_a_store_that_lies_otherwise_is_refused(run: Path, tmp_path: Path) -> None:
    rewrite(run, lambda value: value["store"].update(stripe_bytes=4096))
    with pytest.raises(ResumeError, match="describes the store's size or stripes differently than store.infinity"):
        infinity.export_checkpoint(run, tmp_path / "copy")


def test_what_json_has_no_form_of_is_exported_in_words(config: Config, tmp_path: Path) -> None:
    model, batch = llama(layers=1)
    _, optim = begin(model, batch, config("swap"), steps=1)
    optim.param_groups[0] |= {"lr": torch.tensor(0.5), "kind": torch.float16, "note": b"\xff", "mine": float("nan")}
    optim.param_groups[0]["nested"] = {"rates": (np.float32(2), [float("inf")])}
    infinity.commit(model)
    infinity.close(model)
    infinity.export_checkpoint(tmp_path / "swap", tmp_path / "copy")
    index = json.loads(
        (tmp_path / "copy" / "optimizer" / "optimizer.safetensors.index.json").read_text(), parse_constant=pytest.fail
    )
    group = index["metadata"]["optimizers"][0]["param_groups"][0]
    assert (group["lr"], group["kind"], group["note"], group["mine"]) == (0.5, "torch.float16", "b'\\xff'", "nan")
    assert group["nested"] == {"rates": [2.0, ["inf"]]}


@pytest.mark.parametrize(("key", "value"), [("lr", float("nan")), ("betas", (0.9,)), (7, 7)])
def test_a_hyperparameter_that_could_not_be_read_again_is_named_when_it_is_written(
    key: Any, value: Any, config: Config, tmp_path: Path
) -> None:
    model, batch = llama(layers=1)
    _, optim = begin(model, batch, config("swap"), steps=1)
    before = dict(optim.param_groups[0])
    optim.param_groups[0][key] = value
    with pytest.raises(infinity.ConfigError, match=f"AdamW cannot be kept in a generation: param_groups.*{key}"):
        infinity.commit(model)
    optim.param_groups[0].clear()
    optim.param_groups[0].update(before)
    infinity.close(model)


def test_a_generation_config_that_transformers_does_not_write_is_kept(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, batch = llama(layers=1)
    model.generation_config.temperature = 0.6  # and do_sample is not set
    begin(model, batch, config("swap"), steps=1)
    with caplog.at_level(logging.WARNING, "infinity"):
        infinity.save_pretrained(model, tmp_path / "saved")
        infinity.close(model)
        infinity.export_checkpoint(tmp_path / "swap", tmp_path / "copy")
    assert caplog.text.count("generation_config.json is written unchanged") == 2
    for made in ("saved", "copy"):
        assert json.loads((tmp_path / made / "generation_config.json").read_text())["temperature"] == 0.6
        assert hf.AutoModelForCausalLM.from_pretrained(tmp_path / made).generation_config.temperature == 0.6


def test_an_absurd_learning_rate_is_named_when_a_run_is_resumed(config: Config, tmp_path: Path) -> None:
    model, batch = llama(layers=1)
    run = stored(tmp_path, batch, model, config("swap"))
    rewrite(run, lambda value: value["body"]["optimizers"][0]["param_groups"][0].update(lr="fast"))
    with pytest.raises(ResumeError, match="lr is a str, not a finite number"):
        infinity.resume(llama(layers=1)[0], config("swap"))
    rewrite(run, lambda value: value["body"]["optimizers"][0]["param_groups"][0].update(lr=-1.0))
    again = infinity.resume(llama(layers=1)[0], config("swap"))
    optim = infinity.AdamW(again.parameters())
    with pytest.raises(ResumeError, match=r"the run cannot be resumed: .*lr = -1.0 is out of range"):
        infinity.track(torch.optim.lr_scheduler.StepLR(optim, 100), model=again)
    infinity.close(again)
    assert list(generations_in(run)) == [STEPS]
