"""The plugin for axolotl, with a fake of axolotl 0.19's plugins: it is not installed here."""

from __future__ import annotations

import importlib
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

Rows = list[dict[str, torch.Tensor]]


class BasePlugin:
    """Of axolotl.integrations.base: every method does nothing."""

    def __init__(self) -> None:
        """As theirs."""

    def register(self, cfg: Any) -> None: ...
    def get_input_args(self) -> str | None: ...
    def pre_model_load(self, cfg: Any) -> None: ...
    def post_model_load(self, cfg: Any, model: Any) -> None: ...
    def get_trainer_cls(self, cfg: Any) -> Any: ...
    def post_trainer_create(self, cfg: Any, trainer: Any) -> None: ...
    def post_train(self, cfg: Any, model: Any) -> None: ...
    def post_train_unload(self, cfg: Any) -> None: ...


class AxolotlTrainer(Trainer):
    """Makes its optimizer and its checkpoints itself, by Trainer's methods, as axolotl's does."""

    def create_optimizer(self, model: Any = None) -> Any:
        kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        self.optimizer = kind(self.get_decay_parameter_names(self.model) and self.model.parameters(), **options)
        return self.optimizer

    def _save_checkpoint(self, model: Any, trial: Any, **kwargs: Any) -> Any:
        return super()._save_checkpoint(model, trial, **kwargs)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """As axolotl's load_plugin makes it from its name."""
    base = ModuleType("axolotl.integrations.base")
    base.BasePlugin = BasePlugin  # type: ignore[attr-defined]
    for name in ("axolotl", "axolotl.integrations"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.delitem(sys.modules, "infinity.integrations.axolotl", raising=False)
    module, _, name = "infinity.integrations.axolotl.InfinityPlugin".rpartition(".")
    made = getattr(importlib.import_module(module), name)()
    yield made
    made._failed()
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
    """As axolotl's train() goes."""
    if plugin is not None:
        plugin.pre_model_load(cfg)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    kind = plugin.get_trainer_cls(cfg) if plugin is not None else None
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
    trainer = (kind or AxolotlTrainer)(model, TrainingArguments(str(output), **arguments), train_dataset=rows)
    trainer.train(**options)
    assert registry.is_offloaded(model) == (plugin is not None)
    if plugin is not None:
        plugin.post_train(cfg, model)
        plugin.post_train_unload(cfg)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_run_that_fails_keeps_its_generations(
    plugin: Any, cfg: dict[str, Any], checkpoint: Path, rows: Rows, tmp_path: Path
) -> None:
    plugin.pre_model_load(cfg)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    optimizer = torch.optim.AdamW(model.parameters())
    for row in rows[:3]:
        model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    plugin._failed()
    assert list((tmp_path / "swap").glob("generation-*.infinity"))


def test_losses_are_those_without_the_plugin(
    plugin: Any, cfg: dict[str, Any], checkpoint: Path, rows: Rows, tmp_path: Path
) -> None:
    plain = train(None, cfg, checkpoint, rows, tmp_path / "plain")
    ours = train(plugin, cfg, checkpoint, rows, tmp_path / "ours")
    assert len(plain) == 4
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)
    assert (tmp_path / "ours" / "checkpoint-4" / "infinity.json").exists()
    resumed = train(
        plugin, cfg, checkpoint, rows, tmp_path / "ours", resume_from_checkpoint=str(tmp_path / "ours/checkpoint-2")
    )
    assert resumed == ours


def test_afterwards_transformers_is_as_it_was(
    plugin: Any, cfg: dict[str, Any], checkpoint: Path, rows: Rows, tmp_path: Path
) -> None:
    before = torch.optim.AdamW.__init__
    plugin.pre_model_load(cfg)
    assert torch.optim.AdamW.__init__ is not before
    plugin.post_train_unload(cfg)
    assert torch.optim.AdamW.__init__ is before


def test_its_arguments_are_found_by_name(plugin: Any) -> None:
    module, name = plugin.get_input_args().rsplit(".", 1)
    arguments = getattr(sys.modules[module], name)
    assert arguments(infinity="swap.yaml").infinity == "swap.yaml"


@pytest.mark.parametrize("option", ["deepspeed", "fsdp", "fsdp_config", "load_in_4bit", "load_in_8bit"])
def test_options_that_cannot_work_are_named(option: str, plugin: Any, cfg: dict[str, Any]) -> None:
    with pytest.raises(infinity.ConfigError, match=f"`{option}`.*leave it out"):
        plugin.pre_model_load(cfg | {option: True})


def test_a_file_without_a_swap_config_is_refused(plugin: Any) -> None:
    with pytest.raises(infinity.ConfigError, match=r"infinity: swap\.yaml"):
        plugin.pre_model_load({})
