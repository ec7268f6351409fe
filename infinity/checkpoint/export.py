"""export_checkpoint: write a generation as a portable copy (checkpoint/portable.py), with one chunk in memory at a
time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infinity.checkpoint import portable
from infinity.checkpoint.atomic_directory import is_free, put_in_place, written_aside
from infinity.checkpoint.generation import (
    StoredGeneration,
    StoredState,
    dtype_of,
    newest_stored_generation,
    open_stores,
)
from infinity.checkpoint.recorded_model import RecordedModel
from infinity.checkpoint.safetensors_writer import Piece, write_index, write_shards
from infinity.checkpoint.save_pretrained import write_weights
from infinity.checkpoint.tensor_names import TensorNames, Tensors
from infinity.config import SwapConfig, load_config
from infinity.durable.generation_body import OptimizerRecord
from infinity.errors import InfinityError, ManifestError
from infinity.io.schema import require_unique
from infinity.state.int8 import blocks_of
from infinity.state.layer_tiles import TileRows, places_of
from infinity.state.unit import ELEMENT_ALIGNMENT

logger = logging.getLogger(__name__)

_DESCRIBED_BYTES = 512
"""Upper bound of the bytes of a tensor's two entries, in the header of its file and in the index. The tensor's name is
in both entries, and is not counted.
"""
_SMALL_FILES_BYTES = 1 << 20
"""Upper bound of the bytes of the configs and the checksum file, plus the unused part of the last block
of each file.
"""


def export_checkpoint(
    store_directory: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    step: int | None = None,
    config: str | Path | Mapping[str, Any] | SwapConfig | None = None,
    max_shard_size: str = "5GB",
    also: Callable[[Path, dict[str, Any]], None] | None = None,
) -> int:
    """Write a generation of a run as a portable copy: model and optimizer states as safetensors.

    transformers' `from_pretrained` loads the model of the copy. infinity.load_pretrained(out, from_checkpoint=True) and
    infinity.offload_from_checkpoint continue the run, on any disks and with any swap config. examples/to_torch_adamw.py
    continues the run in plain PyTorch.

    First, the complete generation is read and compared with its checksums. After this check, one unit's weights, or one
    chunk of a state, are in memory at a time. The copy is written to a temporary directory. The temporary directory is
    renamed to `out` when the copy is complete and on disk.

    Args:
        store_directory: the swap directory of the run, or all of its swap directories in their order. If several ranks
            trained the model: the directory that contains the ranks' directories.
        out: a directory that is missing or empty.
        step: step of the generation; default: the newest complete generation.
        config: a swap config. Its `nvme` section says how the disks are accessed; the paths in the section are ignored.
        max_shard_size: maximum size of a safetensors file, such as "5GB".
        also: function that writes more files into the copy's directory, before this directory is renamed. The arguments
            of `also` are the copy's directory, and the state_dicts of the tracked objects, by name.

    Returns:
        The step of the generation.

    Raises:
        ResumeError: there is no such generation, or the generation is damaged; the message names the unit and the
            state.
        StoreLockedError: a run is using the store.
        InfinityError: `out` is not empty, or the disk is full; nothing is left behind.
        SwapIOError: the store could not be read.
    """
    target = Path(out).expanduser().absolute()
    _require_free(target)
    directories = [store_directory] if isinstance(store_directory, str | Path) else store_directory
    nvme = load_config(config).nvme
    with open_stores([Path(path) for path in directories], nvme) as stores:
        generation = newest_stored_generation(stores, step)
        write_copy(generation, target, max_shard_size, also)
    return generation.manifest.step


def _require_free(target: Path) -> None:
    if not is_free(target):
        raise InfinityError(f"{target} exists and is not empty; export to another directory, or remove it first")


def write_copy(
    generation: StoredGeneration,
    target: Path,
    max_shard_size: str,
    also: Callable[[Path, dict[str, Any]], None] | None = None,
) -> None:
    """Write a portable copy of a generation of an open store. The caller has read all bytes of the generation and
    compared them with their checksums.

    The arguments and errors are the same as for export_checkpoint.
    """
    _require_free(target)
    with written_aside(target, "exporting to") as aside:
        _warn_without_optimizer(generation)
        _write_model(aside, generation, max_shard_size)
        folder = aside / portable.OPTIMIZER
        folder.mkdir()
        _write_states(folder, generation, max_shard_size)
        (aside / portable.STATE_NAME).write_bytes(portable.training_state(generation.manifest))
        if also is not None:
            also(aside, generation.body.tracked)
        portable.write_checksums(aside)
        put_in_place(aside, target)


def copy_bytes(generation: StoredGeneration) -> int:
    """Return an upper bound of the size of a portable copy in bytes: the tensors and their descriptions."""
    body, states = generation.body, _StateTensors(generation).shapes
    weights = sum(group.numel * dtype_of(group).itemsize for group in body.model.groups)
    others = sum(each.numel() * each.element_size() for each in (*states.values(), *body.buffers.values()))
    names = [*body.model.names(), *states]
    count = len(names) + len(body.buffers)
    state = len(portable.training_state(generation.manifest))
    return weights + others + state + 2 * sum(map(len, names)) + _DESCRIBED_BYTES * count + _SMALL_FILES_BYTES


def _warn_without_optimizer(generation: StoredGeneration) -> None:
    if not generation.body.optimizers:
        logger.warning(
            "generation %d was committed before there was an optimizer: the copy has the weights and no states",
            generation.manifest.step,
        )


def _write_model(directory: Path, generation: StoredGeneration, max_shard_size: str) -> None:
    """Write the weights unit by unit, then the buffers, then the configs."""
    record, buffers = generation.body.model, generation.body.buffers
    model = RecordedModel(record, generation.source)
    tensor_names = TensorNames(record.shapes(), model.revert)
    parts = [*generation.shapes(), {name: buffer.to("meta") for name, buffer in buffers.items()}]
    values = (
        tensor_names.pieces({name: buffers[name] if name in buffers else generation.weight(name) for name in part})
        for part in parts
    )
    numel = sum(parameter.numel for parameter in record.parameters)
    write_weights(directory, map(tensor_names.meta, parts), values, numel, max_shard_size)
    model.write_configs(directory)


class _StateTensors:
    """The tensors of optimizer states in the portable copy of a generation. The state of a tile is a part of the
    complete parameter's tensor.

    Attributes:
        shapes: each tensor on the meta device, by name.

    Raises:
        ManifestError: two states would begin at the same element of the same tensor.
    """

    def __init__(self, generation: StoredGeneration) -> None:
        self._generation = generation
        places = places_of(generation.body.model.shapes())
        self._named: list[tuple[StoredState, TileRows, str, str]] = []
        self.shapes: Tensors = {}
        begins = list[tuple[str, int]]()
        # If a tile begins in the middle of a block of the complete parameter, the copy has no scales for this
        # parameter: a run that continues from the copy computes the scales again from the values.
        amid = {place.whole for place in places.values() if place.first % ELEMENT_ALIGNMENT}
        for state in generation.states():
            place = places[state.parameter.name]
            name = portable.tensor_name(place.whole, state.name)
            scales = portable.scales_name(name) if state.has_scales and place.whole not in amid else ""
            self._named.append((state, place, name, scales))
            sizes = {name: place.shape, scales: (blocks_of(math.prod(place.shape)),)}
            for tensor, shape in ((each, shape) for each, shape in sizes.items() if each):
                self.shapes[tensor] = torch.empty(shape, dtype=torch.float32, device="meta")
                begins += [(tensor, place.first)] * bool(state.parameter.numel)
        try:
            require_unique(begins, "the optimizer's tensor")
        except ValueError as error:
            raise ManifestError(generation.source, f"has {error}") from None

    def pieces(self) -> Iterator[Piece]:
        for state, place, name, scales_name in self._named:
            for at, values, scales in self._generation.values(state):
                yield name, place.first + at, values
                if scales_name:
                    yield scales_name, blocks_of(place.first + at), scales


def _write_states(directory: Path, generation: StoredGeneration, max_shard_size: str) -> None:
    states = _StateTensors(generation)
    shapes, places = states.shapes, places_of(generation.body.model.shapes())
    placed = write_shards(directory, portable.OPTIMIZER, shapes, states.pieces(), max_shard_size) if shapes else {}
    described = [_describe(optimizer, places) for optimizer in generation.body.optimizers]
    write_index(directory, portable.OPTIMIZER, shapes, placed, {"optimizers": described})


def _describe(optimizer: OptimizerRecord, places: Mapping[str, TileRows]) -> dict[str, Any]:
    """Return the index entry of an optimizer: class name, parameter groups, and the number of steps of
    each parameter.
    """
    groups = [
        {**group, "params": list(dict.fromkeys(places[name].whole for name in group["params"]))}
        for group in optimizer.param_groups
    ]
    return {
        "class_name": optimizer.class_name,
        "param_groups": [{key: _plain(value) for key, value in group.items()} for group in groups],
        "steps": {places[name].whole: progress.step for name, progress in optimizer.state.items()},
    }


def _plain(value: Any) -> Any:
    """Convert a value to a JSON value. If JSON has no such type, the value is converted to text."""
    if isinstance(value, torch.Tensor | np.generic | np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)
