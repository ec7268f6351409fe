"""save_pretrained: write sharded safetensors tensor by tensor into a temporary directory, and then move the files to
their place.

save_adapters.py saves the adapters of a PEFT model. merged_adapters.py merges the adapters into the base and saves one
plain model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.access.exact import exact_value
from infinity.checkpoint.atomic_directory import failing, put, written_aside
from infinity.checkpoint.safetensors_writer import Piece, index_name, write_index, write_shards
from infinity.checkpoint.save_adapters import is_peft_model, save_adapters, to_save
from infinity.checkpoint.tensor_names import TensorNames, Tensors
from infinity.coordinator.coordinator import Coordinator
from infinity.durable import module_buffers
from infinity.errors import ModelError, printable
from infinity.io import atomic_file
from infinity.units.unit import OffloadedUnit

logger = logging.getLogger(__name__)


def save_pretrained(model: nn.Module, directory: str | Path, *, max_shard_size: str = "5GB") -> None:
    """Write an offloaded model in the format of `from_pretrained`: safetensors shards, their index, config and
    generation config.

    One unit's weights are in memory at a time. If several ranks train the model, all ranks call this function, and rank
    0 writes the files. If the ranks share all weights (ranks.wire: host), rank 0 may also call this function alone.

    All files are first written to a temporary directory, and moved to `directory` when they are complete and on disk.
    An error while the files are written leaves the files of an earlier save unchanged.

    For a PEFT model, only the adapters are written, in the format of PEFT's own save_pretrained; all adapters are in
    memory at once. PeftModel.from_pretrained and AutoPeftModelForCausalLM load these files.

    Weights are saved in the dtype that the model has now, with one exception. If a script under `infinity run` has fp32
    weights and computes in 16 bits, infinity trains these weights in 16 bits. For such weights the fp32 masters are
    saved.

    Args:
        model: an offloaded model, or a PEFT model whose base is offloaded.
        directory: directory to write to; created if missing. Files of the same names are replaced.
        max_shard_size: maximum size of a safetensors file, such as "5GB".

    Raises:
        ModelError: the model is not offloaded.
        InfinityError: the disk is full, or the directory cannot be written.
        SwapIOError: the store could not be read.
        PeerError: another rank failed.
    """
    target = Path(directory).expanduser().absolute()
    if is_peft_model(model):
        save_adapters(model, target)
        return
    save_parts(ModelTensors(model, to_save(model)), target, max_shard_size)


def save_parts(parts: ModelTensors, target: Path, max_shard_size: str) -> None:
    """Write the tensors of `parts` as save_pretrained does, with the same errors. All ranks call this function."""
    coordinator = parts.coordinator
    with ExitStack() as written:
        places: list[Path] = []

        def take_part() -> None:
            gathered = parts.values()
            try:
                if coordinator.world.leads:
                    places.append(written.enter_context(written_aside(target, "saving to")))
                    with failing(target, "saving to"):
                        write_weights(places[0], parts.meta(), gathered, parts.numel, max_shard_size)
                        write_configs(parts.model, places[0], parts.dtype)
            finally:
                coordinator.world.join_remaining_gathers(gathered)

        def publish() -> None:
            with failing(target, "saving to"):
                # The index is moved last: before the index is moved, a reader finds the old set of files.
                if replaced := put(places[0], target, last=index_name("model")):
                    _remove_superseded(target, replaced)

        coordinator.world.lead(f"saving to {target}", coordinator.steps, take_part, publish)


def write_weights(
    directory: Path,
    meta: Iterable[Tensors],
    values: Iterable[list[Piece]],
    numel: int,
    max_shard_size: str,
) -> None:
    """Write a model's weights and buffers.

    Args:
        directory: an existing directory.
        meta: the tensors part by part on the meta device, with the names and shapes of the checkpoint format.
        values: all elements of these tensors part by part; one part is in memory at a time.
        numel: number of the model's parameters, for the index.
        max_shard_size: maximum size of a safetensors file, such as "5GB".

    Raises:
        ModelError: two tensors have the same name.
        OSError: the disk is full, or cannot be written.
    """
    shapes: Tensors = {}
    for part in meta:
        for name in part.keys() & shapes.keys():
            raise ModelError(f"two tensors of the model are called '{name}' in files")
        shapes |= part
    placed = write_shards(directory, "model", shapes, _pieces(values), max_shard_size)
    if len(set(placed.values())) > 1:
        write_index(directory, "model", shapes, placed, {"total_parameters": numel})


def _pieces(parts: Iterable[list[Piece]]) -> Iterator[Piece]:
    """Yield the pieces of all parts one by one.

    A part is freed before the next part is made, because the next part may need the memory.
    """
    for part in parts:
        while part:
            yield part.pop(0)


class ModelTensors:
    """The tensors of an offloaded model: the weights unit by unit, then the buffers.

    Attributes:
        model: the model whose tensors are written to the files.
    """

    def __init__(self, model: nn.Module, coordinator: Coordinator) -> None:
        self.model = model
        self.coordinator = coordinator
        shapes = {name: p.shape for unit in coordinator.units for name, p in self._parameters(unit).items()}
        self._tensor_names = TensorNames(shapes, revert_of(model))
        self._given = dict(coordinator.saved_from)
        self._wide = {
            place.spec.name: place for _, place in coordinator.places() if place.spec.name in coordinator.saved_wide
        }

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model in the files."""
        return torch.float32 if self._wide or self._given else next(self.model.parameters()).dtype

    @property
    def numel(self) -> int:
        """Number of the model's parameters."""
        return sum(p.numel() for unit in self.coordinator.units for p in self._parameters(unit).values())

    def meta(self) -> Iterator[Tensors]:
        for unit in self.coordinator.units:
            named, wide = self._parameters(unit).items(), {*self._wide, *self._given}
            dtypes = {name: torch.float32 if name in wide else p.dtype for name, p in named}
            yield self._tensor_names.meta(
                {name: torch.empty(p.shape, dtype=dtypes[name], device="meta") for name, p in named}
            )
        yield self._tensor_names.meta({name: buffer.to("meta") for name, buffer in self._buffers().items()})

    def values(self) -> Iterator[list[Piece]]:
        for unit in self.coordinator.units:
            with self.coordinator.taking(self._read_for(unit)):
                yield self._tensor_names.pieces(
                    {name: self._value(name, p) for name, p in self._parameters(unit).items()}
                )
        yield self._tensor_names.pieces(self._buffers())

    def _parameters(self, unit: OffloadedUnit) -> Mapping[str, nn.Parameter]:
        """Return the parameters of a unit, by their names in the model."""
        return unit.parameters

    def _read_for(self, unit: OffloadedUnit) -> list[int]:
        """Return the indices of the units whose values are needed for the tensors of a unit."""
        return [unit.index]

    def _value(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        """Return the value of a parameter whose unit is gathered."""
        if name in self._wide:
            return exact_value(self.coordinator, self._wide[name]).float()
        return self._given[name]().float() if name in self._given else parameter.detach()

    def _buffers(self) -> Tensors:
        return dict(module_buffers.named(self.model))


def revert_of(model: nn.Module | None) -> Callable[[Tensors], Tensors]:
    """Return a function that converts the tensors of a unit to their names and shapes in files.

    The function undoes the conversions that transformers made while loading the model (fused experts, renamed keys). If
    `model` is not a transformers model, or is None, the function changes nothing.
    """
    try:
        from transformers import PreTrainedModel
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 converts nothing
        return lambda tensors: tensors
    if not isinstance(model, PreTrainedModel):
        return lambda tensors: tensors
    return lambda tensors: dict(revert_weight_conversion(model, tensors))


def write_configs(model: nn.Module, directory: Path, dtype: torch.dtype | None = None) -> None:
    """Write config.json and generation_config.json, if the model has such configs, and the Python files of a custom
    model.

    Args:
        model: the model.
        directory: an existing directory.
        dtype: dtype of the weights in the files; None: dtype of the model.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config.architectures = [type(model).__name__]
        config.dtype = next(model.parameters()).dtype if dtype is None else dtype
        if getattr(model, "_auto_class", None) is not None:
            from transformers.dynamic_module_utils import custom_object_save

            custom_object_save(model, directory, config=config)
        config.save_pretrained(directory)
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        try:
            generation.save_pretrained(directory)
        except ValueError as error:  # transformers refuses to write some configs that it can read
            logger.warning("generation_config.json is written unchanged; transformers says: %s", printable(error))
            (directory / "generation_config.json").write_text(generation.to_json_string(), encoding="utf-8")


def _remove_superseded(target: Path, written: set[str]) -> None:
    """Remove weight files of an earlier save that the new save did not replace: `from_pretrained` could read the old
    files.
    """
    for pattern in ("model.safetensors", "model-*-of-*.safetensors", index_name("model")):
        for path in target.glob(pattern):
            if path.name not in written:
                path.unlink()
    atomic_file.fsync(target)
