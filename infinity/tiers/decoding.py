"""Decoding of weights for a slot: in host memory by the native decoder, on a device by kernels.

[Note: decoding] The weights of a group with a codec are smaller at home than in a slot (state/codec.py). A fetch from
the store reads the encoded weights into a bounce buffer, and gives the bounce buffer back once the weights are decoded
into the slot. Encoded weights in RAM are decoded directly from their home. On a device, the encoded weights cross the
bus and are decoded on the compute stream. NF4 is decoded by one Triton kernel (triton_nf4.py) or by the bitsandbytes
kernel, if such a kernel is available and gives the same bits as infinity's torch operations. All other formats are
decoded by torch operations.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from infinity import _native
from infinity.io.arena import ArenaRegion, PinnedArena
from infinity.plan.plan import Plan
from infinity.plan.plan_input import DECODING_SCRATCH_BYTES
from infinity.state.codec import (
    BLOCK_NUMEL,
    NESTED_BLOCKS,
    block_numel,
    divides_by_global_scale,
    encoded_bytes,
    name_of,
    parameters_of,
    parts_of,
    row_numel,
    transposed_rows,
)
from infinity.state.dtypes import native_name
from infinity.state.unit import FlatParameterGroup, ParameterSpec
from infinity.tiers.home import WeightsHome

logger = logging.getLogger(__name__)

_DEVICE_NUMEL = DECODING_SCRATCH_BYTES // 13  # elements per decoding step: enough to hide the kernel launches


class SlotDecoder:
    """Decoder for slots in host memory.

    Attributes:
        encoded_space: bounce buffer for encoded weights that are read from NVMe.
    """

    def __init__(self, bounce: ArenaRegion, pool: _native.ThreadPool) -> None:
        self.encoded_space = bounce
        self._decoder = _native.WeightDecoder(pool)

    def start(
        self,
        groups: Iterable[FlatParameterGroup],
        data: memoryview,
        slot: memoryview,
        after: Sequence[_native.IOFuture],
    ) -> _native.IOFuture:
        """Start decoding once all futures of `after` are done.

        Args:
            groups: the complete encoded groups to decode.
            data: the bytes of these groups at home, concatenated.
            slot: memory of the slot.
            after: futures of the reads that fill `data`.
        """
        parts: list[_native.DecodePart] = []
        begin = 0
        for group in groups:
            parts += _parts(group, data[begin : begin + group.home_bytes], slot[group.weight_offset :])
            begin += group.home_bytes
        return self._decoder.decode(parts, after)

    def close(self) -> None:
        self._decoder.close()


def _parts(group: FlatParameterGroup, data: memoryview, slot: memoryview) -> Iterator[_native.DecodePart]:
    for spec, begin, end in _specs(group):
        at = spec.offset * group.dtype.itemsize
        into = slot[at : at + spec.numel * group.dtype.itemsize]
        codec, dtype = _codec(group), native_name(group.dtype)
        yield _native.DecodePart(data[begin:end], codec, spec.numel, row_numel(spec.shape), into, dtype)


def _specs(group: FlatParameterGroup) -> Iterator[tuple[ParameterSpec, int, int]]:
    """Yield each parameter that has at least one element, with the byte range [begin, end) of its encoded form."""
    for spec in group.specs:
        begin, end = group.encoded[spec.name]
        if spec.numel:
            yield spec, begin, end


def _codec(group: FlatParameterGroup) -> _native.WeightCodec:
    if group.codec is None:
        raise AssertionError("weights without a codec are not decoded")
    return group.codec


def open_decoding(plan: Plan, arena: PinnedArena, pool: _native.ThreadPool) -> SlotDecoder | None:
    """Return the decoder for host memory; None if no weights are decoded in host memory."""
    budgets = plan.budgets
    if not (budgets.decodes and budgets.limits.in_place):
        return None
    nbytes = budgets.upload_bytes
    bounce = arena.lease(nbytes, "encoded weights").space() if nbytes else ArenaRegion(arena.memory, 0, 0)
    return SlotDecoder(bounce, pool)


# -- on a device -------------------------------------------------------------------------------------------------------


def decode_on_device(home: WeightsHome, data: torch.Tensor, slot: torch.Tensor) -> None:
    """Queue kernels that decode the weights, on the current stream.

    Args:
        home: home of the unit's weights.
        data: uint8, the encoded groups, concatenated, on the device.
        slot: uint8 [slot_bytes], on the device.
    """
    begin = 0
    for group, kept in home.encoded():
        flat = slot[group.weight_offset : group.weight_offset + group.weight_bytes].view(group.dtype)
        for spec, first, last in _specs(group):
            encoded = data[begin + first : begin + last]
            _decode(encoded, _codec(group), spec.shape, flat[spec.offset : spec.offset + spec.numel])
        begin += kept.nbytes


def _decode(data: torch.Tensor, codec: _native.WeightCodec, shape: torch.Size, out: torch.Tensor) -> None:
    """Decode one parameter. The result has the same bits as from the native decoder: fp32 products, rounded to nearest
    even."""
    parts = {name: data[begin : begin + nbytes] for name, (begin, nbytes) in parts_of(codec, shape).items()}
    if name_of(codec) == "fp8_block":
        _decode_fp8(parts, codec, out.view(-1, row_numel(shape)))
        return
    if name_of(codec) in _NIBBLES:
        _decode_nibbles(parts, codec, out, row_numel(shape))
        return
    if codec == "int8_rows":
        codes = parts["codes"].view(torch.int8).view(-1, row_numel(shape))
        rows = max(_DEVICE_NUMEL // codes.shape[1], 1)
        scales = parts["scales"].view(torch.float32)[:, None]
        for at in range(0, codes.shape[0], rows):
            part = codes[at : at + rows].float() * scales[at : at + rows] * ROW_FACTOR
            out.view(codes.shape)[at : at + rows] = part
        return
    is_nf4 = codec in ("nf4", "nf4_fp32")
    fused = fused_nf4(out.device, out.dtype) if is_nf4 else None
    if fused is not None:
        fused(parts, codec, out)
    else:
        _decode_in_pieces(parts, codec, out, nf4_kernel(out.device, out.dtype) if is_nf4 else None)


def _decode_in_pieces(
    parts: dict[str, torch.Tensor], codec: _native.WeightCodec, out: torch.Tensor, kernel: Kernel | None
) -> None:
    for at in range(0, out.numel(), _DEVICE_NUMEL):
        count = min(_DEVICE_NUMEL, out.numel() - at)
        of_blocks = _scales(parts, codec, at // BLOCK_NUMEL, -(-(at + count) // BLOCK_NUMEL))
        if kernel is not None:
            out[at : at + count] = kernel(parts["codes"][at // 2 : -(-(at + count) // 2)], of_blocks, count)
            continue
        values = _values(parts["codes"], codec, at, count)
        whole = count // BLOCK_NUMEL * BLOCK_NUMEL
        into = out[at : at + count]
        blocks = values[:whole].view(-1, BLOCK_NUMEL)
        into[:whole] = (blocks * of_blocks[: len(blocks), None]).view(-1)
        if whole < count:
            into[whole:] = values[whole:] * of_blocks[-1]
        del values, blocks  # free these tensors before the next piece allocates


def _decode_fp8(parts: dict[str, torch.Tensor], codec: _native.WeightCodec, out: torch.Tensor) -> None:
    """Decode an fp8_block parameter into `out`, [rows, columns]."""
    block_rows, block_columns, scale_type = parameters_of(codec)
    rows, columns = out.shape
    codes = parts["codes"].view(torch.float8_e4m3fn).view(rows, columns)
    scales = _SCALES[scale_type](parts["scales"]).view(-1, -(-columns // block_columns))
    for at, count in _pieces(rows, block_rows, max(_DEVICE_NUMEL // columns, 1)):
        first, blocks = at // block_rows, -(-count // block_rows)
        factors = scales[first : first + blocks].repeat_interleave(block_columns, dim=1)[:, None, :columns]
        values = codes[at : at + count].float().view(blocks, -1, columns)
        out[at : at + count] = values.mul_(factors).view(count, columns)
        del values, factors  # free these tensors before the next piece allocates


_E2M1 = tuple(sign * magnitude for sign in (1, -1) for magnitude in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
_NIBBLES = {"mxfp4": _E2M1, "nvfp4": _E2M1, "int4_group": tuple(float(code - 8) for code in range(16))}
"""Values of the 16 codes of the forms whose codes are two in a byte, the first in the lower half."""


def _decode_nibbles(
    parts: dict[str, torch.Tensor], codec: _native.WeightCodec, out: torch.Tensor, row_numel: int
) -> None:
    """Decode an mxfp4, nvfp4 or int4_group parameter into `out`, which is flat."""
    block, rows, scales_of = block_numel(codec), transposed_rows(codec), _nibble_scales(parts, codec)
    # Stored rows of each matrix. Without transposed matrices, any rows of whole blocks will do.
    matrices = out.view(-1, rows, row_numel).transpose(1, 2) if rows else out.view(1, -1, block)
    for index, matrix in enumerate(matrices):
        lines, width = matrix.shape
        most = max(_DEVICE_NUMEL // width, 1)
        for line in range(0, lines, most):
            piece = matrix[line : line + most]
            at, count = (index * lines + line) * width, piece.numel()
            codes = parts["codes"][at // 2 : (at + count) // 2]
            indices = torch.stack((codes & 15, codes >> 4), dim=1).view(-1).int()
            values = _nibble_map(name_of(codec), out.device).index_select(0, indices).view(-1, block)
            del indices  # free this tensor before the next ones are allocated
            values.mul_(scales_of(at // block, (at + count) // block)[:, None])
            piece.copy_(values.view(piece.shape))
            del values


def _nibble_scales(parts: dict[str, torch.Tensor], codec: _native.WeightCodec) -> Callable[[int, int], torch.Tensor]:
    """Return a function that returns the scales of the blocks [first, end) as fp32."""
    stored = parts["scales"]
    if name_of(codec) == "int4_group":
        scales = _SCALES[parameters_of(codec)[2]](stored)
        return lambda first, end: scales[first:end]
    of_byte = torch.arange(256, dtype=torch.uint8, device=stored.device)
    if name_of(codec) == "mxfp4":
        known = _of_e8m0(of_byte)
    else:
        known, global_scale = of_byte.view(torch.float8_e4m3fn).float(), parts["nested_scales"].view(torch.float32)
        known = known / global_scale if divides_by_global_scale(codec) else known * global_scale
    return lambda first, end: known.index_select(0, stored[first:end].int())


@cache
def _nibble_map(name: str, device: torch.device) -> torch.Tensor:
    """Return the values of the 16 codes of a codec, fp32, on the device."""
    return torch.tensor(_NIBBLES[name], dtype=torch.float32, device=device)


def _pieces(rows: int, block_rows: int, most: int) -> Iterator[tuple[int, int]]:
    """Divide rows into pieces of at most `most` rows. Yield the first row and the number of rows of each piece.

    A piece has whole blocks of rows, or belongs to a single block.
    """
    at = 0
    while at < rows:
        left = rows - at
        if most >= block_rows:
            count = min(left, most) // block_rows * block_rows or left
        else:
            count = min(left, most, block_rows - at % block_rows)
        yield at, count
        at += count


def _of_e8m0(scales: torch.Tensor) -> torch.Tensor:
    """Return powers of two as fp32. The native decoder computes them in the same way."""
    exponents = scales.int()
    bits = torch.where(exponents == 0, 1 << 22, exponents << 23)
    return torch.where(exponents == 255, 0x7FC00000, bits).to(torch.int32).view(torch.float32)


_SCALES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fp32": lambda scales: scales.view(torch.float32),
    "bf16": lambda scales: scales.view(torch.bfloat16).float(),
    "e8m0": _of_e8m0,
}
"""Functions that return scales of fp8_block and int4_group as fp32, by the type of the stored scales."""


ROW_FACTOR = 7.874015718698502e-3
"""The factor 1 / 127, in the precision that bitsandbytes uses."""


def _scales(parts: dict[str, torch.Tensor], codec: _native.WeightCodec, first: int, end: int) -> torch.Tensor:
    """Return the fp32 scales of the blocks [first, end)."""
    if codec == "int8":
        return parts["scales"].view(torch.bfloat16)[first:end].float()
    if codec == "nf4_fp32":
        return parts["scales"].view(torch.float32)[first:end]
    group = first // NESTED_BLOCKS
    nested = parts["nested_scales"].view(torch.float32)[group : -(-end // NESTED_BLOCKS)]
    of_groups = nested.repeat_interleave(NESTED_BLOCKS)[first - group * NESTED_BLOCKS : end - group * NESTED_BLOCKS]
    codes = parts["scales"][first:end].int()
    return scale_map(nested.device).index_select(0, codes) * of_groups + parts["offset"].view(torch.float32)


def _values(codes: torch.Tensor, codec: _native.WeightCodec, at: int, count: int) -> torch.Tensor:
    """Return the fp32 values of the codes of elements [at, at + count); `at` is even."""
    if codec == "int8":
        return codes[at : at + count].view(torch.int8).float()
    packed = codes[at // 2 : -(-(at + count) // 2)]
    indices = torch.stack((packed >> 4, packed & 15), dim=1).view(-1)[:count]
    return value_map(codes.device).index_select(0, indices.int())


_BEYOND = 16
"""Number of scales that the bitsandbytes kernel may read past the last scale, in threads that have no element."""
Kernel = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Function that returns the decoded values. It takes codes, the fp32 scales of their blocks and the number of
elements."""


Fused = Callable[[dict[str, torch.Tensor], str, torch.Tensor], None]
"""Function that decodes a full NF4 parameter from its parts."""


@cache
def fused_nf4(device: torch.device, dtype: torch.dtype) -> Fused | None:
    """Return the Triton kernel for a device; None if the kernel cannot be used, or decodes to other bits than
    infinity's torch operations.

    The torch operations need several kernel launches, and read and write memory several times, for each piece of a
    parameter.
    """
    if device.type == "cpu" or importlib.util.find_spec("triton") is None:
        return None
    try:
        fused = of_triton()
        agrees = all(fused_alike(fused, codec, device, dtype) for codec in ("nf4", "nf4_fp32"))
    except Exception as error:  # Triton has no compiler for the device, or its release is incompatible
        logger.info("Triton cannot be used to decode NF4 (%s: %s)", type(error).__name__, error)
        return None
    if not agrees:
        logger.warning("Triton's kernel decodes NF4 to other bits on %s, and is not used", device)
        return None
    return fused


def of_triton() -> Fused:
    """Return the Triton kernel.

    Raises:
        ImportError: Triton is not installed.
    """
    kernel = importlib.import_module("infinity.tiers.triton_nf4").decode

    def fused(parts: dict[str, torch.Tensor], codec: str, out: torch.Tensor) -> None:
        nested = codec == "nf4"
        kernel(
            parts["codes"],
            parts["scales"] if nested else parts["scales"].view(torch.float32),
            parts["nested_scales"].view(torch.float32) if nested else None,
            parts["offset"].view(torch.float32) if nested else None,
            value_map(out.device),
            scale_map(out.device),
            out,
        )

    return fused


def fused_alike(fused: Fused, codec: _native.WeightCodec, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a kernel decodes to the same bits as infinity's torch operations.

    The test data has every code, scales of many sizes and an incomplete last block.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    shape = torch.Size([4096 * BLOCK_NUMEL - 13])
    ranges = parts_of(codec, shape)
    data = torch.randint(0, 256, (encoded_bytes(codec, shape),), dtype=torch.uint8, generator=generator, device="cpu")
    for name in ("scales", "nested_scales", "offset"):
        if name in ranges and not (name == "scales" and codec == "nf4"):
            begin, nbytes = ranges[name]
            numbers = data[begin : begin + nbytes].view(torch.float32)
            exponents = torch.randint(-20, 4, numbers.shape, generator=generator, device="cpu")
            numbers.copy_(torch.rand(numbers.shape, generator=generator, device="cpu") * torch.exp2(exponents.float()))
    there = data.to(device)
    parts = {name: there[begin : begin + nbytes] for name, (begin, nbytes) in ranges.items()}
    ours, theirs = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
    _decode_in_pieces(parts, codec, ours, None)
    fused(parts, codec, theirs)
    return torch.equal(ours, theirs)


@cache
def nf4_kernel(device: torch.device, dtype: torch.dtype) -> Kernel | None:
    """Return the bitsandbytes NF4 kernel for a device; None if the kernel cannot be used, or decodes to other bits than
    infinity's torch operations.

    The torch operations move several times as many bytes to and from device memory as the kernel.
    """
    if device.type == "cpu" or importlib.util.find_spec("bitsandbytes") is None:
        return None
    try:
        kernel = of_bitsandbytes(dtype)
        agrees = decodes_alike(kernel, device, dtype)
    except Exception as error:  # bitsandbytes was built for another driver or another torch
        logger.info("bitsandbytes' NF4 kernel cannot be used (%s): torch's operations decode", error)
        return None
    if not agrees:
        logger.warning("bitsandbytes' NF4 kernel decodes to other bits on %s: torch's operations decode", device)
        return None
    return kernel


def of_bitsandbytes(dtype: torch.dtype) -> Kernel:
    """Return the bitsandbytes NF4 kernel.

    Raises:
        ImportError: bitsandbytes is not installed.
        AttributeError: the installed bitsandbytes has another interface.
    """
    importlib.import_module("bitsandbytes")
    operation = torch.ops.bitsandbytes.dequantize_4bit

    def kernel(codes: torch.Tensor, scales: torch.Tensor, count: int) -> torch.Tensor:
        padded = nn.functional.pad(scales, (0, _BEYOND))
        values: torch.Tensor = operation(codes, padded, BLOCK_NUMEL, "nf4", [count], dtype)
        return values

    return kernel


def decodes_alike(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a kernel decodes to the same bits as infinity's torch operations.

    The test data has every code, scales of many sizes and an incomplete last block.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    blocks = 4096
    count = blocks * BLOCK_NUMEL - 13
    of: dict[str, Any] = {"generator": generator, "device": "cpu"}  # independent of torch's default device
    codes = torch.randint(0, 256, (-(-count // 2),), dtype=torch.uint8, **of).to(device)
    exponents = torch.randint(-20, 4, (blocks,), **of)
    scales = torch.rand(blocks, dtype=torch.float32, **of).mul_(torch.exp2(exponents.float())).to(device)
    ours = _values(codes, "nf4", 0, count) * scales.repeat_interleave(BLOCK_NUMEL)[:count]
    return torch.equal(kernel(codes, scales, count), ours.to(dtype))


@cache
def value_map(device: torch.device) -> torch.Tensor:
    """Return the NF4 values, fp32 [16], on the device.

    The result is cached, so the values are copied to the device only once.
    """
    return torch.tensor(_native.NF4_MAP, dtype=torch.float32, device=device)


@cache
def scale_map(device: torch.device) -> torch.Tensor:
    """Return the values of the codes of nested scales, fp32 [256], on the device."""
    return torch.tensor(_native.NESTED_MAP, dtype=torch.float32, device=device)
