"""Frozen weights in 4 and 8 bits: NF4 and LLM.int8() have the bits of bitsandbytes, int8 those of its definition."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from infinity import _native
from tests.sampling import SEED, SHARE, number

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState

ISAS = _native.supported_isas()
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BLOCK, GROUP = 64, 64 * 256
TASK = 4 * GROUP
SIZES = [*range(1, 130), GROUP - 1, GROUP, GROUP + 1, TASK + 65, 3 * TASK + 127]
FEW_SIZES = [size for size in SIZES if size < 4 or size > 1000 or min(size % 32, -size % 32) < 2]
NF4 = torch.tensor(_native.NF4_MAP)
SMALLEST_NORMAL = 2.0**-126

every_isa = pytest.mark.parametrize("isa", ISAS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view as integers for torch.equal, which then compares bit by bit."""
    return (
        tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)
        if tensor.is_floating_point()
        else tensor
    )


def buffer(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)


def everyday(numel: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return (0.02 * torch.randn(numel, generator=generator)).to(dtype)


def extreme(numel: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Blocks from the smallest denormal numbers to the largest, blocks of zeros, and ±0 among the others."""
    blocks = -(-numel // BLOCK)
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    low, high = np.log2(smallest), np.log2(largest)
    exponents = low + (high - low) * torch.rand(blocks, 1, generator=generator, dtype=torch.float64)
    exponents[torch.rand(blocks, 1, generator=generator) < 0.1] = high
    values = (2 * torch.rand(blocks, BLOCK, generator=generator, dtype=torch.float64) - 1) * 2**exponents
    values[torch.rand(blocks, BLOCK, generator=generator) < 0.05] *= 0.0
    values[torch.rand(blocks, generator=generator) < 0.1] *= 0.0
    return values.flatten()[:numel].clamp(-largest, largest).to(dtype)


def ties(numel: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Values on the bounds between two codes, and next to them."""
    bounds = (NF4[:-1] + NF4[1:]) / 2
    near = torch.cat([bounds, bounds.nextafter(torch.ones(())), bounds.nextafter(-torch.ones(())), NF4])
    values = near[torch.randint(len(near), (numel,), generator=generator)]
    scales = 2.0 ** torch.randint(-8, 8, (-(-numel // BLOCK), 1), generator=generator)
    values[::BLOCK] = 1.0  # the scale
    return (torch.nn.functional.pad(values, (0, -numel % BLOCK)).view(-1, BLOCK) * scales).flatten()[:numel].to(dtype)


KINDS = {"everyday": everyday, "extreme": extreme, "ties": ties}


def samples(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    for kind, make in KINDS.items():
        for numel in SIZES if kind == "everyday" or SHARE > 0 else FEW_SIZES:
            yield make(numel, dtype, generator)
    for _ in range(number(20, 2000)):
        numel = int(torch.randint(1, 4 * BLOCK * 64, (), generator=generator))
        yield extreme(numel, dtype, generator)


@pytest.fixture
def theirs(bitsandbytes: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The functions of bitsandbytes, with our map for nested scales: theirs has last bits that depend on
    torch.linspace, and so on the processor."""
    functional = bitsandbytes.functional
    monkeypatch.setitem(functional.name2qmap, "dynamic", torch.tensor(_native.NESTED_MAP))
    return functional


def test_the_maps_are_those_of_bitsandbytes(theirs: Any) -> None:
    assert torch.equal(NF4, theirs.get_4bit_type("nf4", device="cpu"))
    dynamic = theirs.create_dynamic_map()
    assert (bits(torch.tensor(_native.NESTED_MAP)) - bits(dynamic)).abs().max() <= 4
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert torch.equal(torch.tensor(_native.NESTED_MAP), dynamic)


class Stored:
    """A weight in its stored form, and its parts."""

    def __init__(self, codec: str, numel: int, row_numel: int = 0) -> None:
        self.codec, self.numel, self.row_numel = codec, numel, row_numel
        self.data = np.full(_native.encoded_weight_bytes(codec, numel, row_numel), 0xEE, np.uint8)
        places = _native.weight_parts(codec, numel, row_numel)
        self.parts = {name: self.data[begin : begin + nbytes] for name, (begin, nbytes) in places.items()}

    def part(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(self.parts[name]).view(dtype)

    def decode(self, dtype: str, isa: str | None = None, threads: int = 1) -> torch.Tensor:
        out = torch.full((self.numel,), 7.0, dtype=DTYPES[dtype])
        pool = _native.ThreadPool(threads)
        _native.decode_weights(self.data, self.codec, self.numel, self.row_numel, buffer(out), dtype, pool, isa)
        return out


def encoded(values: torch.Tensor, codec: str, isa: str | None = None, threads: int = 1) -> Stored:
    dtype = next(name for name, kind in DTYPES.items() if kind == values.dtype)
    plain = Stored("nf4_fp32" if codec == "nf4" else codec, values.numel())
    parts = plain.parts
    _native.encode_weights(
        buffer(values), dtype, plain.codec, parts["codes"], parts["scales"], _native.ThreadPool(threads), isa
    )
    if codec != "nf4":
        return plain
    nested = Stored("nf4", values.numel())
    offset = plain.part("scales", torch.float32).mean()
    nested.parts["codes"][:] = parts["codes"]
    nested.part("offset", torch.float32)[0] = offset
    _native.nest_scales(parts["scales"], offset.item(), nested.parts["scales"], nested.parts["nested_scales"])
    return nested


def quantized(theirs: Any, values: torch.Tensor, nested: bool) -> tuple[torch.Tensor, QuantState]:
    return theirs.quantize_4bit(values, blocksize=BLOCK, quant_type="nf4", compress_statistics=nested)


def theirs_decoded(codes: torch.Tensor, scales: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """With denormal numbers, which bitsandbytes loses in bf16 on a processor with AVX512_BF16."""
    from bitsandbytes.backends.default import ops

    return ops._dequantize_4bit_compute(codes.flatten(), scales, NF4, BLOCK, (numel,), dtype)


@every_isa
@every_dtype
def test_nf4_with_fp32_scales_is_that_of_bitsandbytes(dtype: str, isa: str, theirs: Any) -> None:
    for values in samples(DTYPES[dtype]):
        codes, state = quantized(theirs, values, nested=False)
        ours = encoded(values, "nf4_fp32", isa)
        assert torch.equal(ours.part("codes", torch.uint8), codes.flatten())
        assert torch.equal(bits(ours.part("scales", torch.float32)), bits(state.absmax))


@every_isa
def test_nested_scales_are_those_of_bitsandbytes(isa: str, theirs: Any) -> None:
    compared = 0
    for values in samples(torch.float32):
        codes, state = quantized(theirs, values, nested=True)
        if not state.offset.isfinite():
            with pytest.raises(ValueError, match="offset is not finite"):
                encoded(values, "nf4", isa)
            continue
        ours = encoded(values, "nf4", isa)
        compared += 1
        assert torch.equal(ours.part("codes", torch.uint8), codes.flatten())
        assert torch.equal(ours.part("scales", torch.uint8), state.absmax)
        assert torch.equal(bits(ours.part("nested_scales", torch.float32)), bits(state.state2.absmax))
        assert torch.equal(bits(ours.part("offset", torch.float32)), bits(state.offset.view(1)))
    assert compared > 100


def test_a_nested_scale_may_be_anything(theirs: Any) -> None:
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(number(200, 20_000)):
        blocks = int(torch.randint(1, 600, (), generator=generator))
        magnitude = 2.0 ** torch.randint(-149, 120, (), generator=generator)
        rest = torch.randn(blocks, generator=generator) * magnitude
        rest[torch.rand(blocks, generator=generator) < 0.2] = 0.0
        codes, state = theirs.quantize_blockwise(rest, blocksize=256)
        ours = np.empty(blocks, np.uint8), np.empty(-(-blocks // 256), np.float32)
        _native.nest_scales(rest.numpy(), 0.0, *ours)
        assert np.array_equal(ours[0], codes.numpy())
        assert np.array_equal(ours[1].view(np.int32), state.absmax.numpy().view(np.int32))


@pytest.mark.covering(strength=1)
@every_isa
@every_dtype
@pytest.mark.parametrize("codec", ["nf4", "nf4_fp32"])
def test_nf4_is_decoded_as_by_bitsandbytes(codec: str, dtype: str, isa: str, theirs: Any) -> None:
    kind = DTYPES[dtype]
    for values in samples(torch.float32):
        codes, state = quantized(theirs, values, codec == "nf4")
        if state.offset is not None and not state.offset.isfinite():
            continue
        scales = state.absmax
        if codec == "nf4":
            scales = theirs.dequantize_blockwise(state.absmax, state.state2) + state.offset
        ours = encoded(values, codec, isa).decode(dtype, isa)
        assert torch.equal(bits(ours), bits(theirs_decoded(codes, scales, values.numel(), kind)))
        state.dtype = kind
        called = theirs.dequantize_4bit(codes, state).flatten()
        differ = bits(called) != bits(ours)
        if dtype == "bf16":
            differ &= (ours.abs() > SMALLEST_NORMAL) | (called != 0)
        assert not differ.any()


@pytest.mark.parametrize("codec", ["nf4", "nf4_fp32", "int8"])
@every_dtype
def test_the_number_of_threads_changes_nothing(codec: str, dtype: str) -> None:
    values = everyday(5 * TASK + 77, DTYPES[dtype], torch.Generator().manual_seed(SEED))
    one, three = encoded(values, codec), encoded(values, codec, threads=3)
    assert all(np.array_equal(one.parts[name], three.parts[name]) for name in one.parts)
    assert torch.equal(bits(one.decode(dtype)), bits(three.decode(dtype, threads=3)))


@every_isa
@every_dtype
def test_a_scale_that_is_not_finite_gives_what_torch_gives(dtype: str, isa: str, theirs: Any) -> None:
    stored = Stored("nf4_fp32", 4 * BLOCK)
    stored.parts["codes"][:] = np.random.default_rng(SEED).integers(0, 256, 2 * BLOCK)
    scales = stored.part("scales", torch.float32)
    scales[:] = torch.tensor([float("inf"), float("-inf"), float("nan"), 1.0])
    ours = stored.decode(dtype, isa)
    expected = theirs_decoded(stored.part("codes", torch.uint8), scales, 4 * BLOCK, DTYPES[dtype])
    assert torch.equal(ours.isnan(), expected.isnan())
    assert torch.equal(bits(ours.nan_to_num(0.0)), bits(expected.nan_to_num(0.0)))


def int8_reference(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and bf16 scales by the definition in codec.hpp."""
    numel = values.numel()
    blocks = torch.nn.functional.pad(values.float(), (0, -numel % BLOCK)).view(-1, BLOCK)
    exact = blocks.abs().amax(1) / 127
    scales = ((exact.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
    quotients = torch.where(scales[:, None] == 0, torch.zeros(()), blocks / scales.float()[:, None])
    return torch.round(quotients).to(torch.int8).flatten()[:numel], scales


@every_isa
@every_dtype
def test_int8_is_what_its_definition_says(dtype: str, isa: str) -> None:
    for values in samples(DTYPES[dtype]):
        numel = values.numel()
        ours = encoded(values, "int8", isa)
        codes, scales = int8_reference(values)
        assert torch.equal(ours.part("codes", torch.int8), codes)
        assert torch.equal(bits(ours.part("scales", torch.bfloat16)), bits(scales))
        assert codes.to(torch.int16).abs().max() <= 127
        decoded = codes.float() * scales.float().repeat_interleave(BLOCK)[:numel]
        for name, kind in DTYPES.items():
            assert torch.equal(bits(ours.decode(name, isa)), bits(decoded.to(kind)))


@every_isa
@every_dtype
@pytest.mark.parametrize(("rows", "row_numel"), [(1, 1), (3, 5), (7, 64), (5, 1000), (300, 130), (2, 2 * TASK + 3)])
def test_rows_are_decoded_as_by_bitsandbytes(rows: int, row_numel: int, dtype: str, isa: str, theirs: Any) -> None:
    generator = torch.Generator().manual_seed(SEED)
    codes = torch.randint(-128, 128, (rows, row_numel), generator=generator).to(torch.int8)
    scales = torch.rand(rows, generator=generator) * 2.0 ** torch.randint(-130, 120, (rows,), generator=generator)
    stored = Stored("int8_rows", codes.numel(), row_numel)
    stored.part("codes", torch.int8)[:] = codes.flatten()
    stored.part("scales", torch.float32)[:] = scales
    expected = theirs.int8_vectorwise_dequant(codes, scales).flatten()
    for threads in (1, 3):
        assert torch.equal(bits(stored.decode(dtype, isa, threads)), bits(expected.to(DTYPES[dtype])))


SCALES = {"fp32": torch.float32, "bf16": torch.bfloat16, "e8m0": torch.float8_e8m0fnu}


def fp8(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> Stored:
    """Store a matrix of codes, uint8, and the scales of its blocks."""
    kind = next(name for name, dtype in SCALES.items() if dtype == scales.dtype)
    stored = Stored(f"fp8_block:{block[0]}x{block[1]}:{kind}", codes.numel(), codes.shape[1])
    stored.part("codes", torch.uint8)[:] = codes.flatten()
    stored.part("scales", torch.uint8)[:] = scales.contiguous().view(torch.uint8).flatten()
    return stored


def fp8_reference(
    codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Return code · scale in fp32, rounded by torch."""
    rows, columns = codes.shape
    wide = scales.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns]
    return (codes.view(torch.float8_e4m3fn).float() * wide).to(dtype).flatten()


def same_numbers(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether all bits are equal, except those of NaN."""
    nan = expected.isnan()
    return torch.equal(ours.isnan(), nan) and torch.equal(bits(ours)[~nan], bits(expected)[~nan])


def scales_of_every_size(shape: tuple[int, int], kind: str, generator: torch.Generator) -> torch.Tensor:
    """Scales from the smallest to the largest numbers, negative ones, zeros, infinities and NaN."""
    count = shape[0] * shape[1]
    if kind == "e8m0":
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    values = torch.randn(count, generator=generator) * 2.0 ** torch.randint(-149, 128, (count,), generator=generator)
    values[torch.rand(count, generator=generator) < 0.5] *= 2.0**-10
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 2.0**-149, 3.4e38, 2.0**119])
    chosen = torch.rand(count, generator=generator) < 0.1
    values[chosen] = special[torch.randint(len(special), (int(chosen.sum()),), generator=generator)]
    return values.view(shape).to(SCALES[kind])


@every_isa
@every_dtype
@pytest.mark.parametrize("kind", SCALES)
def test_every_code_of_e4m3_with_every_size_of_scale_is_the_product_rounded_once(
    kind: str, dtype: str, isa: str
) -> None:
    generator = torch.Generator().manual_seed(SEED)
    scales = scales_of_every_size((number(2000, 100_000), 1), kind, generator)
    if kind == "e8m0":
        scales = torch.arange(256, dtype=torch.uint8)[:, None].view(torch.float8_e8m0fnu)
    codes, block = torch.arange(256, dtype=torch.uint8).repeat(len(scales), 1), (1, 256)
    ours = fp8(codes, scales, block).decode(dtype, isa)
    assert same_numbers(ours, fp8_reference(codes, scales, block, DTYPES[dtype]))


@pytest.mark.covering(strength=1)
@every_isa
@every_dtype
@pytest.mark.parametrize("kind", SCALES)
def test_blocks_of_fp8_may_be_incomplete(kind: str, dtype: str, isa: str) -> None:
    generator = torch.Generator().manual_seed(SEED)
    shapes = [(192, 160), (1, 1), (3, 5), (129, 64), (130, 128), (257, 300), (64, 1100), (5, TASK // 2)]
    for shape in shapes:
        for block in [(128, 128), (1, 32), (64, 192), (3, 7), (1000, 1000)]:
            grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
            codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
            codes[torch.rand(shape, generator=generator) < 0.99] &= 0xFB  # most blocks have no NaN
            scales = scales_of_every_size(grid, kind, generator)
            for threads in (1, 3):
                ours = fp8(codes, scales, block).decode(dtype, isa, threads)
                assert same_numbers(ours, fp8_reference(codes, scales, block, DTYPES[dtype])), (shape, block)


def test_values_and_their_weights_may_begin_anywhere_and_nothing_beyond_them_is_written() -> None:
    values = everyday(1001, torch.bfloat16, torch.Generator().manual_seed(SEED))
    stored = encoded(values, "nf4")
    expected = stored.decode("bf16")
    out = torch.full((1003,), 7.0, dtype=torch.bfloat16)
    data = np.zeros(len(stored.data) + 4, np.uint8)
    data[4:] = stored.data
    pool = _native.ThreadPool(1)
    _native.decode_weights(data[4:], "nf4", 1001, 0, buffer(out[1:]), "bf16", pool)
    assert torch.equal(out[1:-1], expected)
    assert out[0] == out[-1] == 7.0


def test_the_instruction_set_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINITY_ISA", "sse9")
    with pytest.raises(ValueError, match="unknown instruction set 'sse9'"):
        encoded(torch.ones(64), "nf4_fp32")


def test_parts_are_in_order_and_begin_at_multiples_of_64() -> None:
    assert _native.weight_parts("nf4", 16385) == {
        "codes": (0, 8193),
        "scales": (8256, 257),
        "nested_scales": (8576, 8),
        "offset": (8640, 4),
    }
    assert _native.encoded_weight_bytes("nf4", 16385) == 8704
    assert _native.weight_parts("nf4_fp32", 65) == {"codes": (0, 33), "scales": (64, 8)}
    assert _native.weight_parts("int8", 65) == {"codes": (0, 65), "scales": (128, 4)}
    assert _native.weight_parts("int8_rows", 60, 20) == {"codes": (0, 60), "scales": (64, 12)}
    assert _native.encoded_weight_bytes("int8_rows", 60, 20) == 128
    assert _native.encoded_weight_bytes("int8", 0) == 0
    assert _native.weight_parts("fp8_block:128x128:fp32", 576 * 160, 160) == {
        "codes": (0, 92160),
        "scales": (92160, 40),
    }
    assert _native.weight_parts("fp8_block:1x32:e8m0", 3 * 33, 33) == {"codes": (0, 99), "scales": (128, 6)}
    assert _native.encoded_weight_bytes("fp8_block:16x16:bf16", 0, 1) == 0


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        ("fp8_block", "needs its block and its type of scales: 'fp8_block:128x128:fp32'"),
        ("fp8_block:", "needs its block"),
        ("fp8_block:128x128", "needs its block"),
        ("fp8_block:128x128:", "needs its block"),
        ("fp8_block:128x128:fp16", "needs its block"),
        ("fp8_block:128:fp32", "needs its block"),
        ("fp8_block:0x128:fp32", "needs its block"),
        ("fp8_block:128x0:fp32", "needs its block"),
        ("fp8_block:-1x128:fp32", "needs its block"),
        ("fp8_block:99999999999999999999x1:fp32", "needs its block"),
        ("fp8_block:9999999x1:fp32", "needs its block"),
        ("fp8_block:128x128:fp32:", "needs its block"),
        ("nf4:64x64:fp32", "codec 'nf4:64x64:fp32' needs no parameters"),
        ("fp8", "unknown codec 'fp8'; use nf4, nf4_fp32, int8, int8_rows, fp8_block, mxfp4, nvfp4 or int4_group"),
    ],
)
def test_a_codec_that_cannot_be_is_named(codec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _native.encoded_weight_bytes(codec, 4096, 64)


@pytest.mark.parametrize("codec", ["nf4_fp32", "int8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@every_dtype
@every_isa
def test_a_value_that_is_not_finite_is_refused_with_its_index(isa: str, dtype: str, bad: float, codec: str) -> None:
    for first in (0, 63, 64, 1000, 3 * TASK + 1):
        values = torch.ones(3 * TASK + 2, dtype=DTYPES[dtype])
        values[first] = values[-1] = bad
        with pytest.raises(ValueError, match=rf"element {first} of the values is not finite"):
            encoded(values, codec, isa, threads=2)


def test_scales_that_are_not_finite_are_refused() -> None:
    scales = np.array([1.0, 2.0, np.inf], np.float32)
    with pytest.raises(ValueError, match="scale 2 is not finite"):
        _native.nest_scales(scales, 1.0, np.empty(3, np.uint8), np.empty(1, np.float32))
    with pytest.raises(ValueError, match="the offset is not finite"):
        _native.nest_scales(scales[:2], float("nan"), np.empty(3, np.uint8), np.empty(1, np.float32))


def test_arguments_that_do_not_fit_are_named() -> None:
    pool = _native.ThreadPool(1)
    values, codes, scales = np.ones(128, np.float32), np.empty(64, np.uint8), np.empty(2, np.float32)
    frozen = codes.copy()
    frozen.flags.writeable = False
    _native.encode_weights(values, "fp32", "nf4_fp32", codes, scales, pool)
    for match, arguments in {
        "unknown codec 'nf5'": (values, "fp32", "nf5", codes, scales),
        "nest_scales makes 'nf4'": (values, "fp32", "nf4", codes, scales),
        "unknown dtype": (values, "fp64", "nf4_fp32", codes, scales),
        "values is not a whole number": (values.view(np.uint8)[:-2], "fp32", "nf4_fp32", codes, scales),
        "values is not aligned to 4": (values.view(np.uint8)[2:-2], "fp32", "nf4_fp32", codes, scales),
        "codes holds 63 bytes; 64 are needed": (values, "fp32", "nf4_fp32", codes[1:], scales),
        "codes is read-only": (values, "fp32", "nf4_fp32", frozen, scales),
        "scales holds 4 bytes; 8 are needed": (values, "fp32", "nf4_fp32", codes, scales[1:]),
        "overlap": (values, "fp32", "nf4_fp32", values.view(np.uint8), scales),
    }.items():
        with pytest.raises(ValueError, match=match):
            _native.encode_weights(*arguments, pool)
    data, out = np.zeros(128, np.uint8), np.empty(128, np.float32)
    frozen = out.copy()
    frozen.flags.writeable = False
    for match, arguments in {
        "data holds 127 bytes; 128 are needed": (data[1:], "nf4_fp32", 128, 0, out, "fp32"),
        "data is not aligned to 4": (np.zeros(130, np.uint8)[2:], "nf4_fp32", 128, 0, out, "fp32"),
        "out holds 508 bytes; 512 are needed": (data, "nf4_fp32", 128, 0, out[1:], "fp32"),
        "out is read-only": (data, "nf4_fp32", 128, 0, frozen, "fp32"),
        "out is not aligned to 2": (data, "nf4_fp32", 128, 0, out.view(np.uint8)[1:-1], "bf16"),
        "int8_rows needs row_numel": (data, "int8_rows", 128, 0, out, "fp32"),
        "of which numel is a multiple": (data, "int8_rows", 128, 3, out, "fp32"),
        "fp8_block needs row_numel": (data, "fp8_block:8x8:e8m0", 128, 0, out, "fp32"),
        "that many elements": (data, "nf4", 1 << 60, 0, out, "fp32"),
        "out and data overlap": (data, "int8", 16, 0, data, "bf16"),
    }.items():
        with pytest.raises(ValueError, match=match) as refused:
            _native.decode_weights(*arguments, pool)
        with pytest.raises(ValueError, match=match) as same:
            _native.DecodePart(*arguments)
        assert str(same.value) == str(refused.value)
