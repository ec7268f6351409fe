"""Writing safetensors shards and their index piece by piece, so that no tensor has to be in memory completely."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infinity import files

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
    torch.float8_e4m3fn: "F8_E4M3",
}

Piece = tuple[str, int, torch.Tensor]
"""A tensor's name, the index of an element, and the values from that element on."""


@dataclass(frozen=True)
class _TensorRange:
    """The byte range of a tensor in an open shard."""

    descriptor: int
    offset: int
    nbytes: int


def index_name(stem: str) -> str:
    return f"{stem}.safetensors.index.json"


def write_shards(
    directory: Path,
    stem: str,
    shapes: Mapping[str, torch.Tensor],
    pieces: Iterable[Piece],
    max_shard_size: str,
) -> dict[str, str]:
    """Write tensors as `stem`-0000k-of-0000n.safetensors, or as `stem`.safetensors if one file is enough.

    Disk space for all tensors is reserved first, so that a full disk causes an error before any data is written.

    Args:
        directory: an existing directory.
        stem: the beginning of the file names.
        shapes: the name, shape and dtype of each tensor, as a tensor on the meta device.
        pieces: pieces that contain every element of every tensor exactly once, in any order.
        max_shard_size: maximum size of a file, such as "5GB".

    Returns:
        The file name of each tensor.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    split = split_torch_state_dict_into_shards(
        dict(shapes), filename_pattern=f"{stem}{{suffix}}.safetensors", max_shard_size=max_shard_size
    )
    descriptors: list[int] = []
    slices: dict[str, _TensorRange] = {}
    try:
        for shard, names in split.filename_to_tensors.items():
            descriptors.append(os.open(directory / shard, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
            slices |= _begin_shard(descriptors[-1], {name: shapes[name] for name in names})
        left = {name: place.nbytes for name, place in slices.items()}
        for name, first, values in pieces:
            left[name] -= _write_piece(slices[name], first, values)
            del values  # frees memory that the next piece may need
        if left.keys() != shapes.keys() or any(left.values()):
            raise AssertionError(f"tensors of {stem} were not written as planned")
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return dict(split.tensor_to_filename)


def write_index(
    directory: Path,
    stem: str,
    shapes: Mapping[str, torch.Tensor],
    placed: Mapping[str, str],
    metadata: Mapping[str, Any],
) -> None:
    """Write the index of the shards that write_shards wrote. Raises OSError."""
    total = sum(tensor.numel() * tensor.element_size() for tensor in shapes.values())
    index = {"metadata": {"total_size": total, **metadata}, "weight_map": dict(placed)}
    (directory / index_name(stem)).write_text(json.dumps(index, indent=2, sort_keys=True, allow_nan=False) + "\n")


def _begin_shard(descriptor: int, tensors: dict[str, torch.Tensor]) -> dict[str, _TensorRange]:
    """Write a shard's header and reserve its disk space. Return the place of each tensor.

    Format: the header's length as 8 bytes in little-endian order, the header as JSON, the data
    (https://github.com/huggingface/safetensors#format).
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
    if offset:
        os.posix_fallocate(descriptor, 0, start + offset)
    files.write(descriptor, len(text).to_bytes(8, "little") + text)
    ranges = ((name, *header[name]["data_offsets"]) for name in tensors)
    return {name: _TensorRange(descriptor, start + begin, end - begin) for name, begin, end in ranges}


def _write_piece(place: _TensorRange, first: int, values: torch.Tensor) -> int:
    """Write a piece and return the number of bytes written."""
    if not values.numel():
        return 0
    flat = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    at = first * values.element_size()
    if at + flat.numel() > place.nbytes:
        raise AssertionError(f"{flat.numel()} bytes at {at} of a tensor of {place.nbytes}")
    files.write(place.descriptor, flat.numpy().data, place.offset + at)
    return flat.numel()
