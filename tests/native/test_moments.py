"""How moments are stored: the dynamic 8-bit map, its layout in chunks, and bf16 rounded stochastically."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from infinity import _native
from tests.sampling import number

ISAS = _native.supported_isas()
BLOCK, CHUNK = _native.BLOCK_NUMEL, _native.CHUNK_NUMEL
SCALES = 4096


def dynamic_map(signed: bool) -> np.ndarray:
    """Return the 256 values as bitsandbytes and torchao make them (create_dynamic_map, 7 exponent bits of 8)."""
    values = [0.0, 1.0]
    for decade in range(7):
        bins = 2**decade if signed else 2 ** (decade + 1)
        borders = torch.linspace(0.1, 1, bins + 1)
        means = 10 ** (decade - 6) * (borders[:-1] + borders[1:]) / 2
        values += means.tolist() + ((-means).tolist() if signed else [])
    return np.sort(np.array(values, np.float32))


def encode(values: np.ndarray, signed: bool, isa: str | None = None) -> np.ndarray:
    data = np.zeros(_native.moment_bytes("int8", len(values)), np.uint8)
    _native.encode_moments(values.astype(np.float32), "int8", is_signed=signed, data=data, isa=isa)
    return data


def decode(data: np.ndarray, numel: int, signed: bool, isa: str | None = None) -> np.ndarray:
    values = np.empty(numel, np.float32)
    _native.decode_moments(data, "int8", is_signed=signed, values=values, isa=isa)
    return values


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("isa", ISAS)
def test_the_map_is_that_of_bitsandbytes_and_torchao(isa: str, signed: bool) -> None:
    theirs = dynamic_map(signed)
    assert len(theirs) == 256
    data = np.zeros(_native.moment_bytes("int8", BLOCK), np.uint8)
    data[:4] = np.ones(1, np.float32).view(np.uint8)
    data[SCALES:] = np.arange(256)
    ours = decode(data, BLOCK, signed, isa)
    # Theirs are rounded several times on the way (linspace, sum, product).
    np.testing.assert_allclose(ours, theirs, rtol=4 * 2**-24, atol=0)
    assert ours[-1] == 1.0
    assert ours[127 if signed else 0] == 0.0
    # Every value of theirs gets the code that they give it.
    again = encode(theirs, signed, isa)
    assert np.array_equal(again[SCALES:], np.arange(256))


@pytest.mark.parametrize("signed", [True, False])
def test_a_value_gets_the_nearest_of_the_map(signed: bool) -> None:
    rng = np.random.default_rng(0)
    numel = number(100, 1000) * BLOCK
    values = (10 ** rng.uniform(-7.5, 0, numel)).astype(np.float32)
    if signed:
        values *= rng.choice([-1, 1], numel).astype(np.float32)
    values[::BLOCK] = 1.0  # the scale
    got = decode(encode(values, signed), numel, signed)
    nearest = dynamic_map(signed).astype(np.float64)
    best = np.abs(values[:, None].astype(np.float64) - nearest).min(axis=1)
    error = np.abs(got.astype(np.float64) - values)
    if not signed:  # what is not zero does not become zero
        small = values < nearest[1] / 2
        np.testing.assert_allclose(got[small], nearest[1], rtol=1e-6)
        error, best, values = error[~small], best[~small], values[~small]
    assert (error <= best + 4e-7 * np.abs(values)).all()


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("scale", [1.0, 3.4e38, 1e-30, 1e-33, 1e-37, 2e-39, 1.4e-45])
def test_every_instruction_set_gives_the_same_codes_at_any_scale(signed: bool, scale: float) -> None:
    rng = np.random.default_rng(1)
    values = (rng.standard_normal(64 * BLOCK) ** 3).astype(np.float32)
    values = values / np.abs(values).max() * np.float32(scale)
    values = values if signed else np.abs(values)
    codes = [encode(values, signed, isa) for isa in ISAS]
    assert all(np.array_equal(codes[0], other) for other in codes)
    decoded = [decode(codes[0], len(values), signed, isa) for isa in ISAS]
    assert all(np.array_equal(decoded[0], other) for other in decoded)
    blocks = values.reshape(-1, BLOCK)
    largest = np.abs(blocks).max(axis=1)
    kept = blocks.max(axis=1) == largest  # exactly, where it is positive: the map has +1 and no -1
    assert np.array_equal(decoded[0].reshape(-1, BLOCK).max(axis=1)[kept], largest[kept])
    assert kept.any()
    assert (np.sign(decoded[0]) * np.sign(values) >= 0).all()
    coarse = np.repeat(largest, BLOCK)
    assert (np.abs(decoded[0] - values) <= 0.01 * coarse).all()


@pytest.mark.parametrize("isa", ISAS)
def test_zeros_stay_zero_and_a_block_that_is_not_finite_says_so(isa: str) -> None:
    values = np.zeros(4 * BLOCK, np.float32)
    values[BLOCK + 3], values[2 * BLOCK + 5], values[3 * BLOCK] = np.nan, np.inf, 1.0
    for signed in (True, False):
        got = decode(encode(values, signed, isa), len(values), signed, isa).reshape(4, BLOCK)
        assert (got[0] == 0).all()
        assert np.isnan(got[1]).all()
        assert not np.isfinite(got[2]).any()
        assert got[3][0] == 1.0
        assert (got[3][1:] == 0).all()


@pytest.mark.parametrize("numel", [1, 255, 256, 257, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 300])
def test_a_chunk_is_a_page_of_scales_and_its_codes(numel: int) -> None:
    nbytes = _native.moment_bytes("int8", numel)
    assert nbytes == numel + SCALES * -(-numel // CHUNK)
    values = np.random.default_rng(numel).standard_normal(numel).astype(np.float32)
    data = encode(values, True)
    got = decode(data, numel, True)
    assert np.abs(got - values).max() < 0.1
    block = (numel - 1) // BLOCK
    at = block * BLOCK // CHUNK * (SCALES + CHUNK) + block % (CHUNK // BLOCK) * 4
    assert data[at : at + 4].view(np.float32)[0] == np.abs(values[block * BLOCK :]).max()


def philox(seed: int, step: int, block: int, stream: int) -> np.ndarray:
    """Philox4x32-10 over the 32 counters of a block, as 256 sixteen-bit numbers; from the paper."""
    mask = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    counter = np.arange(32, dtype=np.uint64) + np.uint64(block * 32)
    c = [counter & mask, counter >> shift, np.full(32, step, np.uint64), np.full(32, stream, np.uint64)]
    keys = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (second >> shift) ^ c[1] ^ np.uint64(keys[0]),
            second & mask,
            (first >> shift) ^ c[3] ^ np.uint64(keys[1]),
            first & mask,
        ]
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    halves = [(c[0] | c[1] << shift).view(np.uint16), (c[2] | c[3] << shift).view(np.uint16)]
    return np.concatenate(halves)


def test_the_reference_generator_gives_the_published_values() -> None:
    words = philox(0, 0, 0, 0)
    first = [int(words[:2].view(np.uint32)[0]), int(words[2:4].view(np.uint32)[0])]
    last = [int(words[128:130].view(np.uint32)[0]), int(words[130:132].view(np.uint32)[0])]
    assert first + last == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def momentum_step(
    values: np.ndarray, *, seed: int = 7, step: int = 9, index: int = 0, begin: int = 0, isa: str | None = None
) -> np.ndarray:
    """Do a step of SGD whose bf16 momentum becomes `values` + 0, rounded: the momentum starts at 0 and gains the
    values."""
    numel = len(values)
    weight = np.zeros(numel, np.float32)
    moment = np.zeros(numel, np.uint16)
    segment = _native.Segment(begin, numel, rule="sgd", lr=0.0, beta1=0.5, step=step, index=index, seed=seed)
    _native.optimizer_update(
        weight,
        None,
        moment,
        None,
        values,
        weight_dtype="fp32",
        master="weight",
        moments="bf16",
        grad_dtype="fp32",
        segments=[segment],
        pool=_native.ThreadPool(1),
        isa=isa,
    )
    return moment


@pytest.mark.parametrize("isa", ISAS)
def test_bf16_moments_are_rounded_with_the_bits_of_seed_step_and_index(isa: str) -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    seed, step, index = 0x1234_5678_9ABC_DEF0, 77, 1 << 40
    got = momentum_step(values, seed=seed, step=step, index=index, isa=isa)
    random = np.concatenate([philox(seed, step, index // BLOCK + block, 0) for block in range(4)])[:1000]
    expected = ((values.view(np.uint32) + random) >> 16).astype(np.uint16)
    assert np.array_equal(got, expected)


def test_rounding_to_bf16_moments_is_right_on_average() -> None:
    numel = 1 << 20
    value = np.float32(1 + 0.3 * 2**-7)  # three tenths of the way to the next bf16
    got = momentum_step(np.full(numel, value)).astype(np.uint32)
    share_up = (got == 0x3F81).mean()
    assert set(np.unique(got)) == {0x3F80, 0x3F81}
    assert abs(share_up - 0.3) < 5 * (0.21 / numel) ** 0.5
    others = [momentum_step(np.full(numel, value), seed=8), momentum_step(np.full(numel, value), step=10)]
    assert all((got != other).mean() > 0.3 for other in others)


@pytest.mark.parametrize("isa", ISAS)
def test_special_values_survive_rounding_to_bf16(isa: str) -> None:
    specials = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4028235e38, -3.4028235e38, 1e-45, 1e-40], np.float32)
    got = (momentum_step(np.tile(specials, 100), isa=isa).astype(np.uint32) << 16).view(np.float32).reshape(100, -1)
    assert (got[:, :2] == 0).all()
    assert (got[:, 2] == np.inf).all()
    assert (got[:, 3] == -np.inf).all()
    assert np.isnan(got[:, 4]).all()
    assert np.isfinite(got[:, 5:]).all()
    assert (got[:, 8] >= 0).all()
    assert (got[:, 8] > 0).any()
