"""split16: every fp32 pattern survives, and every NaN stays one."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from infinity import _native
from tests import sampling

CHUNK = 1 << 22
_EDGES = [0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF]
_OTHERS = sorted(set(range(1 << 16)).difference(_EDGES))
LOWER = _EDGES + random.Random(sampling.SEED).sample(_OTHERS, len(_OTHERS))


def all_patterns() -> Iterator[np.ndarray]:
    """CHUNK patterns at a time: every upper half with every lower half, or with few of them in a sample."""
    each = CHUNK >> 16
    chunks = -(-sampling.number(each, 1 << 16) // each)
    lower = np.array(LOWER[: chunks * each], np.uint32)
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    for start in range(0, len(lower), each):
        yield (upper | lower[start : start + each]).ravel()


def test_all_2_to_the_32_patterns_survive() -> None:
    changed = 0
    weight, rest = np.empty(CHUNK, np.uint16), np.empty(CHUNK, np.int16)
    back = np.empty(CHUNK, np.float32)
    for bits in all_patterns():
        _native.encode_split16(bits.view(np.float32), weight, rest)
        _native.decode_split16(weight, rest, back)
        differs = back.view(np.uint32) != bits
        if not differs.any():
            continue
        where = np.flatnonzero(differs)
        assert np.isnan(bits.view(np.float32)[where]).all()
        assert np.isnan(back[where]).all()
        changed += len(where)
    # NaNs whose half would be finite (65,536) or infinite (65,534) are kept as quiet NaNs.
    assert changed <= 131_072


def test_the_weight_is_rounded_half_up() -> None:
    bits = np.arange(0x3F800000, 0x3F800000 + (1 << 20), dtype=np.uint32)
    weight, rest = np.empty(len(bits), np.uint16), np.empty(len(bits), np.int16)
    _native.encode_split16(bits.view(np.float32), weight, rest)
    assert np.array_equal(weight, ((bits + 0x8000) >> 16).astype(np.uint16))


def test_a_nan_weight_is_a_nan() -> None:
    for bits in (0x7F800001, 0x7F807FFF, 0x7F808000, 0x7FFF7FFF, 0x7FFF8000, 0x7FFFFFFF):
        for sign in (0, 0x80000000):
            value = np.array([bits | sign], dtype=np.uint32).view(np.float32)
            weight, rest = np.empty(1, np.uint16), np.empty(1, np.int16)
            _native.encode_split16(value, weight, rest)
            assert (weight[0] & 0x7FFF) > 0x7F80
            assert (weight[0] >> 15) == (sign >> 31)


def test_a_step_of_nothing_keeps_all_2_to_the_32_patterns() -> None:
    """Through the kernel's own loads and stores: a learning rate of zero changes no weight, and a NaN stays one."""
    pool = _native.ThreadPool(2)
    weight, rest = np.empty(CHUNK, np.uint16), np.empty(CHUNK, np.int16)
    moments = [np.zeros(CHUNK, np.uint16) for _ in range(2)]
    gradient = np.full(CHUNK, 0x3F80, np.uint16)
    still = [_native.Segment(0, CHUNK, lr=0.0, beta1=0.9, beta2=0.99, eps=1e-8, step=1)]
    for bits in all_patterns():
        _native.encode_split16(bits.view(np.float32), weight, rest)
        before = weight.copy(), rest.copy()
        _native.optimizer_update(
            weight,
            rest,
            *moments,
            gradient,
            weight_dtype="bf16",
            master="split16",
            moments="bf16",
            grad_dtype="bf16",
            segments=still,
            pool=pool,
        )
        differs = np.flatnonzero((weight != before[0]) | (rest != before[1]))
        assert np.isnan(bits[differs].view(np.float32)).all()
        assert ((weight[differs] & 0x7FFF) > 0x7F80).all()
