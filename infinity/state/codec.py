"""Encoded forms of weights, in which a weight is kept at home with 4 or 8 bits per value, and the conversions to and
from these forms (csrc/codec).

| codec | bits per weight | form |
|---|---|---|
| nf4 | 4.13 | bitsandbytes' NF4: blocks of 64, scales in 8 bits (nested) |
| nf4_fp32 | 4.5 | the same with fp32 scales; only read from checkpoints |
| int8 | 8.25 | infinity's own: linear, blocks of 64 with bf16 scales |
| int8_rows | 8 | bitsandbytes' LLM.int8: a scale for each row; only read from checkpoints |
Sources: Dettmers et al., QLoRA (arXiv 2305.14314), §3, for NF4 and nested scales; bitsandbytes for the bit layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from infinity import _native
from infinity.errors import ModelError
from infinity.state.dtypes import native_name

Codec = Literal["nf4", "nf4_fp32", "int8", "int8_rows"]
BLOCK_NUMEL = 64
"""Number of elements that share a scale."""
NESTED_BLOCKS = 256
"""Number of scales that share a nested scale."""


def row_numel(shape: torch.Size) -> int:
    """Return the number of elements of a row. In int8_rows each row has a scale."""
    return int(shape[-1])


def encoded_bytes(codec: Codec, shape: torch.Size) -> int:
    """Return the bytes of the encoded form of a parameter."""
    return _native.encoded_weight_bytes(codec, shape.numel(), row_numel(shape))


def parts_of(codec: Codec, shape: torch.Size) -> dict[str, tuple[int, int]]:
    """Return the (begin, number of bytes) of each part of the encoded form, by the name of the part."""
    return _native.weight_parts(codec, shape.numel(), row_numel(shape))


def encoded_ranges(codec: Codec, shapes: Mapping[str, torch.Size]) -> dict[str, tuple[int, int]]:
    """Return bytes [begin, end) of each encoded parameter.

    The parameters are stored one after the other, in the order of `shapes`.
    """
    ranges, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + encoded_bytes(codec, shape)
        ranges[name] = begin, end
    return ranges


def encode(name: str, value: torch.Tensor, codec: Codec, into: memoryview, pool: _native.ThreadPool) -> None:
    """Encode a parameter.

    Args:
        name: name of the parameter, for errors.
        value: flat, contiguous, on the CPU; fp32, bf16 or fp16.
        codec: "nf4" or "int8".
        into: memory of encoded_bytes() bytes.
        pool: threads that encode.

    Raises:
        ModelError: the parameter has Inf or NaN, which no codec can encode; or the codec is only for decoding.
    """
    if codec not in ("nf4", "int8"):
        raise ModelError(f"'{name}': {codec} is a form of checkpoints only; set frozen: nf4 or int8")
    into[:] = bytes(len(into))
    parts = {part: into[begin : begin + nbytes] for part, (begin, nbytes) in parts_of(codec, value.shape).items()}
    count = len(parts["scales"])  # nf4 has one byte for each scale
    scales = torch.empty(count, dtype=torch.float32, device="cpu") if codec == "nf4" else None
    try:
        _native.encode_weights(
            value.view(torch.uint8).numpy(),
            native_name(value.dtype),
            "nf4_fp32" if codec == "nf4" else codec,
            parts["codes"],
            parts["scales"] if scales is None else scales.numpy(),
            pool,
        )
    except ValueError as error:
        raise ModelError(
            f"parameter '{name}' cannot be kept as {codec}: {error}. Set frozen: bf16, or repair the checkpoint."
        ) from None
    if scales is not None:
        offset = scales.mean()  # the computation of bitsandbytes, to get the same bits
        torch.frombuffer(parts["offset"], dtype=torch.float32).copy_(offset)
        _native.nest_scales(scales.numpy(), float(offset), parts["scales"], parts["nested_scales"])


def decode(
    data: torch.Tensor, codec: Codec, shape: torch.Size, dtype: torch.dtype, pool: _native.ThreadPool | None = None
) -> torch.Tensor:
    """Decode a parameter.

    Args:
        data: encoded bytes, uint8 [encoded_bytes].
        codec: form of `data`.
        shape: shape of the parameter.
        dtype: dtype of the result.
        pool: threads that decode; None: one thread.

    Returns:
        The values of the parameter, [*shape].
    """
    value = torch.empty(shape, dtype=dtype)
    _native.decode_weights(
        data.numpy(),
        codec,
        value.numel(),
        row_numel(shape),
        value.reshape(-1).view(torch.uint8).numpy(),
        native_name(dtype),
        pool or _native.ThreadPool(1),
    )
    return value
