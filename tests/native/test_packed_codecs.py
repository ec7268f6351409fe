"""Frozen weights in MXFP4, NVFP4 and groups of 4-bit integers have the values that the formats specify, and those of
other libraries where the libraries are right.

The formulas of the libraries are written out here, and were compared with the libraries themselves: compressed-tensors
0.20.0 (NVFP4PackedCompressor, MXFP4PackedCompressor) and nvidia-modelopt 0.47.0 (NVFP4QTensor, MXFP4QTensor).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from infinity import _native
from tests.native.test_codec import DTYPES, TASK, Stored, buffer, every_dtype, every_isa, same_numbers
from tests.sampling import SEED, number

EVERY_CODE = torch.arange(16, dtype=torch.uint8)
NAN_SCALE = 255
NAN, INFINITE = float("nan"), float("inf")
GLOBAL_SCALES = [
    1.0, 3.7e-5, 2688.0 / 0.11, 1e-30, 1e30, 2.0**-126, 2.0**-149, 3.4e38, 2.0**120 / 3, -0.3, 0.0, -0.0, INFINITE, NAN
]  # fmt: skip
KINDS = ["factor", "divisor"]
every_kind = pytest.mark.parametrize("kind", KINDS)


def e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Return the numbers of codes (OCP Microscaling, section 5.3.3): sign, two bits of exponent with bias 1, and a bit
    of mantissa. fp64."""
    sign, exponent, mantissa = (codes >> 3).double(), ((codes >> 1) & 3).double(), (codes & 1).double()
    normal = (1 + mantissa / 2) * 2 ** (exponent - 1)
    return (1 - 2 * sign) * torch.where(exponent == 0, mantissa / 2, normal)


def e8m0(scales: torch.Tensor) -> torch.Tensor:
    """Return the numbers of scales (section 5.4.1): powers of two, and NaN. fp64."""
    return torch.where(scales == NAN_SCALE, NAN, 2 ** (scales.double() - 127))


def mxfp4_values(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return code times scale, which is exact in fp32 or overflows.

    Args:
        codes: uint8 [..., columns], a code in each byte.
        scales: uint8 [..., columns / 32].
        dtype: dtype of the result.
    """
    return (e2m1(codes) * e8m0(scales).repeat_interleave(32, -1)).float().to(dtype)


def nvfp4_values(
    codes: torch.Tensor, scales: torch.Tensor, global_scale: float, kind: str, dtype: torch.dtype
) -> torch.Tensor:
    """Return code times scale in fp32. The scale is an e4m3 number, times or divided by the global scale in fp32."""
    e4m3, whole = scales.view(torch.float8_e4m3fn).float(), torch.tensor(global_scale, dtype=torch.float32)
    wide = (e4m3 * whole if kind == "factor" else e4m3 / whole).repeat_interleave(16, -1)
    return (e2m1(codes).float() * wide).to(dtype)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Return two codes in each byte, the first in the lower half."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def mxfp4(codes: torch.Tensor, scales: torch.Tensor, rows: int = 0) -> Stored:
    """Store codes. With `rows`, the codes are the columns of matrices with this number of rows."""
    if rows:
        stored = Stored(f"mxfp4:{rows}", codes.numel(), codes.shape[-2])
    else:
        stored = Stored("mxfp4", codes.numel(), codes.shape[-1])
    stored.part("codes", torch.uint8)[:] = packed(codes).flatten()
    stored.part("scales", torch.uint8)[:] = scales.flatten()
    return stored


def nvfp4(codes: torch.Tensor, scales: torch.Tensor, global_scale: float, kind: str) -> Stored:
    stored = Stored(f"nvfp4:{kind}", codes.numel(), codes.shape[-1])
    stored.part("codes", torch.uint8)[:] = packed(codes).flatten()
    stored.part("scales", torch.uint8)[:] = scales.flatten()
    stored.part("nested_scales", torch.float32)[0] = global_scale
    return stored


def any_codes(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)


def any_scales(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return any bytes, of which few are NaN."""
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


@every_isa
@every_dtype
def test_every_code_of_mxfp4_with_every_scale_is_their_product(dtype: str, isa: str) -> None:
    codes, scales = EVERY_CODE.repeat(256, 2), torch.arange(256, dtype=torch.uint8)[:, None]
    expected = mxfp4_values(codes, scales, DTYPES[dtype])
    assert same_numbers(mxfp4(codes, scales).decode(dtype, isa), expected.flatten())
    assert same_numbers(mxfp4(codes, scales, rows=32).decode(dtype, isa), expected.t().flatten())
    assert expected[NAN_SCALE].isnan().all()


@every_isa
@every_dtype
@every_kind
def test_every_code_of_nvfp4_with_every_scale_is_their_product(kind: str, dtype: str, isa: str) -> None:
    codes, scales = EVERY_CODE.repeat(256, 1), torch.arange(256, dtype=torch.uint8)[:, None]
    random = torch.rand(number(5, 500), generator=torch.Generator().manual_seed(SEED)).tolist()
    for global_scale in [*GLOBAL_SCALES, *random]:
        ours = nvfp4(codes, scales, global_scale, kind).decode(dtype, isa)
        assert same_numbers(ours, nvfp4_values(codes, scales, global_scale, kind, DTYPES[dtype]).flatten())


@every_isa
@every_dtype
def test_matrices_may_have_any_number_of_rows_and_groups(dtype: str, isa: str) -> None:
    generator = torch.Generator().manual_seed(SEED)
    for shape in [(1, 32), (3, 96), (5, 160), (129, 64), (7, 4128), (1, TASK + 32), (3, TASK - 32)]:
        codes = any_codes(shape, generator)
        scales = any_scales((shape[0], shape[1] // 32), generator)
        finer = any_scales((shape[0], shape[1] // 16), generator)
        for threads in (1, 3):
            ours = mxfp4(codes, scales).decode(dtype, isa, threads)
            assert same_numbers(ours, mxfp4_values(codes, scales, DTYPES[dtype]).flatten()), shape
            for kind in KINDS:
                ours = nvfp4(codes, finer, 0.7, kind).decode(dtype, isa, threads)
                assert same_numbers(ours, nvfp4_values(codes, finer, 0.7, kind, DTYPES[dtype]).flatten()), shape
    odd = any_codes((3, 48), generator)
    scales = any_scales((3, 3), generator)
    expected = nvfp4_values(odd, scales, 0.7, "factor", DTYPES[dtype]).flatten()
    assert same_numbers(nvfp4(odd, scales, 0.7, "factor").decode(dtype, isa), expected)


@every_isa
@every_dtype
def test_stacks_of_transposed_matrices_may_have_any_number_of_columns(dtype: str, isa: str) -> None:
    generator = torch.Generator().manual_seed(SEED)
    for matrices, columns, rows in [(1, 1, 32), (2, 5, 64), (3, 33, 96), (1, 3000, 32), (2, 40, 4128), (4, 64, 128)]:
        codes = any_codes((matrices, columns, rows), generator)
        scales = any_scales((matrices, columns, rows // 32), generator)
        expected = mxfp4_values(codes, scales, DTYPES[dtype]).transpose(1, 2).flatten()
        for threads in (1, 3):
            ours = mxfp4(codes, scales, rows).decode(dtype, isa, threads)
            assert same_numbers(ours, expected), (matrices, columns, rows)


@every_isa
@every_dtype
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_integers_are_their_code_minus_8_times_the_scale_of_their_group(kind: str, dtype: str, isa: str) -> None:
    """In bf16 the product is rounded once, as that of compressed-tensors (PackedQuantizationCompressor)."""
    generator = torch.Generator().manual_seed(SEED)
    for shape, group in [((1, 16), 16), ((3, 96), 32), ((5, 384), 128), ((2, TASK + 32), 48), ((7, 4112), 4112)]:
        codes = any_codes(shape, generator)
        exponents = torch.randint(-140, 125, (shape[0], shape[1] // group), generator=generator)
        scales = (torch.randn(exponents.shape, generator=generator) * torch.exp2(exponents.float())).to(DTYPES[kind])
        scales[0, 0] = NAN
        stored = Stored(f"int4_group:{group}:{kind}", codes.numel(), shape[1])
        stored.part("codes", torch.uint8)[:] = packed(codes).flatten()
        stored.part("scales", DTYPES[kind])[:] = scales.flatten()
        expected = ((codes.float() - 8) * scales.float().repeat_interleave(group, 1)).to(DTYPES[dtype]).flatten()
        for threads in (1, 3):
            assert same_numbers(stored.decode(dtype, isa, threads), expected), (shape, group)


@pytest.mark.parametrize(("codec", "row_numel"), [("mxfp4", 96), ("mxfp4:32", 33), ("nvfp4:factor", 48)])
def test_nothing_beyond_the_values_is_written(codec: str, row_numel: int) -> None:
    numel = 33 * 96
    data = np.zeros(_native.encoded_weight_bytes(codec, numel, row_numel), np.uint8)
    out = torch.full((numel + 2,), 7.0, dtype=torch.bfloat16)
    _native.decode_weights(data, codec, numel, row_numel, buffer(out[1:]), "bf16", _native.ThreadPool(1))
    assert out[0] == out[-1] == 7.0
    assert not out[1:-1].any()


# -- other libraries --------------------------------------------------------------------------------------------------


def of_transformers(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return [matrices, rows, columns] of transformers from codes [matrices, columns, rows] and their scales."""
    return convert_moe_packed_tensors(packed(codes).view(*scales.shape, 16), scales)


def of_compressed_tensors(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """MXFP4PackedCompressor.decompress: the scale is a power in bf16, and so is the product."""
    scale = 2.0 ** (scales.int() - 127).to(torch.bfloat16)
    return e2m1(codes).bfloat16() * scale.repeat_interleave(32, -1)


def of_modelopt(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """MXFP4QTensor.dequantize: the scale is a power in fp32."""
    scale = torch.exp2(scales.float() - 127)
    return (e2m1(codes).float() * scale.repeat_interleave(32, -1)).bfloat16()


@pytest.mark.parametrize("theirs", [of_transformers, of_compressed_tensors, of_modelopt])
def test_mxfp4_of_other_libraries_differs_for_the_scale_that_is_nan_only(theirs: Callable[..., torch.Tensor]) -> None:
    """They decode it as 2^128."""
    codes, scales = EVERY_CODE.repeat(1, 256, 2), torch.arange(256, dtype=torch.uint8)[None, :, None]
    found = theirs(codes, scales)
    found = found if theirs is of_transformers else found.transpose(1, 2)
    ours = mxfp4(codes, scales, rows=32).decode("bf16").view(1, 32, 256)
    assert same_numbers(ours[..., :NAN_SCALE], found[..., :NAN_SCALE])
    assert ours[..., NAN_SCALE].isnan().all()
    assert not found[0, 1:8, NAN_SCALE].isnan().any()


def of_modelopt_nvfp4(codes: torch.Tensor, scales: torch.Tensor, weight_scale_2: float) -> torch.Tensor:
    """NVFP4QTensor.dequantize. Its table has 0 in place of -0."""
    scale = scales.view(torch.float8_e4m3fn).float() * torch.tensor(weight_scale_2)
    return ((e2m1(codes).float() + 0.0) * scale.repeat_interleave(16, -1)).bfloat16()


def of_compressed_tensors_nvfp4(codes: torch.Tensor, scales: torch.Tensor, weight_global_scale: float) -> torch.Tensor:
    """NVFP4PackedCompressor.decompress. `weight_global_scale` has one dimension, so the quotient is fp32."""
    scale = scales.view(torch.float8_e4m3fn).bfloat16() / torch.tensor([weight_global_scale])
    return (e2m1(codes).bfloat16().float() * scale.repeat_interleave(16, -1)).bfloat16()


@pytest.mark.parametrize(
    ("kind", "theirs"), [("factor", of_modelopt_nvfp4), ("divisor", of_compressed_tensors_nvfp4)], ids=KINDS
)
def test_nvfp4_is_decoded_as_by_its_producer(kind: str, theirs: Callable[..., torch.Tensor]) -> None:
    """Only the sign of a zero differs from modelopt."""
    codes, scales = EVERY_CODE.repeat(256, 1), torch.arange(256, dtype=torch.uint8)[:, None]
    for global_scale in GLOBAL_SCALES:
        ours = nvfp4(codes, scales, global_scale, kind).decode("bf16").view(256, 16)
        expected = theirs(codes, scales, global_scale)
        if kind == "divisor":
            assert same_numbers(ours.flatten(), expected.flatten())
        assert torch.equal(ours.nan_to_num(), expected.nan_to_num())
        assert torch.equal(ours.isnan(), expected.isnan())


# -- arguments --------------------------------------------------------------------------------------------------------


def test_parts_have_the_bytes_of_the_formats() -> None:
    assert _native.weight_parts("mxfp4", 3 * 96, 96) == {"codes": (0, 144), "scales": (192, 9)}
    assert _native.weight_parts("mxfp4:96", 3 * 96, 3) == {"codes": (0, 144), "scales": (192, 9)}
    assert _native.weight_parts("nvfp4:factor", 3 * 48, 48) == {
        "codes": (0, 72),
        "scales": (128, 9),
        "nested_scales": (192, 4),
    }
    numel = 4096 * 4096
    assert _native.encoded_weight_bytes("mxfp4", numel, 4096) == numel * 17 // 32  # 0.53125 bytes for each weight
    assert _native.encoded_weight_bytes("nvfp4:divisor", numel, 4096) == numel * 9 // 16 + 64
    assert _native.encoded_weight_bytes("mxfp4", 0, 1) == _native.encoded_weight_bytes("mxfp4:2880", 0, 1) == 0


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        ("mxfp4:", "needs no parameters, or the rows of a matrix that is stored transposed: 'mxfp4:2880'"),
        ("mxfp4:0", "needs no parameters, or the rows"),
        ("mxfp4:-32", "needs no parameters, or the rows"),
        ("mxfp4:32x", "needs no parameters, or the rows"),
        ("mxfp4:9999999", "needs no parameters, or the rows"),
        ("nvfp4", "needs the kind of its global scale: 'nvfp4:factor' or 'nvfp4:divisor'"),
        ("nvfp4:", "needs the kind"),
        ("nvfp4:factors", "needs the kind"),
        ("int4_group", "needs its group and its type of scales: 'int4_group:128:fp32'"),
        ("int4_group:128", "needs its group"),
        ("int4_group:0:bf16", "needs its group"),
        ("int4_group:128x128:bf16", "needs its group"),
        ("int8:", "codec 'int8:' needs no parameters"),
    ],
)
def test_a_codec_that_cannot_be_is_named(codec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _native.encoded_weight_bytes(codec, 4096, 64)


@pytest.mark.parametrize(
    ("codec", "numel", "row_numel", "message"),
    [
        ("mxfp4", 96, 0, "mxfp4 needs row_numel"),
        ("mxfp4", 96, 64, "of which numel is a multiple"),
        ("mxfp4", 96, 48, "complete groups of 32 elements"),
        ("mxfp4:32", 96, 0, "mxfp4 needs row_numel"),
        ("mxfp4:32", 96, 2, "complete groups of 32 elements"),
        ("mxfp4:48", 96, 2, "complete groups of 32 elements"),
        ("nvfp4:factor", 96, 0, "nvfp4 needs row_numel"),
        ("nvfp4:factor", 96, 64, "of which numel is a multiple"),
        ("nvfp4:factor", 96, 24, "complete groups of 16 elements"),
        ("int4_group:32:bf16", 96, 0, "int4_group needs row_numel"),
        ("int4_group:32:bf16", 96, 48, "complete groups of a multiple of 16 elements"),
        ("int4_group:24:bf16", 96, 48, "complete groups of a multiple of 16 elements"),
    ],
)
def test_a_shape_that_the_codec_cannot_have_is_refused(codec: str, numel: int, row_numel: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _native.weight_parts(codec, numel, row_numel)
