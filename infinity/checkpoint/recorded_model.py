"""The model of a generation, built on the meta device from the config in the manifest.

RecordedModel converts weights to their names and shapes in files, and writes the model's configs.

[Note: what may go wrong]
transformers checks a config only while it builds the model, and a wrong config raises exceptions of any type. Some
numbers in a config determine how many layers or rows are built. Therefore these numbers are bounded, the built modules
and parameters are counted, and every exception of transformers becomes a ManifestError.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks

from infinity.checkpoint.save_pretrained import revert_of, write_configs
from infinity.checkpoint.tensor_names import Tensors
from infinity.durable.generation_body import ModelRecord
from infinity.errors import ManifestError
from infinity.state.layer_tiles import places_of

logger = logging.getLogger(__name__)

_BOUNDS = (
    (re.compile("vocab"), 1 << 40),
    (re.compile("layer"), 1 << 16),
    (re.compile("label"), 1 << 20),
    (re.compile("^(num|n|d)_|_(size|dim)$"), 1 << 24),
)
"""Pairs of a pattern of config keys and the largest value that a config may have under such a key. The first pattern
that matches the key applies. No known model has larger values, and lists with more elements would use up the memory.
"""
_BUILT_PER_NAME = 64
_BUILT_MIN = 4096


class RecordedModel:
    """The model of a generation, built from the description in the generation's manifest.

    Raises:
        ManifestError: the model is one of transformers', and transformers cannot build it from its config.
    """

    def __init__(self, record: ModelRecord, source: Path) -> None:
        self._record = record
        self._source = source
        self._model = self._on_meta()
        self._revert = revert_of(self._model)

    def revert(self, part: Tensors) -> Tensors:
        """Return the tensors of a unit with their names and shapes in files. Raises ManifestError."""
        with self._blamed("weights that transformers cannot convert back to their form in files"):
            return self._revert(part)

    def write_configs(self, directory: Path) -> None:
        """Write config.json and generation_config.json, if the manifest has these configs.

        Raises:
            OSError: the disk is full, or cannot be written.
            ManifestError: transformers refuses to write the configs.
        """
        if self._model is not None:
            with self._blamed("a config that transformers cannot write", but=OSError):
                write_configs(self._model, directory)
            return
        for name, text in (("config", self._record.config), ("generation_config", self._record.generation_config)):
            if text is not None:
                (directory / f"{name}.json").write_text(text, encoding="utf-8")

    @contextmanager
    def _blamed(self, what: str, but: type[Exception] | tuple[()] = ()) -> Iterator[None]:
        try:
            yield
        except but:
            raise
        except Exception as error:
            problem = f"has {what}: {type(error).__name__}: {error}"
            raise ManifestError(self._source, problem) from error

    def _on_meta(self) -> nn.Module | None:
        """Return the model on the meta device; None if its class is not one of transformers' own classes."""
        model_class = _class_of(self._record.class_name)
        if model_class is None or self._record.config is None:
            return None
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        with self._blamed(f"a config from which transformers cannot build a {self._record.class_name}"):
            values = json.loads(self._record.config)
            if values.get("model_type") not in CONFIG_MAPPING:
                return None
            _require_bounded(values)
            config = CONFIG_MAPPING[values["model_type"]].from_dict(values)
            most = _BUILT_MIN + _BUILT_PER_NAME * sum(1 for _ in self._record.names())
            with _counted(most), torch.device("meta"):
                model: nn.Module = model_class(config)
            self._give_generation_config(model)
            self._give_dtypes(model)
        return model

    def _give_generation_config(self, model: Any) -> None:
        import transformers

        if self._record.generation_config is not None:
            values = json.loads(self._record.generation_config)
            _require_bounded(values)
            model.generation_config = transformers.GenerationConfig.from_dict(values)

    def _give_dtypes(self, model: nn.Module) -> None:
        groups = {(group.unit, group.group): getattr(torch, group.dtype) for group in self._record.groups}
        places = places_of(self._record.shapes())
        recorded = {
            places[name].whole: (groups[parameter.unit, parameter.group], places[name].shape)
            for parameter in self._record.parameters
            for name in (parameter.name, *parameter.aliases)
        }
        for name, weight in model.named_parameters():
            dtype, shape = recorded.get(name, (weight.dtype, None))
            weight.data = weight.data.to(dtype)
            if shape is not None and shape != tuple(weight.shape):
                logger.warning(
                    "%s: in its config '%s' has the shape %s, in the run %s: from_pretrained will not load the copy",
                    self._source, name, tuple(weight.shape), shape,
                )  # fmt: skip


def _class_of(name: str) -> Any:
    """Return transformers' model class of this name; None if there is none."""
    import transformers

    try:
        found = getattr(transformers, name, None)
    except Exception:  # a dependency of the class is not installed
        return None
    return found if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) else None


def _require_bounded(value: Any, key: str = "") -> None:
    """Raise ValueError if a number in a config exceeds its bound: building the model would take unbounded time."""
    if isinstance(value, dict):
        for name, item in value.items():
            _require_bounded(item, name)
    elif isinstance(value, list):
        for item in value:
            _require_bounded(item, key)
    elif isinstance(value, int | float):
        most = next((bound for pattern, bound in _BOUNDS if pattern.search(key)), None)
        if most is not None and not abs(value) <= most:
            raise ValueError(f"{key} is larger than {most}")


@contextmanager
def _counted(most: int) -> Iterator[None]:
    """Raise ValueError inside the `with` block as soon as more than `most` modules and parameters were created."""
    made = 0

    def count(module: nn.Module, name: str, what: Any) -> None:
        nonlocal made
        made += 1
        if made > most:
            raise ValueError(f"it has more than {most} modules and parameters")

    handles = [
        hooks.register_module_module_registration_hook(count),
        hooks.register_module_parameter_registration_hook(count),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
