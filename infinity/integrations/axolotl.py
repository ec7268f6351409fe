"""Axolotl: a plugin that offloads the model that axolotl trains. In its YAML file:

    plugins: [infinity.integrations.axolotl.InfinityPlugin]
    infinity: swap.yaml

It is written against BasePlugin of axolotl 0.19, and was not run inside axolotl. What it does is what `infinity run`
does: from pre_model_load on models are loaded without their weights, and Trainer, beneath axolotl's own, is infinity's.
So get_trainer_cls names no class, and axolotl takes its own.
"""

from __future__ import annotations

import atexit
from contextlib import AbstractContextManager, suppress
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from infinity.config import load_config
from infinity.errors import ConfigError
from infinity.integrations.launcher import installed
from infinity.integrations.run import Run

_OTHERS = {
    "deepspeed": "offloads the same states itself",
    "fsdp": "shards the model over processes",
    "fsdp_config": "shards the model over processes",
    "load_in_4bit": "needs the quantized weights in memory, which `frozen: nf4` in the swap config does not",
    "load_in_8bit": "needs the quantized weights in memory, which `frozen: int8` in the swap config does not",
}


class InfinityArgs(BaseModel):
    """What the plugin adds to axolotl's YAML file.

    Attributes:
        infinity: path of the swap config, or the swap config itself.
    """

    infinity: str | dict[str, Any]


class InfinityPlugin(BasePlugin):  # type: ignore[misc]
    """Offloads the model.

    Raises (from pre_model_load):
        ConfigError: the swap config cannot be used, or not together with another option of the YAML file.
    """

    def __init__(self) -> None:
        super().__init__()
        self._installed: AbstractContextManager[Run] | None = None

    def get_input_args(self) -> str:
        return f"{InfinityArgs.__module__}.{InfinityArgs.__name__}"

    def pre_model_load(self, cfg: Any) -> None:
        """From now on models are offloaded. A second call, for a reference model, changes nothing."""
        if self._installed is not None:
            return
        if not cfg.get("infinity"):
            raise ConfigError("InfinityPlugin: the YAML file names no swap config: add `infinity: swap.yaml`")
        for option, why in _OTHERS.items():
            if cfg.get(option):
                raise ConfigError(f"InfinityPlugin: `{option}` {why}: leave it out")
        self._installed = installed(load_config(_plain(cfg.get("infinity"))))
        self._installed.__enter__()
        atexit.register(self._failed)

    def get_trainer_cls(self, cfg: Any) -> None:
        """axolotl's own."""

    def post_train_unload(self, cfg: Any) -> None:
        """The model was saved: close it."""
        context, self._installed = self._installed, None
        if context is not None:
            context.__exit__(None, None, None)

    def _failed(self) -> None:
        """The process ends, and training did not: the generations stay."""
        context, self._installed = self._installed, None
        if context is not None:
            end = SystemExit(1)
            with suppress(SystemExit):
                context.__exit__(SystemExit, end, None)


def _plain(value: Any) -> Any:
    """axolotl's dicts give None for what they do not have; a swap config is an ordinary dict."""
    return {key: _plain(each) for key, each in value.items()} if isinstance(value, dict) else value
