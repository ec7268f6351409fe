"""The sums of squares in torch operations are the native kernel's."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
import torch

from infinity import _native
from infinity.device_update import sum_squares
from infinity.device_update.compared_updates import raw
from tests.device_update import cases
from tests.sampling import SEED, number

POOL = _native.ThreadPool(1)
MEMORY_BYTES = 16 << 20


def sums_of_squares(gradients: list[torch.Tensor], firsts: list[int], memory_bytes: int = MEMORY_BYTES) -> torch.Tensor:
    return sum_squares.sums_of_squares(gradients, firsts, torch.empty(memory_bytes, dtype=torch.uint8))


def native(gradients: list[torch.Tensor], firsts: list[int]) -> list[float]:
    return [
        partial
        for gradient, first in zip(gradients, firsts, strict=True)
        for partial in _native.sums_of_squares(raw(gradient), cases.NAMES[gradient.dtype], POOL, first=first)  # type: ignore[arg-type]
    ]


def gradient(seed: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return values of all magnitudes, so that another order of additions gives other bits."""
    return cases.rounded(cases.values(np.random.default_rng(seed), numel, -24, 4), dtype)


def test_random_shapes_and_dtypes_give_the_native_kernels_bits() -> None:
    """Several gradients are taken at once, with several dtypes, from a few storages."""
    chance = random.Random(SEED)
    for call in range(number(25, 500)):
        gradients, firsts = [], []
        storages = [gradient(call, 12_000, dtype) for dtype in cases.GRADS]
        for _ in range(20):
            storage = chance.choice(storages)
            begin, numel = chance.randrange(4000), chance.choice([0, 1, 31, 32, 33, chance.randrange(8000)])
            gradients.append(storage[begin : begin + numel])
            firsts.append(chance.choice([0, 256, 65_000, 65_535, chance.randrange(1 << 20)]))
        memory_bytes = chance.choice([1 << 10, 5000, MEMORY_BYTES])
        assert sums_of_squares(gradients, firsts, memory_bytes).tolist() == native(gradients, firsts), call


@pytest.mark.long
@pytest.mark.parametrize("dtype", cases.GRADS)
def test_whole_partials_give_the_native_kernels_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = gradient(0, 300_007, dtype)
    gradients, firsts = [storage, storage[5:200_000], storage[200_001:200_002]], [0, 65_531, 3]
    expected = native(gradients, firsts)
    for block in (1, 5000, 1 << 22):
        monkeypatch.setattr(sum_squares, "CHUNK_NUMEL", block)
        for memory_bytes in (1 << 10, 3 << 10, MEMORY_BYTES):
            assert sums_of_squares(gradients, firsts, memory_bytes).tolist() == expected


def calls_for(numel: int) -> int:
    """Return the number of calls, of Python and C functions, for a gradient of `numel` elements."""
    values, calls = torch.ones(numel), 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        sums_of_squares([values], [0])
    finally:
        sys.setprofile(None)
    return calls


def test_the_python_code_does_not_take_longer_for_more_partials(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model has more than 100,000 partials, and the device waits for the Python code in every step."""
    monkeypatch.setattr(sum_squares, "PARTIAL_NUMEL", 32)
    assert calls_for(32 * 10_000) == calls_for(32 * 10)


def test_gradients_in_a_slab_of_bytes_give_the_same_bits() -> None:
    """A row that begins near the end of the memory, and memory that is no whole number of elements."""
    slab = torch.empty(4 * 100 + 3, dtype=torch.uint8)
    part = slab[4 * 37 : 4 * 100].view(torch.float32)
    part.copy_(gradient(1, 63, torch.float32))
    assert sums_of_squares([part], [0]).tolist() == native([part], [0])
    assert sums_of_squares([part[:5].clone()], [0]).tolist() == native([part[:5]], [0])


def test_memory_between_gradients_does_not_count() -> None:
    storage = torch.full((1000,), float("nan"))
    storage[100:151] = 2.0
    assert sums_of_squares([storage[100:151]], [0]).tolist() == [204.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_sum_is_not_finite_when_an_element_is_not(bad: float) -> None:
    data = torch.ones(100_000)
    data[77_777] = bad
    assert sums_of_squares([data], [0]).isfinite().tolist() == [True, False]


def test_no_gradients_have_no_partials() -> None:
    assert sums_of_squares([], []).tolist() == []
    assert sums_of_squares([torch.empty(0)], [3]).tolist() == []


@pytest.mark.parametrize("wrong", [torch.ones(4, 4), torch.ones(8)[::2]])
def test_gradients_that_are_not_flat_are_refused(wrong: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="flat contiguous"):
        sums_of_squares([wrong], [0])
