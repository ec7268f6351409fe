"""export_checkpoint: write a generation as a portable copy (checkpoint/portable.py), with one chunk in memory at a
time."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infinity import _native
from infinity.checkpoint import portable
from infinity.checkpoint.aside import put_in_place, written_aside
from infinity.checkpoint.generation import StoredGeneration, StoredPart, chunks, dtype_of, newest_whole, opened
from infinity.checkpoint.in_files import InFiles, Tensors
from infinity.checkpoint.recorded import RecordedModel
from infinity.checkpoint.save import write_weights
from infinity.checkpoint.shards import Piece, write_index, write_shards
from infinity.config import SwapConfig, load_config
from infinity.durable.records import GroupRecord, ModelRecord, OptimizerRecord, ParameterRecord
from infinity.errors import InfinityError, ManifestError, ResumeError
from infinity.io.schema import require_unique
from infinity.state.int8 import blocks_of, scales_of
from infinity.state.tiles import Rows, rows_of
from infinity.state.unit import ELEMENT_ALIGNMENT

logger = logging.getLogger(__name__)

_DESCRIBED_BYTES = 512
"""More than a tensor's entries in its file and in the index take, without its name, which stands in both."""
_SMALL_FILES_BYTES = 1 << 20
"""More than the configs, the checksums and the unused ends of the files' last blocks take."""


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

    The model loads with transformers' `from_pretrained`; infinity.load_pretrained(out, from_checkpoint=True) and
    infinity.offload_from_checkpoint go on with the run, on any disks and with any swap config;
    examples/to_torch_adamw.py goes on in plain PyTorch.

    First, all of the generation is read and compared with its checksums. Then one unit's weights, or a chunk of a
    state, are in memory at a time. The copy is written to another directory, which is renamed when it is complete and
    on disk.

    Args:
        store_directory: the swap directory of the run, or all of its swap directories in their order. Where several
            ranks trained, the directory that has theirs.
        out: a directory that is missing or empty.
        step: of the generation; default: the newest that is whole.
        config: its `nvme` section says how the disks are driven; its paths are ignored.
        max_shard_size: such as "5GB".
        also: called before the copy gets its name, to write more files into it; is given the copy's directory, and the
            state_dicts that infinity.track kept, by name.

    Returns:
        The step of the generation.

    Raises:
        ResumeError: there is no such generation, or it is damaged; names the unit and the state.
        StoreLockedError: a run is using the store.
        InfinityError: `out` is not empty, or the disk is full; nothing is left behind.
        SwapIOError: the store could not be read.
    """
    target = Path(out).expanduser().absolute()
    _require_empty(target)
    directories = [store_directory] if isinstance(store_directory, str | Path) else store_directory
    nvme = load_config(config).nvme
    with opened([Path(path) for path in directories], nvme) as stores:
        generation = newest_whole(stores, step)
        write_copy(generation, target, max_shard_size, also)
    return generation.manifest.step


def _require_empty(target: Path) -> None:
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise InfinityError(f"{target} exists and is not empty; export to another directory, or remove it first")


def write_copy(
    generation: StoredGeneration,
    target: Path,
    max_shard_size: str,
    also: Callable[[Path, dict[str, Any]], None] | None = None,
) -> None:
    """export_checkpoint for a generation of an open store, which every byte was read of. The arguments are the same;
    the errors too."""
    _require_empty(target)
    with written_aside(target, "exporting to") as aside:
        _warn_without_optimizer(generation)
        _write_model(aside, generation, max_shard_size)
        folder = aside / portable.OPTIMIZER
        folder.mkdir()
        _write_states(folder, generation, max_shard_size)
        portable.write_training_state(aside, generation.manifest)
        if also is not None:
            also(aside, generation.body.tracked)
        portable.write_checksums(aside)
        put_in_place(aside, target)


def copy_bytes(generation: StoredGeneration) -> int:
    """How much room a portable copy takes at most: what its tensors have, and what describes them."""
    body = generation.body
    optimizers = body.optimizers
    tensors = [tensor for group in generation.trained_groups() for tensor in _tensors(generation, group, optimizers)]
    weights = sum(group.numel * dtype_of(group).itemsize for group in body.model.groups)
    states = sum(4 * tensor.numel for tensor in tensors)
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in body.buffers.values())
    named = sum(len(name) for parameter in body.model.parameters for name in (parameter.name, *parameter.aliases))
    named += sum(len(tensor.name) for tensor in tensors)
    count = len(tensors) + len(body.model.parameters) + len(body.buffers)
    state = portable.training_state_bytes(generation.manifest)
    return weights + states + buffers + state + 2 * named + _DESCRIBED_BYTES * count + _SMALL_FILES_BYTES


def _warn_without_optimizer(generation: StoredGeneration) -> None:
    if not generation.body.optimizers:
        logger.warning(
            "generation %d was committed before there was an optimizer: the copy has the weights and no states",
            generation.manifest.step,
        )


def _write_model(directory: Path, generation: StoredGeneration, max_shard_size: str) -> None:
    record = generation.body.model
    model = RecordedModel(record, generation.source)
    parts = _Parts(generation, model)
    numel = sum(parameter.numel for parameter in record.parameters)
    write_weights(directory, parts.meta, parts.values, numel, max_shard_size)
    model.write_configs(directory)


class _Parts:
    """The tensors of a generation's model: the weights unit by unit, then the buffers."""

    def __init__(self, generation: StoredGeneration, model: RecordedModel) -> None:
        self._generation = generation
        self._in_files = InFiles(_shapes(generation.body.model), model.revert)
        self._buffers: Tensors = generation.body.buffers

    def meta(self) -> Iterator[Tensors]:
        groups = {(group.unit, group.group): group for group in self._generation.body.model.groups}
        units: dict[str, Tensors] = {unit: {} for unit in self._generation.units}
        for parameter in self._generation.body.model.parameters:
            dtype = dtype_of(groups[parameter.unit, parameter.group])
            units[parameter.unit][parameter.name] = _empty(parameter.shape, dtype)
        for part in units.values():
            yield self._in_files.meta(part)
        if self._buffers:
            yield self._in_files.meta({name: buffer.to("meta") for name, buffer in self._buffers.items()})

    def values(self) -> Iterator[list[Piece]]:
        for unit in self._generation.units:
            yield self._in_files.pieces(self._generation.weights(unit))
        if self._buffers:
            yield self._in_files.pieces(dict(self._buffers))


def _shapes(model: ModelRecord) -> dict[str, list[int]]:
    return {parameter.name: parameter.shape for parameter in model.parameters}


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the optimizer, to be written.

    Attributes:
        state: its source: "master", or the store's name of a moment.
        scales: whether the tensor is the scales of that moment's blocks.
        part_of: where the parameter is a tile's, and the tensor that of the whole parameter.
    """

    name: str
    parameter: ParameterRecord
    state: str
    scales: bool = False
    part_of: Rows | None = None

    @property
    def shape(self) -> list[int]:
        shape = self.parameter.shape if self.part_of is None else list(self.part_of.shape)
        return [blocks_of(math.prod(shape))] if self.scales else shape

    @property
    def numel(self) -> int:
        """Elements that the parameter has of the tensor."""
        return blocks_of(self.parameter.numel) if self.scales else self.parameter.numel

    @property
    def first(self) -> int:
        """The first of them."""
        first = 0 if self.part_of is None else self.part_of.first
        return blocks_of(first) if self.scales else first


def _write_states(directory: Path, generation: StoredGeneration, max_shard_size: str) -> None:
    optimizers = generation.body.optimizers
    rows = rows_of(_shapes(generation.body.model))
    wanted = [(group, _tensors(generation, group, optimizers, rows)) for group in generation.trained_groups()]
    begins = ((tensor.name, tensor.first) for _, tensors in wanted for tensor in tensors if tensor.numel)
    try:
        require_unique(begins, "the optimizer's tensor")
    except ValueError as error:
        raise ManifestError(generation.source, f"has {error}") from None
    shapes = {tensor.name: _empty(tensor.shape, torch.float32) for _, tensors in wanted for tensor in tensors}
    pieces = (
        piece
        for group, tensors in wanted
        for begin, numel in chunks(group.numel)
        for piece in _pieces(generation, group, tensors, begin, numel)
    )
    placed = write_shards(directory, portable.OPTIMIZER, shapes, pieces, max_shard_size) if shapes else {}
    described = [_describe(optimizer, rows) for optimizer in optimizers]
    write_index(directory, portable.OPTIMIZER, shapes, placed, {"optimizers": described})


def _tensors(
    generation: StoredGeneration,
    group: GroupRecord,
    optimizers: Sequence[OptimizerRecord],
    rows: Mapping[str, Rows] | None = None,
) -> list[_Tensor]:
    """What is written of a group: masters that are not the weights, and moments that have begun.

    Args:
        rows: the parameters that are written as parts of whole ones; default: none.
    """
    found = []
    in_parts = _in_blocks(rows or {})
    for parameter in generation.parameters(group):
        part_of = (rows or {}).get(parameter.name)
        name = parameter.name if part_of is None else part_of.whole
        if group.master in ("split16", "fp32"):
            found.append(_Tensor(portable.master_name(name), parameter, "master", part_of=part_of))
        for optimizer in optimizers:
            progress = optimizer.state.get(parameter.name)
            begun = [key for key, there in progress.begun.items() if there] if progress is not None else []
            for moment in begun:
                state = portable.stored_name(moment)
                found.append(_Tensor(portable.moment_name(name, moment), parameter, state, part_of=part_of))
                if group.moments == "int8" and (part_of is None or name in in_parts):
                    scales = portable.scales_name(name, moment)
                    found.append(_Tensor(scales, parameter, state, scales=True, part_of=part_of))
    return found


def _in_blocks(rows: Mapping[str, Rows]) -> set[str]:
    """The whole parameters whose tiles begin where blocks of int8 moments do. The scales of others are left out: they
    are taken anew from the values."""
    amid = {place.whole for place in rows.values() if place.first % ELEMENT_ALIGNMENT}
    return {place.whole for place in rows.values()} - amid


def _pieces(
    generation: StoredGeneration, group: GroupRecord, tensors: Sequence[_Tensor], begin: int, numel: int
) -> Iterator[Piece]:
    """The parts of these tensors that lie in elements [begin, begin + numel) of their group."""
    here = [
        tensor
        for tensor in tensors
        if tensor.parameter.offset < begin + numel and begin < tensor.parameter.offset + tensor.parameter.numel
    ]
    for state in sorted({tensor.state for tensor in here}):
        values, scales = _decode(generation, group, state, begin, numel)
        for tensor in here:
            if tensor.state != state:
                continue
            offset = tensor.parameter.offset
            first, last = max(begin, offset), min(begin + numel, offset + tensor.parameter.numel)
            if tensor.scales:
                blocks = slice(blocks_of(first - begin), blocks_of(last - begin))
                yield tensor.name, tensor.first + blocks_of(first - offset), scales[blocks]
            else:
                yield tensor.name, tensor.first + first - offset, values[first - begin : last - begin]


def _decode(
    generation: StoredGeneration, group: GroupRecord, state: str, begin: int, numel: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A chunk of a state in fp32, and the scales of its blocks where it is an int8 moment."""
    if state == "master":
        return generation.master(group, begin, numel), torch.empty(0)
    encoded = generation.moment(group, state, begin, numel)
    values = torch.empty(numel)
    _native.decode_moments(encoded.numpy(), group.moments, is_signed=state == "exp_avg", values=values.numpy())
    return values, scales_of(encoded, numel) if group.moments == "int8" else torch.empty(0)


class StoredCopy:
    """A generation as its portable copy would be (portable.Portable), read from the stores.

    Args:
        directory: where the stores are, for messages.
        part: of the generation, from which what is kept beside the states is taken.
    """

    def __init__(self, generation: StoredGeneration, directory: Path, part: StoredPart) -> None:
        self.directory = directory
        self.manifest, self.body = part.manifest, part.body
        self._generation = generation
        self._tensors = {
            tensor.name: (group, tensor)
            for group in generation.trained_groups()
            for tensor in _tensors(generation, group, generation.body.optimizers)
        }

    def has(self, name: str) -> bool:
        """Whether the optimizer has a tensor of this name."""
        return name in self._tensors

    def state(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """One of the optimizer's tensors, fp32.

        Raises:
            ResumeError: it is missing, or of another shape.
            SwapIOError: the device failed.
        """
        group, tensor = self._tensors.get(name, (None, None))
        if group is None or tensor is None or list(tensor.shape) != list(shape):
            there = "missing" if tensor is None else tuple(tensor.shape)
            raise ResumeError(f"{self.directory}: '{name}' is {there}, and {tuple(shape)} is needed")
        found, end = torch.empty(math.prod(shape)), tensor.parameter.offset + tensor.parameter.numel
        for begin, numel in chunks(group.numel):
            if begin < end and tensor.parameter.offset < begin + numel:
                for _, at, piece in _pieces(self._generation, group, [tensor], begin, numel):
                    found[at : at + piece.numel()] = piece
        return found.view(list(shape))

    def weight(self, name: str) -> torch.Tensor:
        """A weight, by its name. Raises ResumeError, SwapIOError."""
        try:
            return self._generation.weight(name)
        except KeyError:
            raise ResumeError(f"{self.directory} has no weight '{name}'") from None


def _describe(optimizer: OptimizerRecord, rows: Mapping[str, Rows]) -> dict[str, Any]:
    """The facts about an optimizer that a reader of the index needs to use its tensors. Args: rows: the parameters that
    are parts of whole ones."""

    def in_files(name: str) -> str:
        return rows[name].whole if name in rows else name

    groups = [
        {**group, "params": list(dict.fromkeys(map(in_files, group["params"])))} for group in optimizer.param_groups
    ]
    return {
        "class_name": optimizer.class_name,
        "param_groups": [{key: _plain(value) for key, value in group.items()} for group in groups],
        "steps": {in_files(name): progress.step for name, progress in optimizer.state.items()},
    }


def _plain(value: Any) -> Any:
    """A value as JSON can hold it; other values become text."""
    if isinstance(value, torch.Tensor | np.generic | np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(list(shape), dtype=dtype, device="meta")
