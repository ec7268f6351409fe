"""Part of `_native` for frozen weights that have 4 or 8 bits at home: encoding, and decoding after a read.

These are only type stubs: the names are imported from `infinity._native`.

`WeightCodec` names the stored form of one parameter of `numel` elements. The parameter is flattened and divided into
blocks of 64 elements, except in `fp8_block`, `mxfp4`, `nvfp4` and `int4_group`.

| codec       | codes                                       | scales                                           |
|-------------|---------------------------------------------|--------------------------------------------------|
| `nf4`       | two in a byte, the first in the upper half  | uint8 a block, fp32 for 256 of them, fp32 offset |
| `nf4_fp32`  | the same                                    | fp32 a block                                     |
| `int8`      | int8                                        | bf16 a block                                     |
| `int8_rows` | int8                                        | fp32 a row (bitsandbytes' SCB)                   |
| `fp8_block` | e4m3 without infinities                     | fp32, bf16 or e8m0 a rectangle                   |
| `mxfp4`     | e2m1, two in a byte, the first in the lower | e8m0 for 32 elements                             |
| `nvfp4`     | the same                                    | e4m3 for 16 elements, one fp32 for all           |
| `int4_group`| unsigned, two in a byte in the same order   | fp32, bf16 or e8m0 a group of a row              |

`nf4` is bitsandbytes' NF4 with `bnb_4bit_use_double_quant`. `nf4_fp32` is NF4 without `bnb_4bit_use_double_quant`. Both
have blocks of 64 elements. `int8_rows` is bitsandbytes' LLM.int8(). Codes, scales and values have the bits of
bitsandbytes 0.50.2 on a processor. Where the arithmetic of bitsandbytes differs between processors,
csrc/codec/codec.hpp says which arithmetic is used.

The rectangle of `fp8_block` and the type of its scales are part of the codec's text: `fp8_block:128x128:bf16` has a
bf16 scale for each 128 rows and 128 columns. The rectangles at the ends of rows and columns may be incomplete. The
scales are stored row by row. The decoded value is code · scale in fp32.

The decoded value of `mxfp4` and `nvfp4` is code · scale in fp32. In `nvfp4:factor` the scale is the e4m3 number times
the global scale in fp32; in `nvfp4:divisor` it is the e4m3 number divided by the global scale. The global scale is the
part 'nested_scales'. `mxfp4:2880` is a stack of matrices of 2880 rows that are stored transposed, column after column,
so that a scale belongs to 32 elements of a column.

The decoded value of `int4_group:128:bf16` is (code − 8) · scale in fp32, with a bf16 scale for each 128 elements of a
row.

`int8` is linear. The scale is the smallest bf16 that is not below absmax / 127 in fp32. The code is value / scale in
fp32, rounded to the nearest integer, ties to even; it is 0 if the scale is 0. The decoded value is code · scale in
fp32.
"""

from collections.abc import Sequence
from typing import Literal

from infinity._native import Buffer, DTypeName, IOFuture, ThreadPool, WeightCodec

NF4_MAP: tuple[float, ...]
"""Values of the 16 codes of 'nf4' and 'nf4_fp32'."""
NESTED_MAP: tuple[float, ...]
"""Values of the 256 codes of the scales of 'nf4': bitsandbytes' signed dynamic map.

torch computes these values on x86-64 with AVX2. On other processors torch's last bits may differ, so the map in a
checkpoint must be compared with this map.
"""

def weight_parts(codec: WeightCodec, numel: int, row_numel: int = 0) -> dict[str, tuple[int, int]]:
    """Return (begin, bytes) of each part of the stored form, by name.

    The names are 'codes' and 'scales', for 'nf4' also 'nested_scales' and 'offset', and for 'nvfp4' 'nested_scales'.
    Each part begins at a multiple of 64.

    Args:
        codec: the stored form.
        numel: elements of the parameter.
        row_numel: elements of a row; used only for 'int8_rows', 'fp8_block', 'mxfp4', 'nvfp4' and
            'int4_group'.

    Raises:
        ValueError: the codec is unknown, there are more than 2^48 elements, `numel` is not a multiple of `row_numel`
            and the codec uses `row_numel`, or a scale of 'mxfp4', 'nvfp4' or 'int4_group' would belong to an incomplete
            group.
    """

def encoded_weight_bytes(codec: WeightCodec, numel: int, row_numel: int = 0) -> int:
    """Return the bytes of the stored form, a multiple of 64. Raises like `weight_parts`."""

def encode_weights(
    values: Buffer,
    dtype: DTypeName,
    codec: Literal["nf4_fp32", "int8"],
    codes: Buffer,
    scales: Buffer,
    pool: ThreadPool,
    isa: str | None = None,
) -> None:
    """Encode all elements of `values`.

    Args:
        values: the elements.
        dtype: dtype of the elements.
        codec: the stored form. `nest_scales` converts 'nf4_fp32' to 'nf4'.
        codes: the part 'codes', which is written.
        scales: the part 'scales', which is written.
        pool: threads to compute with.
        isa: instruction set; None: `select_isa()`.

    Raises:
        ValueError: a value is NaN or infinite. The message then has the index of the first such value, and the contents
            of `codes` and `scales` are undefined. Also raised for any other codec, and if a buffer is short, read-only,
            misaligned or overlaps another.
    """

def nest_scales(scales: Buffer, offset: float, codes: Buffer, nested_scales: Buffer) -> None:
    """Convert the fp32 scales of 'nf4_fp32' to the scales and nested scales of 'nf4', in groups of 256 blocks.

    Args:
        scales: fp32, one for each block.
        offset: mean of the scales, as `torch.mean` computes it; the part 'offset' is this number as fp32.
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
    """Decode a stored form, and round to the nearest value of `dtype`, ties to even.

    Args:
        data: `encoded_weight_bytes` bytes, aligned to 4.
        codec: form of `data`.
        numel: elements of the parameter.
        row_numel: see `weight_parts`.
        out: `numel` elements of `dtype`.
        dtype: dtype of the result.
        pool: threads to compute with.
        isa: instruction set; None: `select_isa()`.

    Raises:
        ValueError: see `weight_parts`; or a buffer is short, read-only, misaligned or overlaps another.
    """

class DecodePart:
    """Weight that a `WeightDecoder` decodes. The object keeps its buffers alive.

    The arguments and errors are the same as for `decode_weights`.
    """

    def __init__(
        self, data: Buffer, codec: WeightCodec, numel: int, row_numel: int, out: Buffer, dtype: DTypeName
    ) -> None: ...

class WeightDecoder:
    """Decoder of weights that are being read. A native thread waits for the reads, and decodes with the threads of the
    pool.

    Of the jobs whose reads have ended, the job that was submitted first is decoded first. A job with late reads does
    not delay other jobs.
    """

    def __init__(self, pool: ThreadPool, isa: str | None = None) -> None: ...
    def decode(self, parts: Sequence[DecodePart], after: Sequence[IOFuture] = ()) -> IOFuture:
        """Decode the parts once all of `after` is done.

        If a future of `after` failed, nothing is decoded, and the returned future fails with the failure of the first
        failed future. A timeout takes precedence over every other failure. The returned future keeps the buffers alive.
        If it is freed, it first waits until it is done, like the futures of an engine.

        Raises:
            ValueError: the decoder is closed, or belongs to the parent of this forked process.
        """
    def close(self) -> None:
        """Decode the jobs whose reads have ended, let all other jobs fail as canceled, and stop the thread.
        Idempotent."""
