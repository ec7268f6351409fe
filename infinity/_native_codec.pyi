"""What `_native` has for frozen weights that rest in 4 or 8 bits: to their stored form, and back when they arrive.

Only type stubs: the names are imported from `infinity._native`.

`WeightCodec` is how one parameter of `numel` elements is stored, flattened, in blocks of 64 elements.

| codec       | codes                                       | scales                                           |
|-------------|---------------------------------------------|--------------------------------------------------|
| `nf4`       | two in a byte, the first in the upper half  | uint8 a block, fp32 for 256 of them, fp32 offset |
| `nf4_fp32`  | the same                                    | fp32 a block                                     |
| `int8`      | int8                                        | bf16 a block                                     |
| `int8_rows` | int8                                        | fp32 a row (bitsandbytes' SCB)                   |

`nf4` is bitsandbytes' NF4 with `bnb_4bit_use_double_quant`, `nf4_fp32` the one without, both with blocks of 64;
`int8_rows` is its LLM.int8(). Codes, scales and values have the bits of bitsandbytes 0.50.2 on a processor (csrc/codec/
codec.hpp says which of its arithmetic where it differs between processors).

`int8` is linear: scale = the smallest bf16 that is not below absmax / 127 in fp32; code = value / scale in fp32,
rounded to the nearest integer, ties to even, 0 where the scale is 0; value = code · scale in fp32.
"""

from collections.abc import Sequence
from typing import Literal

from infinity._native import Buffer, DTypeName, IOFuture, ThreadPool, WeightCodec

NF4_MAP: tuple[float, ...]
"""What the 16 codes of 'nf4' and 'nf4_fp32' stand for."""
NESTED_MAP: tuple[float, ...]
"""What the 256 codes of the scales of 'nf4' stand for: bitsandbytes' signed dynamic map, as torch computes it on x86-64
with AVX2. Elsewhere its last bits may differ, so that a checkpoint's own map must be compared with this."""

def weight_parts(codec: WeightCodec, numel: int, row_numel: int = 0) -> dict[str, tuple[int, int]]:
    """Where in the stored form its parts are: name → (begin, bytes).

    The names are 'codes' and 'scales', and for 'nf4' also 'nested_scales' and 'offset'. Each begins at a multiple of
    64.

    Args:
        row_numel: elements of a row; only 'int8_rows' needs it.

    Raises:
        ValueError: an unknown codec, more than 2^48 elements, or 'int8_rows' whose `numel` is no multiple of
            `row_numel`.
    """

def encoded_weight_bytes(codec: WeightCodec, numel: int, row_numel: int = 0) -> int:
    """Bytes of the stored form, a multiple of 64. Raises as `weight_parts`."""

def encode_weights(
    values: Buffer,
    dtype: DTypeName,
    codec: Literal["nf4_fp32", "int8"],
    codes: Buffer,
    scales: Buffer,
    pool: ThreadPool,
    isa: str | None = None,
) -> None:
    """Encode as many elements as `values` holds.

    Args:
        codes, scales: parts of a stored form, which are written. With `nest_scales` 'nf4' is made of 'nf4_fp32'.

    Raises:
        ValueError: a value is NaN or infinite (the message has the index of the first one; `codes` and `scales` are
            undefined then), another codec, or a buffer is short, read-only, misaligned or overlaps another.
    """

def nest_scales(scales: Buffer, offset: float, codes: Buffer, nested_scales: Buffer) -> None:
    """fp32 scales of 'nf4_fp32' → the scales and nested scales of 'nf4', in groups of 256 blocks.

    Args:
        scales: fp32, one for each block.
        offset: their mean, as `torch.mean` computes it; the part 'offset' is this as fp32.
        codes: uint8, one for each block.
        nested_scales: fp32, one for each group.

    Raises:
        ValueError: a scale or the offset is not finite, or a buffer is short, read-only, misaligned or overlaps
            another.
    """

def decode_weights(
    data: Buffer,
    codec: WeightCodec,
    numel: int,
    row_numel: int,
    out: Buffer,
    dtype: DTypeName,
    pool: ThreadPool,
    isa: str | None = None,
) -> None:
    """Decode a stored form, rounded to the nearest of `dtype`, ties to even.

    Args:
        data: `encoded_weight_bytes` bytes, aligned to 4.
        row_numel: as `weight_parts` takes it.
        out: `numel` elements of `dtype`.

    Raises:
        ValueError: as `weight_parts`, or a buffer is short, read-only, misaligned or overlaps another.
    """

class DecodePart:
    """A weight that a `WeightDecoder` decodes, with the arguments of `decode_weights`, which raises the same. Keeps its
    buffers alive."""

    def __init__(
        self, data: Buffer, codec: WeightCodec, numel: int, row_numel: int, out: Buffer, dtype: DTypeName
    ) -> None: ...

class WeightDecoder:
    """Decodes weights once they are read, on a native thread and the pool.

    Of the jobs whose reads have ended it takes the one that was submitted first: a job whose reads are late holds
    nobody back.
    """

    def __init__(self, pool: ThreadPool, isa: str | None = None) -> None: ...
    def decode(self, parts: Sequence[DecodePart], after: Sequence[IOFuture] = ()) -> IOFuture:
        """Decode the parts once all of `after` is done.

        Where one of `after` failed nothing is decoded, and the future fails with the failure of the first that did; a
        timeout comes before every other failure. The future keeps the buffers: where it is dropped, that waits until it
        is done, as with the futures of an engine.

        Raises:
            ValueError: the decoder is closed, or belongs to the parent of this forked process.
        """
    def close(self) -> None:
        """Decode the jobs that are ready, fail those that wait as canceled, and stop the thread. Idempotent."""
