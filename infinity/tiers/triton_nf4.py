"""NF4 decoding in one kernel, for devices that Triton supports.

The kernel reads 0.5 bytes of codes per element and writes one value, without intermediate values in memory. This module
is imported only where Triton is installed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

from infinity.state.codec import BLOCK_NUMEL, NESTED_BLOCKS

_BYTES = 1024
"""Bytes of codes that one program decodes (2048 elements)."""


@triton.jit  # type: ignore[untyped-decorator]
def _decode(  # type: ignore[no-untyped-def]
    codes,
    scales,
    nested,
    offset,
    values,
    scale_values,
    out,
    numel,
    block_bytes: tl.constexpr,
    nested_blocks: tl.constexpr,
    is_nested: tl.constexpr,
    count: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * count + tl.arange(0, count)
    inside = at * 2 < numel
    packed = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
    block = at // block_bytes
    if is_nested:
        code = tl.load(scales + block, mask=inside, other=0).to(tl.int32)
        scale = tl.load(scale_values + code) * tl.load(nested + block // nested_blocks, mask=inside, other=0.0)
        scale += tl.load(offset)
    else:
        scale = tl.load(scales + block, mask=inside, other=0.0)
    first = tl.load(values + (packed >> 4)) * scale
    second = tl.load(values + (packed & 15)) * scale
    both = tl.interleave(first, second)
    if out.dtype.element_ty == tl.bfloat16:  # round to nearest even, on every device and in the interpreter
        bits = both.to(tl.uint32, bitcast=True)
        both = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    element = tl.program_id(0).to(tl.int64) * count * 2 + tl.arange(0, count * 2)
    tl.store(out + element, both.to(out.dtype.element_ty), mask=element < numel)


def decode(
    codes: torch.Tensor,
    scales: torch.Tensor,
    nested: torch.Tensor | None,
    offset: torch.Tensor | None,
    values: torch.Tensor,
    scale_values: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Queue the kernel on the current stream.

    Args:
        codes: uint8, two elements per byte, the first element in the upper four bits.
        scales: one scale per block of BLOCK_NUMEL elements: fp32, or uint8 codes of `scale_values` for nested scales.
        nested: fp32, one scale per NESTED_BLOCKS blocks; None for plain scales.
        offset: one fp32 number, which is added to every nested scale; None for plain scales.
        values: fp32 [16], value of each code.
        scale_values: fp32 [256], value of each code of a nested scale.
        out: bf16, fp16 or fp32, one value per element.
    """
    grid = (triton.cdiv(out.numel(), 2 * _BYTES),)
    unused: Any = scales
    _decode[grid](
        codes,
        scales,
        unused if nested is None else nested,
        unused if offset is None else offset,
        values,
        scale_values,
        out,
        out.numel(),
        block_bytes=BLOCK_NUMEL // 2,
        nested_blocks=NESTED_BLOCKS,
        is_nested=nested is not None,
        count=_BYTES,
        enable_fp_fusion=False,  # the product and the sum are rounded separately
    )
