"""The updates of random states by which a device is compared with the native kernel.

The first updates use one operation in which devices differ, and give the difference its name; the last ones are steps
with everything at once. Values are made from bits, because the thread that makes them may flush denormal numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch

from infinity import _native
from infinity.device_update.states import DeviceStates
from infinity.state.dtypes import native_name

Difference = Literal["contraction", "division", "sqrt", "denormals", "sum of squares", "rule"]
"""Name of a difference between a device's arithmetic and the native kernel's.

contraction     a product and a sum are rounded together
division, sqrt  the results are not correctly rounded
denormals       denormal numbers count as zero
sum of squares  the sums of the gradients' squares differ
rule            an update differs for another reason
"""

NUMEL = 65_539
"""Elements of an update."""
_HALF = NUMEL // 2


class StateDtypes(NamedTuple):
    """The dtypes of a group's states; moments are fp32."""

    weight: torch.dtype
    master: _native.MasterName
    grad: torch.dtype


class ComparedUpdate(NamedTuple):
    """States in RAM, and the segments of their update; "sum of squares" uses the gradient only."""

    shows: Difference
    states: DeviceStates
    segments: list[_native.Segment]


class _Random:
    """Random values with given exponents, from `low` to `high` - 1; an exponent of -127 gives denormal numbers."""

    def __init__(self) -> None:
        self._generator = torch.Generator("cpu").manual_seed(0)

    def positive(self, low: int, high: int) -> torch.Tensor:
        """Return fp32 [NUMEL]."""
        return self._bits(low + 127 << 23, high + 127 << 23).view(torch.float32)

    def signed(self, low: int, high: int) -> torch.Tensor:
        """Return fp32 [NUMEL]."""
        signs = self._bits(-1, 1) << 31
        return (self._bits(low + 127 << 23, high + 127 << 23) | signs).view(torch.float32)

    def _bits(self, low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (NUMEL,), generator=self._generator, dtype=torch.int32, device="cpu")


def compared_updates(rule: _native.RuleName, dtypes: StateDtypes) -> Iterator[ComparedUpdate]:
    """Yield the updates that a rule needs; the states of the last ones have the dtypes."""
    random, zeros = _Random(), torch.zeros(NUMEL, dtype=torch.float32, device="cpu")
    yield ComparedUpdate("contraction", _wide(random.signed(-2, 1), random.signed(-2, 1)), [_segment("sgd", lr=0.3)])
    if rule in ("adamw", "adam", "adagrad"):
        # The squares of these gradients are zero. So the divisor is eps, or the root of the sum of squares.
        by_eps = [
            _segment("adagrad", at, min(at + 1024, NUMEL), lr=2.0**80, eps=1 + at / 99_991)
            for at in range(0, NUMEL, 1024)
        ]
        yield ComparedUpdate("division", _wide(zeros, random.signed(-80, -78), zeros.clone()), by_eps)
        tiny = torch.full_like(zeros, 2.0**-80)
        yield ComparedUpdate("sqrt", _wide(zeros, tiny, random.positive(-20, 20)), [_segment("adagrad", lr=2.0**80)])
    # The second learning rate is denormal: a thread of the CPU may flush it on the way to the device.
    small = _join(random.signed(-127, -125), random.signed(-10, 10))
    steps = [_segment("sgd", 0, _HALF, lr=1.0), _segment("sgd", _HALF, lr=2.0**-130)]
    yield ComparedUpdate("denormals", _wide(random.signed(-127, -125), small), steps)
    states = _states(dtypes, random)
    yield ComparedUpdate("sum of squares", states, [])
    for segments in _steps(rule):
        yield ComparedUpdate("rule", states, segments)


def compared_gradient(dtype: torch.dtype) -> torch.Tensor:
    """Return a random gradient [NUMEL]; some of its elements are denormal, zero, infinite or NaN."""
    return _gradient(dtype, _Random())


def _wide(weight: torch.Tensor, grad: torch.Tensor, sum_squares: torch.Tensor | None = None) -> DeviceStates:
    return DeviceStates("weight", weight, None, None, sum_squares, grad)


def _join(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.cat([first[:_HALF], second[_HALF:]])


def _states(dtypes: StateDtypes, random: _Random) -> DeviceStates:
    """Return random states. Some of the states are denormal numbers. Some gradients are zero, infinite or NaN."""
    grads = _gradient(dtypes.grad, random)
    weights = _join(random.signed(-8, 2), random.signed(-127, -120))
    exp_avg = _join(random.signed(-12, -4), random.signed(-127, -4))
    exp_avg_sq = _join(random.positive(-24, -8), random.positive(-127, -8))
    weight, residual = _rounded(weights, dtypes.weight), None if dtypes.master == "weight" else weights
    if dtypes.master == "split16":
        residual = torch.empty(NUMEL, dtype=torch.int16, device="cpu")
        _native.encode_split16(raw(weights), raw(weight), raw(residual))
    return DeviceStates(dtypes.master, weight, residual, exp_avg, exp_avg_sq, grads)


def _gradient(dtype: torch.dtype, random: _Random) -> torch.Tensor:
    grads = _join(random.signed(-24, 0), random.signed(-127, 0))
    for index, special in enumerate((0.0, -0.0, float("inf"), float("-inf"), float("nan"))):
        grads[1000 + index :: 5000] = special
    return _rounded(grads, dtype)


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.float32:
        return values
    rounded = torch.empty(NUMEL, dtype=dtype, device="cpu")
    _native.round_weights(raw(values), raw(rounded), native_name(dtype))
    return rounded


def _segment(rule: _native.RuleName, begin: int = 0, end: int = NUMEL, **options: Any) -> _native.Segment:
    return _native.Segment(begin, end, rule=rule, **{"step": 3, **options})


def _steps(rule: _native.RuleName) -> Iterator[list[_native.Segment]]:
    """Yield segments of steps with every hyperparameter that changes a rule's operations."""
    plain: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "lr": 0.3}
    scaled = plain | {"step": 1000, "grad_scale": 0.7, "initial_accumulator": 0.1, "nesterov": True}
    yield [_segment(rule, 0, _HALF, **plain), _segment(rule, _HALF + 7, **scaled)]
    yield [_segment(rule, 0, _HALF, **scaled | {"fresh": True}), _segment(rule, _HALF, **plain | {"maximize": True})]
    if rule == "sgd":
        yield [_segment(rule, **plain | {"beta1": 0.0})]


def raw(tensor: torch.Tensor) -> Any:
    """Return the bytes of a flat tensor in RAM, in the form that the native core takes."""
    return tensor.view(torch.uint8).numpy()
