"""The Triton kernels end in the native kernel's bits."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from infinity import _native
from infinity.device_update.arithmetic_check import check_of
from infinity.device_update.compared_updates import raw
from infinity.device_update.kernels import kernels_of
from tests.device_update import cases

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="compiles for a GPU")
POOL = _native.ThreadPool(1)


@pytest.mark.parametrize("form", cases.FORMS)
@pytest.mark.parametrize("rule", cases.RULES)
def test_every_rule_and_form_is_updated_to_the_native_kernels_bits(rule: Any, form: str, gpu: torch.device) -> None:
    kernels = kernels_of(gpu)
    assert kernels is not None
    for seed in range(12):
        chance = random.Random(seed)
        numel, grad = chance.choice([1, 2, 255, 257, 4099, 65_536, 1_000_003]), chance.choice(cases.GRADS)
        here = cases.states(form, grad, numel, seed, tiny=chance.random() < 0.5)
        given = cases.segments(rule, numel, seed)
        there = here.map(lambda state: state.to(gpu))
        finite = cases.native(here, given, POOL)
        wanted = [(each.begin, each.end, each.constants) for each in given if not each.skip]
        assert kernels.update(there, wanted).item() == finite, seed
        cases.assert_equal(here, there.map(torch.Tensor.cpu), seed)


@pytest.mark.parametrize("dtype", cases.GRADS)
def test_sums_of_squares_have_the_native_kernels_bits(dtype: torch.dtype, gpu: torch.device) -> None:
    assert check_of(gpu).kernels_of_sums([dtype]) is not None
    kernels = kernels_of(gpu)
    assert kernels is not None
    values = cases.states("fp32", dtype, 1_000_003, 0).grad
    for begin, first in ((0, 0), (5, 65_531), (1_000_002, 3), (7, 123_456)):
        expected = _native.sums_of_squares(raw(values[begin:]), cases.NAMES[dtype], POOL, first=first)  # type: ignore[arg-type]
        out = torch.empty(len(expected), dtype=torch.float64, device=gpu)
        kernels.sums_of_squares(values[begin:].to(gpu), first, out, 65_536, 32)
        assert out.tolist() == expected
