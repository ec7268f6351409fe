"""save_pretrained: sharded safetensors, written tensor by tensor, aside and then renamed."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.errors import InfinityError
from infinity.runtime import buffers
from infinity.schedule import registry
from infinity.schedule.ledger import Ledger

_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


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
    ledger = registry.ledger_of(model)
    ledger.require_usable()
    target = Path(directory).expanduser().absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise InfinityError(f"cannot write to {target.parent}: {error.strerror}") from error
    try:
        _write_all(model, ledger, aside, max_shard_size)
        _move_into_place(aside, target)
    except OSError as error:
        raise InfinityError(
            f"saving to {target} failed: {error.strerror or error}. Nothing there was changed; free space or choose "
            f"another directory."
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # ours, made above


@dataclass(frozen=True)
class _Slice:
    """Where a tensor's bytes go."""

    shard: str
    offset: int
    nbytes: int


def _write_all(model: nn.Module, ledger: Ledger, directory: Path, max_shard_size: str) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards

    shapes: dict[str, torch.Tensor] = {}
    for part in _parts(model, ledger, meta=True):
        shapes |= part
    split = split_torch_state_dict_into_shards(
        shapes, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    files: dict[str, int] = {}
    slices: dict[str, _Slice] = {}
    try:
        for shard, names in split.filename_to_tensors.items():
            files[shard], placed = _create_shard(directory / shard, shard, {name: shapes[name] for name in names})
            slices |= placed
        written = 0
        for part in _parts(model, ledger, meta=False):
            for name, tensor in part.items():
                _write_tensor(files[slices[name].shard], slices[name], tensor)
                written += 1
        if written != len(shapes):
            raise AssertionError(f"{written} tensors written, {len(shapes)} planned")
    finally:
        for descriptor in files.values():
            os.fsync(descriptor)
            os.close(descriptor)
    if split.is_sharded:
        total = sum(tensor.numel() * tensor.element_size() for tensor in shapes.values())
        metadata = {"total_size": total, "total_parameters": ledger.backing.plan.numel}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    _write_configs(model, directory)


def _create_shard(path: Path, shard: str, tensors: dict[str, torch.Tensor]) -> tuple[int, dict[str, _Slice]]:
    """The header, and room for the data: a full disk is an error here.

    Format: 8 bytes little-endian length, JSON header, data (https://github.com/huggingface/safetensors#format).
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + nbytes],
        }
        offset += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    if offset:
        os.posix_fallocate(descriptor, 0, start + offset)
    _write_fully(descriptor, memoryview(len(text).to_bytes(8, "little") + text), 0)
    slices = {
        name: _Slice(shard, start + entry["data_offsets"][0], entry["data_offsets"][1] - entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__"
    }
    return descriptor, slices


def _write_tensor(descriptor: int, place: _Slice, tensor: torch.Tensor) -> None:
    if not place.nbytes:
        return
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() != place.nbytes:
        raise AssertionError(f"a tensor of {flat.numel()} bytes for {place.nbytes}")
    _write_fully(descriptor, memoryview(flat.numpy().data), place.offset)


def _write_fully(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _parts(model: nn.Module, ledger: Ledger, *, meta: bool) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors to write, unit by unit and then the buffers, under the names and in the shapes the checkpoint
    format has."""
    revert = _revert_of(model)
    for record in ledger.records:
        if meta:
            empty = {name: torch.empty(p.shape, dtype=p.dtype, device="meta") for name, p in record.parameters.items()}
            yield revert(empty)
            continue
        ledger.acquire(record.unit.index)
        try:
            yield revert({name: parameter.detach() for name, parameter in record.parameters.items()})
        finally:
            ledger.release(record.unit.index)
    persistent = {name: buffer.to("meta") if meta else buffer for name, buffer in buffers.named(model)}
    if persistent:
        yield revert(persistent)


def _revert_of(model: nn.Module) -> Any:
    """Undoes, for the tensors of a unit, what transformers did to names and shapes on loading (fused experts,
    renamed keys)."""
    try:
        from transformers import PreTrainedModel
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 converts nothing
        return lambda tensors: tensors
    if not isinstance(model, PreTrainedModel):
        return lambda tensors: tensors
    return lambda tensors: revert_weight_conversion(model, tensors)


def _write_configs(model: nn.Module, directory: Path) -> None:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config.architectures = [type(model).__name__]
        config.dtype = next(model.parameters()).dtype
        config.save_pretrained(directory)
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(directory)


def _remove_superseded(target: Path, written: set[str]) -> None:
    """Weights of an earlier save that the new set does not name: `from_pretrained` could read them instead."""
    for pattern in ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"):
        for path in target.glob(pattern):
            if path.name not in written:
                path.unlink()


def _move_into_place(aside: Path, target: Path) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        os.chmod(aside, 0o755)
        os.replace(aside, target)
    else:
        # The index last: until then a reader finds the old set.
        written = sorted(aside.iterdir(), key=lambda path: path.name.endswith("index.json"))
        for path in written:
            os.replace(path, target / path.name)
        _remove_superseded(target, {path.name for path in written})
    for directory in (target, target.parent):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
