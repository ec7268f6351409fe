"""Axolotl: a plugin that offloads the model that axolotl trains.

In the YAML file of axolotl:

    plugins: [infinity.integrations.axolotl.InfinityPlugin]
    infinity: swap.yaml

The plugin is written against the sources of axolotl 0.19 and was not run inside axolotl. These parts of axolotl were
read: `prepare_plugins`, which calls `register` before the file is validated; `ModelLoader`, which passes `model_kwargs`
of the file to `from_pretrained`; `TrainerBuilderBase.get_callbacks`, which asks for callbacks before the trainer is
made; and `OptimizerMixin`, whose `create_optimizer` uses an optimizer that the trainer already has. The plugin replaces
no function of axolotl.
"""

from __future__ import annotations

import os
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel
from transformers.trainer_utils import get_last_checkpoint

from infinity.errors import ConfigError
from infinity.integrations.infinity_config import InfinityConfig
from infinity.integrations.optimizer_names import class_and_options
from infinity.integrations.optimizers import ours_for
from infinity.integrations.plug_points import Checkpoints, optimizer_factory
from infinity.optim.groups import GroupedOptimizer

_OTHERS = {
    "deepspeed": "offloads the same states itself",
    "fsdp": "shards the model over processes",
    "fsdp_config": "shards the model over processes",
    "load_in_4bit": "needs the quantized weights in memory, which `frozen: nf4` in the swap config does not",
    "load_in_8bit": "needs the quantized weights in memory, which `frozen: int8` in the swap config does not",
    "auto_resume_from_checkpoints": "finds a folder only after the model is loaded: name the folder in "
    "`resume_from_checkpoint` and",
}


class InfinityArgs(BaseModel):
    """The key that the plugin adds to axolotl's YAML file.

    Attributes:
        infinity: path of the swap config, or the swap config itself.
    """

    infinity: str | dict[str, Any]


class InfinityPlugin(BasePlugin):  # type: ignore[misc]
    """A plugin that offloads the model.

    Raises (from register, if no other method is named):
        ConfigError: the swap config cannot be used, or cannot be combined with another option of the YAML file. From
            post_trainer_create: infinity does not have the optimizer that the YAML file names.
        ResumeError: `resume_from_checkpoint` is a folder that pins no generation.
    """

    _config: InfinityConfig

    def get_input_args(self) -> str:
        return f"{InfinityArgs.__module__}.{InfinityArgs.__name__}"

    def register(self, cfg: Any) -> None:
        """Make axolotl load its models with an infinity.InfinityConfig."""
        if not cfg.get("infinity"):
            raise ConfigError("InfinityPlugin: the YAML file names no swap config: add `infinity: swap.yaml`")
        for option, why in _OTHERS.items():
            if cfg.get(option):
                raise ConfigError(f"InfinityPlugin: `{option}` {why}: leave it out")
        folder = cfg.get("resume_from_checkpoint")
        if folder is True:
            raise ConfigError(
                "InfinityPlugin: `resume_from_checkpoint: true` names no folder, but axolotl needs the name of one: "
                f"write `resume_from_checkpoint: {_newest(cfg)}`"
            )
        self._config = InfinityConfig(_plain(cfg["infinity"]), resume=folder)
        given = dict(cfg.get("model_kwargs") or {})
        cfg["model_kwargs"] = given | {"quantization_config": self._config.to_dict()}

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        return [Checkpoints()]

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Give the trainer infinity's optimizer, with the hyperparameters of the YAML file."""
        args = trainer.args
        theirs = trainer.optimizer_cls_and_kwargs or class_and_options(args)
        kind, options = theirs or trainer.get_optimizer_cls_and_kwargs(args, trainer.model)
        ours: Any = ours_for(kind)
        if not (isinstance(ours, type) and issubclass(ours, GroupedOptimizer)):
            raise ConfigError(
                f"InfinityPlugin: `optimizer: {cfg.get('optimizer')}` works on weights in memory, and the weights of "
                "this model are offloaded: use adamw_torch, lion_32bit, sgd or adagrad"
            )
        trainer.optimizer = optimizer_factory(trainer.model, optimizer=ours, weight_decay=args.weight_decay, **options)

    def post_train_unload(self, cfg: Any) -> None:
        """Close the model. axolotl calls this method after it has saved the model."""
        self._config.close()


def _newest(cfg: Any) -> str:
    """Return the last checkpoint folder in the output directory."""
    output = cfg.get("output_dir") or "./model-out"  # the default of axolotl
    return (get_last_checkpoint(output) if os.path.isdir(output) else None) or f"{output}/checkpoint-…"


def _plain(value: Any) -> Any:
    """Return a swap config as ordinary dicts, because axolotl's dicts return None for missing keys."""
    return {key: _plain(each) for key, each in value.items()} if isinstance(value, dict) else value
