"""Weights decoded by a device's kernels: the bits of the native decoder, whatever the codec, dtype and size."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from infinity import _native
from infinity.sizes import PAGE_BYTES, round_up
from infinity.state.codec import Codec, decode, encode, encoded_bytes, parts_of
from infinity.state.unit import FlatParameterGroup, ParameterSpec, Unit
from infinity.tiers import decoding
from infinity.tiers.decoding import decode_on_device, decodes_alike, of_bitsandbytes, scale_map, value_map
from infinity.tiers.home import StateHome, WeightsHome

SIZES = [(1, 1), (1, 63), (3, 21), (2, 32), (65, 1), (7, 64), (5, 129), (130, 131)]
CODECS = (
    "nf4", "nf4_fp32", "int8", "int8_rows", "fp8_block:128x128:fp32", "fp8_block:3x7:bf16", "fp8_block:2x32:e8m0"
)  # fmt: skip
PACKED_SIZES = {
    "mxfp4": [(1, 32), (3, 96), (2, 5, 64), (130, 160)],
    "mxfp4:64": [(64, 1), (64, 33), (3, 64, 5), (2, 64, 130)],
    "nvfp4:factor": [(1, 16), (3, 48), (2, 5, 64), (130, 80)],
    "nvfp4:divisor": [(1, 16), (3, 48), (2, 5, 64), (130, 80)],
    "int4_group:32:bf16": [(1, 32), (3, 96), (2, 5, 64), (130, 160)],
    "int4_group:48:fp32": [(1, 48), (3, 96), (130, 144)],
}


def encoded(codec: Codec, shape: torch.Size) -> torch.Tensor:
    """Any codes and scales that a weight may have."""
    generator = torch.Generator().manual_seed(shape.numel())
    data = torch.randint(0, 256, (encoded_bytes(codec, shape),), dtype=torch.uint8, generator=generator)
    for part, (begin, nbytes) in parts_of(codec, shape).items():
        if part == "codes" or (codec, part) == ("nf4", "scales"):
            continue
        if codec.endswith("e8m0") or (codec in PACKED_SIZES and part == "scales" and "fp4" in codec):
            data[begin] = 0  # the others are any bytes
            continue
        of = torch.bfloat16 if codec == "int8" or codec.endswith("bf16") else torch.float32
        values = torch.rand(nbytes // of.itemsize, generator=generator) * 0.1
        data[begin : begin + nbytes] = values.to(of).view(torch.uint8)
    return data


@pytest.mark.parametrize(
    "codec",
    [*CODECS, *PACKED_SIZES],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("at_once", [1 << 24, 128])
def test_a_device_decodes_to_the_bits_of_the_native_core(
    codec: Codec, dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "_DEVICE_NUMEL", at_once)
    specs, offset = [], 0
    for index, sizes in enumerate(PACKED_SIZES.get(codec, SIZES)):
        shape = torch.Size(sizes)
        specs.append(ParameterSpec(str(index), shape, shape.numel(), offset, 0))
        offset += round_up(shape.numel(), 256)
    group = FlatParameterGroup(
        dtype, False, "fp32", tuple(specs), offset, 0, round_up(offset * dtype.itemsize, PAGE_BYTES), codec
    )
    unit = Unit(0, "unit", (group,), group.weight_bytes)
    home = WeightsHome((StateHome(None, 0, group.home_bytes, None),), unit.home_bytes, unit)
    data = torch.zeros(group.home_bytes, dtype=torch.uint8)
    expected = {}
    for spec in specs:
        begin, end = group.encoded[spec.name]
        data[begin:end] = encoded(codec, spec.shape)
        expected[spec.name] = decode(data[begin:end], codec, spec.shape, dtype)
    slot = torch.zeros(unit.weight_bytes, dtype=torch.uint8)
    decode_on_device(home, data, slot)
    for spec in specs:
        start, end = group.byte_range(spec)
        found = slot[start:end].view(dtype).view(spec.shape)
        nan = expected[spec.name].isnan()  # FP8 and FP4 have NaN, whose bits are not specified
        assert torch.equal(found.isnan(), nan), (codec, spec.shape)
        of = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(found[~nan].view(of), expected[spec.name][~nan].view(of)), (codec, spec.shape)


@pytest.mark.covering(strength=1, most=6)
@pytest.mark.parametrize("codec", ["nf4", "nf4_fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("at_once", [1 << 22, 128])
def test_the_kernel_of_bitsandbytes_gives_the_bits_of_the_native_core(
    codec: Codec, dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch, bitsandbytes: Any
) -> None:
    """Its CPU kernel stands for that of a device here."""
    kernel, used = of_bitsandbytes(dtype), []
    assert decodes_alike(kernel, torch.device("cpu"), dtype)

    def noted(codes: torch.Tensor, scales: torch.Tensor, count: int) -> torch.Tensor:
        used.append(count)
        return kernel(codes, scales, count)

    monkeypatch.setattr(decoding, "nf4_kernel", lambda device, dtype: noted)
    monkeypatch.setattr(decoding, "_DEVICE_NUMEL", at_once)
    for shape in map(torch.Size, SIZES):
        data, out = encoded(codec, shape), torch.empty(shape.numel(), dtype=dtype)
        decoding._decode(data, codec, shape, out)
        assert torch.equal(out.view(shape), decode(data, codec, shape, dtype)), shape
    assert sum(used) == sum(torch.Size(sizes).numel() for sizes in SIZES)


@pytest.mark.parametrize(
    ("fault", "said"),
    [("other bits", "decodes to other bits on meta"), ("error", "cannot be used (no kernel image"), ("absent", "")],
)
def test_a_kernel_that_cannot_be_trusted_is_not_used(
    fault: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def alike(*given: Any) -> bool:
        if fault == "error":
            raise RuntimeError("no kernel image is available")
        return False

    monkeypatch.setattr(decoding, "of_bitsandbytes", lambda dtype: None)
    monkeypatch.setattr(decoding, "decodes_alike", alike)
    monkeypatch.setattr(decoding.importlib.util, "find_spec", lambda name: None if fault == "absent" else name)
    with caplog.at_level("INFO", "infinity"):
        assert decoding.nf4_kernel.__wrapped__(torch.device("meta"), torch.bfloat16) is None
    assert said in caplog.text
    assert bool(said) == bool(caplog.text)


@pytest.mark.parametrize("numel", [SIZES[-1], (64, 64)])
def test_a_kernel_that_reads_scales_behind_the_last_one_finds_them_there(
    numel: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel of bitsandbytes reads them for threads that have no element, also when the kernel is tried."""

    def operation(codes: torch.Tensor, scales: torch.Tensor, block: int, kind: str, shape: Any, dtype: Any) -> Any:
        blocks = -(-shape[0] // block)
        assert scales.numel() >= blocks + 16
        values = decoding._values(codes, "nf4", 0, shape[0])
        return (values * scales[:blocks].repeat_interleave(block)[: shape[0]]).to(dtype)

    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    monkeypatch.setattr(torch.ops, "bitsandbytes", SimpleNamespace(dequantize_4bit=operation), raising=False)
    kernel = of_bitsandbytes(torch.bfloat16)
    assert decodes_alike(kernel, torch.device("cpu"), torch.bfloat16)
    monkeypatch.setattr(decoding, "nf4_kernel", lambda device, dtype: kernel)
    shape = torch.Size(numel)
    data, out = encoded("nf4", shape), torch.empty(shape.numel(), dtype=torch.bfloat16)
    decoding._decode(data, "nf4", shape, out)
    assert torch.equal(out.view(shape), decode(data, "nf4", shape, torch.bfloat16))


def test_other_bits_are_seen() -> None:
    device, dtype = torch.device("cpu"), torch.bfloat16

    def rounds_twice(codes: torch.Tensor, scales: torch.Tensor, count: int) -> torch.Tensor:
        return of_bitsandbytes(dtype)(codes, scales.bfloat16().float(), count)

    assert not decodes_alike(rounds_twice, device, dtype)


@pytest.mark.parametrize("codec", ["nf4", "int8"])
def test_the_default_dtype_of_torch_changes_nothing(codec: Any) -> None:
    values = torch.randn(64, 64)

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        value_map.cache_clear()
        scale_map.cache_clear()
        data = torch.zeros(encoded_bytes(codec, values.shape), dtype=torch.uint8)
        encode("", values.reshape(-1), codec, memoryview(data.numpy()), _native.ThreadPool(1))
        out = torch.empty(values.numel(), dtype=torch.float32)
        decoding._decode(data, codec, values.shape, out)
        return data, out

    expected = both()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = both()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def test_the_maps_of_a_device_are_those_of_the_native_core() -> None:
    values, scales = value_map(torch.device("cpu")), scale_map(torch.device("cpu"))
    assert values.tolist() == sorted(values.tolist())
    assert (values[0], values[7], values[15]) == (-1.0, 0.0, 1.0)
    assert scales.numel() == scales.unique().numel() == 256
    assert _native.encoded_weight_bytes("nf4", 64) == 256  # 32 codes, 1 scale, a nested one, the offset
