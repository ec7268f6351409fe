"""Encoded forms of weights, in which a weight is kept at home with 4 or 8 bits per value, and the conversions to and
from these forms (csrc/codec).

| codec | bits per weight | form |
|---|---|---|
| nf4 | 4.13 | bitsandbytes' NF4: blocks of 64, scales in 8 bits (nested) |
| nf4_fp32 | 4.5 | the same with fp32 scales; only read from checkpoints |
| int8 | 8.25 | infinity's own: linear, blocks of 64 with bf16 scales |
| int8_rows | 8 | bitsandbytes' LLM.int8: a scale for each row; only read from checkpoints |
| fp8_block | 8 | e4m3 with a scale for each block of rows and columns; only read from checkpoints |
| mxfp4 | 4.25 | e2m1 in blocks of 32 with e8m0 scales; only read from checkpoints |
| nvfp4 | 4.5 | e2m1 in blocks of 16 with e4m3 scales and a global scale; only read from checkpoints |
| int4_group | 4.13 | 4-bit integers with a scale for each group of a row, here 128; only read from checkpoints |
Sources: Dettmers et al., QLoRA (arXiv 2305.14314), §3, for NF4 and nested scales; bitsandbytes for the bit layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast

import torch

from infinity import _native
from infinity.errors import ModelError
from infinity.state.dtypes import native_name

Codec = str
"""Text that names an encoded form: a name of the table above, and parameters of some forms after a colon: the rows and
columns of a block and the type of the scales ("fp8_block:128x128:bf16"), the kind of the global scale ("nvfp4:factor",
"nvfp4:divisor"), the rows of a matrix that is stored transposed ("mxfp4:2880"), and the size of a group and the type of
the scales ("int4_group:128:bf16")."""
ScaleTypeName = Literal["fp32", "bf16", "e8m0"]
"""Type of the scales of fp8_block and int4_group. e8m0 is a power of two in one byte."""
GlobalScaleName = Literal["factor", "divisor"]
"""Kind of the global scale of nvfp4: a factor of the scales, or their divisor."""
MXFP4_BLOCK, NVFP4_BLOCK = 32, 16
"""Number of elements that share a scale in mxfp4 and nvfp4."""
BLOCK_NUMEL = 64
"""Number of elements that share a scale."""
NESTED_BLOCKS = 256
"""Number of scales that share a nested scale."""


def fp8_block(block: tuple[int, int], scales: ScaleTypeName) -> Codec:
    """Return the codec of FP8 weights with a scale for each block of (rows, columns)."""
    return f"fp8_block:{block[0]}x{block[1]}:{scales}"


def nvfp4(global_scale: GlobalScaleName) -> Codec:
    """Return the codec of NVFP4 weights."""
    return f"nvfp4:{global_scale}"


def mxfp4_transposed(rows: int) -> Codec:
    """Return the codec of MXFP4 weights [..., rows, columns] whose matrices are stored as [columns, rows]."""
    return f"mxfp4:{rows}"


def name_of(codec: Codec) -> str:
    """Return a codec's name, without parameters."""
    return codec.partition(":")[0]


def int4_group(columns: int, scales: ScaleTypeName) -> Codec:
    """Return the codec of 4-bit integers with a scale for each group of `columns` neighbouring weights of a row."""
    return f"int4_group:{columns}:{scales}"


def block_numel(codec: Codec) -> int:
    """Return the number of elements that share a scale in mxfp4, nvfp4 or int4_group."""
    name = name_of(codec)
    return {"mxfp4": MXFP4_BLOCK, "nvfp4": NVFP4_BLOCK}[name] if name != "int4_group" else parameters_of(codec)[1]


def transposed_rows(codec: Codec) -> int:
    """Return the rows of the matrices that are stored transposed; 0 if the codec has no such matrices."""
    return int(codec.partition(":")[2] or 0) if name_of(codec) == "mxfp4" else 0


def divides_by_global_scale(codec: Codec) -> bool:
    """Return whether the global scale of an nvfp4 codec is a divisor."""
    return codec == nvfp4("divisor")


def parameters_of(codec: Codec) -> tuple[int, int, ScaleTypeName]:
    """Return the rows and columns of a block, and the type of the scales, of an fp8_block or int4_group codec."""
    _, block, scales = codec.split(":")
    rows, _, columns = block.rpartition("x")
    return int(rows or 1), int(columns), cast(ScaleTypeName, scales)


def require_codec(codec: Codec) -> Codec:
    """Return `codec`. Raises ValueError if infinity does not have this codec."""
    _native.weight_parts(codec, 0, 1)
    return codec


def row_numel(shape: torch.Size) -> int:
    """Return the number of elements of a row. In int8_rows each row has a scale; a row of fp8_block, mxfp4, nvfp4 and
    int4_group has blocks."""
    return int(shape[-1]) if shape else 0


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
            "nf4_fp32" if codec == "nf4" else "int8",
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
