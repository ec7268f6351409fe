"""The bytes that the optimizer's pass is counted with, and that a pass of few parameters can be measured."""

from __future__ import annotations

import pytest

from infinity import _native
from infinity.plan.adam_rate import AdamBuffers, StateFormat, measure


@pytest.mark.parametrize(
    ("form", "state_bytes", "memory_bytes"),
    [
        (StateFormat("fp32", "weight", "fp32", "fp32"), 16, 28),
        (StateFormat("bf16", "split16", "fp32", "bf16"), 20, 26),
        (StateFormat("bf16", "fp32", "fp32", "bf16"), 24, 28),
        (StateFormat("bf16", "split16", "int8", "bf16"), 8.0625, 14.0625),
    ],
)
def test_bytes_per_parameter_are_those_of_the_design(
    form: StateFormat, state_bytes: float, memory_bytes: float
) -> None:
    assert form.state_bytes == state_bytes
    assert form.memory_bytes == memory_bytes


@pytest.mark.parametrize("numel", [1, 70_000])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_a_pass_of_few_parameters_has_a_rate_and_a_bound(moments: _native.MomentsName, numel: int) -> None:
    memory, pool = AdamBuffers(numel), _native.ThreadPool(2)
    found = measure(memory, StateFormat("bf16", "split16", moments, "bf16"), _native.select_isa(), pool, 2)
    assert min(found.parameters_per_s, found.bound, found.of_bound) > 0
