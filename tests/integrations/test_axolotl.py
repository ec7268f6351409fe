"""The plugin for axolotl, with a fake of axolotl 0.19's plugins: it is not installed here."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import infinity
from infinity.coordinator import registry
from infinity.integrations.patches import active
from tests.integrations.test_plug_points import end

Rows = list[dict[str, torch.Tensor]]


class BasePlugin:
    """Fake of the class in axolotl.integrations.base: every method does nothing."""

    def __init__(self) -> None:
        """Take the arguments that axolotl's class takes."""

    def register(self, cfg: Any) -> None: ...
    def get_input_args(self) -> str | None: ...
    def pre_model_load(self, cfg: Any) -> None: ...
    def post_model_load(self, cfg: Any, model: Any) -> None: ...
    def get_trainer_cls(self, cfg: Any) -> Any: ...
    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        return []

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None: ...
    def post_train(self, cfg: Any, model: Any) -> None: ...
    def post_train_unload(self, cfg: Any) -> None: ...


class AxolotlTrainer(Trainer):
    """Makes its optimizer itself where it has none, as axolotl's does."""

    def create_optimizer(self, model: Any = None) -> Any:
        if not self.optimizer:
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer = kind(self.model.parameters(), **options)
        return self.optimizer


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The plugin, made from its name by the steps of axolotl's load_plugin."""
    base = ModuleType("axolotl.integrations.base")
    base.BasePlugin = BasePlugin  # type: ignore[attr-defined]
    for name in ("axolotl", "axolotl.integrations"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.delitem(sys.modules, "infinity.integrations.axolotl", raising=False)
    module, _, name = "infinity.integrations.axolotl.InfinityPlugin".rpartition(".")
    yield getattr(importlib.import_module(module), name)()
    end()
    sys.modules.pop(module, None)


@pytest.fixture
def cfg(tmp_path: Path) -> dict[str, Any]:
    swap = {
        "weights": "nvme",
        "optimizer": "nvme",
        "memory": {"device": "640KiB", "host": "96MiB"},
        "nvme": {"paths": [str(tmp_path / "swap")]},
        "commit_every": 1,
    }
    return {"infinity": swap}


def train(plugin: Any, cfg: dict[str, Any], checkpoint: Path, rows: Rows, output: Path, **options: Any) -> list[float]:
    """Train by the steps of axolotl's load_cfg, ModelLoader, TrainerBuilderBase and train."""
    if plugin is not None:
        plugin.register(cfg)
        assert json.dumps(cfg["model_kwargs"]), "the file stays plain data"
    model = AutoModelForCausalLM.from_pretrained(checkpoint, **(cfg.get("model_kwargs") or {}))
    arguments: dict[str, Any] = {
        "max_steps": 4,
        "logging_steps": 1,
        "save_steps": 2,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "learning_rate": 1e-3,
        "optim": "adamw_torch_fused",
    }
    callbacks = [] if plugin is None else plugin.add_callbacks_pre_trainer(cfg, model)
    args = TrainingArguments(str(output), **(arguments | options))
    trainer = AxolotlTrainer(model, args, train_dataset=rows, callbacks=callbacks)
    if plugin is not None:
        plugin.post_trainer_create(cfg, trainer)
    trainer.train(resume_from_checkpoint=cfg.get("resume_from_checkpoint"))
    assert registry.is_offloaded(model) == (plugin is not None)
    trainer.save_model()
    if plugin is not None:
        assert active() == []
        plugin.post_train_unload(cfg)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_losses_are_those_without_the_plugin(
    plugin: Any, cfg: dict[str, Any], checkpoint: Path, rows: Rows, tmp_path: Path
) -> None:
    plain = train(None, {}, checkpoint, rows, tmp_path / "plain")
    ours = train(plugin, dict(cfg), checkpoint, rows, tmp_path / "ours")
    assert len(plain) == 4
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)
    folder = tmp_path / "ours" / "checkpoint-2"
    resumed = train(plugin, cfg | {"resume_from_checkpoint": str(folder)}, checkpoint, rows, tmp_path / "ours")
    assert resumed == ours


def test_another_optimizer_is_refused(
    plugin: Any, cfg: dict[str, Any], checkpoint: Path, rows: Rows, tmp_path: Path
) -> None:
    with pytest.raises(infinity.ConfigError, match=r"optimizer: adafactor.*use adamw_torch"):
        train(plugin, cfg | {"optimizer": "adafactor"}, checkpoint, rows, tmp_path, optim="adafactor")


def test_its_arguments_are_found_by_name(plugin: Any) -> None:
    module, name = plugin.get_input_args().rsplit(".", 1)
    arguments = getattr(sys.modules[module], name)
    assert arguments(infinity="swap.yaml").infinity == "swap.yaml"


@pytest.mark.parametrize(
    "option", ["deepspeed", "fsdp", "fsdp_config", "load_in_4bit", "load_in_8bit", "auto_resume_from_checkpoints"]
)
def test_options_that_cannot_work_are_named(option: str, plugin: Any, cfg: dict[str, Any]) -> None:
    with pytest.raises(infinity.ConfigError, match=f"`{option}`.*leave it out"):
        plugin.register(cfg | {option: True})


def test_a_file_that_names_no_folder_to_go_on_from_is_told_the_newest(
    plugin: Any, cfg: dict[str, Any], tmp_path: Path
) -> None:
    """Axolotl refuses `true` itself, after it has asked its plugins."""
    asked = cfg | {"resume_from_checkpoint": True, "output_dir": str(tmp_path)}
    with pytest.raises(infinity.ConfigError, match=f"resume_from_checkpoint: {tmp_path}/checkpoint-…"):
        plugin.register(dict(asked))
    for step in (2, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
    with pytest.raises(infinity.ConfigError, match=f"write `resume_from_checkpoint: {tmp_path}/checkpoint-10`"):
        plugin.register(dict(asked))


def test_a_file_without_a_swap_config_is_refused(plugin: Any) -> None:
    with pytest.raises(infinity.ConfigError, match=r"infinity: swap\.yaml"):
        plugin.register({})
