"""save_pretrained: sharded safetensors, written tensor by tensor, aside and then renamed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.aside import put_in_place, sync, sync_tree, written_aside
from infinity.checkpoint.shards import index_name, write_index, write_shards
from infinity.coordinator import registry
from infinity.coordinator.coordinator import Coordinator
from infinity.durable import buffers
from infinity.errors import ModelError, printable

logger = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]


def save_pretrained(model: nn.Module, directory: str | Path, *, max_shard_size: str = "5GB") -> None:
    """Write an offloaded model as `from_pretrained` reads it: safetensors shards, their index, config and generation
    config.

    One unit's weights are in memory at a time. Everything is written aside and renamed when it is complete and on
    disk, so an error leaves what was there before.

    Args:
        model: what infinity.offload or load_pretrained returned.
        directory: created if need be; files of the same names are replaced.
        max_shard_size: such as "5GB".

    Raises:
        ModelError: the model is not offloaded.
        InfinityError: the disk is full, or the directory cannot be written.
        SwapIOError: the store could not be read.
    """
    coordinator = registry.coordinator_of(model)
    coordinator.require_usable()
    coordinator.room.require_untouched()
    target = Path(directory).expanduser().absolute()
    with written_aside(target, "saving to") as aside:
        parts = _Parts(model, coordinator)
        write_weights(aside, parts.meta, parts.values, coordinator.plan.layout.numel, max_shard_size)
        write_configs(model, aside)
        if not target.exists() or (target.is_dir() and not any(target.iterdir())):
            put_in_place(aside, target)
        else:
            _merge(aside, target)


def write_weights(
    directory: Path,
    meta: Callable[[], Iterator[Tensors]],
    values: Callable[[], Iterator[Tensors]],
    numel: int,
    max_shard_size: str,
) -> None:
    """Write a model's weights and buffers.

    Args:
        meta: gives them part by part on the meta device, under the names and in the shapes the checkpoint format has.
        values: the same with their values; a part is in memory at a time.
        numel: parameters of the model, for the index.

    Raises:
        ModelError: two tensors have the same name.
        OSError: the disk is full, or cannot be written.
    """
    shapes: Tensors = {}
    for part in meta():
        for name in part.keys() & shapes.keys():
            raise ModelError(f"two tensors of the model are called '{name}' in files")
        shapes |= part
    placed = write_shards(directory, "model", shapes, _pieces(values()), max_shard_size)
    if len(set(placed.values())) > 1:
        write_index(directory, "model", shapes, placed, {"total_parameters": numel})


def _pieces(parts: Iterable[Tensors]) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Tensor by tensor. Nothing of a part is kept when the next one is asked for: it may want the memory."""
    for part in parts:
        for name in list(part):
            yield name, 0, part.pop(name)


class _Parts:
    """The tensors of an offloaded model to write, unit by unit and then the buffers."""

    def __init__(self, model: nn.Module, coordinator: Coordinator) -> None:
        self._model = model
        self._coordinator = coordinator
        self._revert = revert_of(model)

    def meta(self) -> Iterator[Tensors]:
        for unit in self._coordinator.units:
            empty = {name: torch.empty(p.shape, dtype=p.dtype, device="meta") for name, p in unit.parameters.items()}
            yield self._revert(empty)
        yield from self._buffers(lambda buffer: buffer.to("meta"))

    def values(self) -> Iterator[Tensors]:
        for unit in self._coordinator.units:
            with self._coordinator.taking([unit.index]):
                yield self._revert({name: parameter.detach() for name, parameter in unit.parameters.items()})
        yield from self._buffers(lambda buffer: buffer)

    def _buffers(self, form: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[Tensors]:
        persistent = {name: form(buffer) for name, buffer in buffers.named(self._model)}
        if persistent:
            yield self._revert(persistent)


def revert_of(model: nn.Module | None) -> Callable[[Tensors], Tensors]:
    """Undoes, for the tensors of a unit, what transformers did to names and shapes on loading (fused experts,
    renamed keys). None: a model that is not one of transformers' has none of that."""
    try:
        from transformers import PreTrainedModel
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 converts nothing
        return lambda tensors: tensors
    if not isinstance(model, PreTrainedModel):
        return lambda tensors: tensors
    return lambda tensors: dict(revert_weight_conversion(model, tensors))


def write_configs(model: nn.Module, directory: Path) -> None:
    """Write config.json and generation_config.json, of a model that has them. Raises OSError."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config.architectures = [type(model).__name__]
        config.dtype = next(model.parameters()).dtype
        config.save_pretrained(directory)
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        try:
            generation.save_pretrained(directory)
        except ValueError as error:  # many models come with one that transformers reads and does not write
            logger.warning("generation_config.json is written as it is; transformers says: %s", printable(error))
            (directory / "generation_config.json").write_text(generation.to_json_string(), encoding="utf-8")


def _merge(aside: Path, target: Path) -> None:
    """Replace the files of an earlier save, and leave what else is there."""
    sync_tree(aside)
    # The index last: until then a reader finds the old set.
    written = sorted(aside.iterdir(), key=lambda path: path.name == index_name("model"))
    for path in written:
        os.replace(path, target / path.name)
    _remove_superseded(target, {path.name for path in written})
    sync(target)


def _remove_superseded(target: Path, written: set[str]) -> None:
    """Weights of an earlier save that the new set does not name: `from_pretrained` could read them instead."""
    for pattern in ("model.safetensors", "model-*-of-*.safetensors", index_name("model")):
        for path in target.glob(pattern):
            if path.name not in written:
                path.unlink()
