"""An update, and sums of squares, in one kernel each, for devices that Triton supports.

The kernels have the operations of rules.py and of sum_squares.py in the same order, and keep intermediate values in
registers. This module is imported only where Triton is installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

from infinity import _native

if TYPE_CHECKING:
    from infinity.device_update.states import DeviceStates

_COUNT = 1024
"""Elements that one program updates."""
_ROWS = 16
"""Rows of a partial that are loaded before the first of them is added."""


@triton.jit  # type: ignore[untyped-decorator]
def _load_master(weight, residual, at, inside, master: tl.constexpr):  # type: ignore[no-untyped-def]
    if master == "split16":
        high = tl.load(weight + at, mask=inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32) << 16
        low = tl.load(residual + at, mask=inside, other=0).to(tl.int32)
        p = (high + low).to(tl.float32, bitcast=True)
    elif master == "fp32":
        p = tl.load(residual + at, mask=inside, other=0.0)
    else:
        p = tl.load(weight + at, mask=inside, other=0.0)
    return p


@triton.jit  # type: ignore[untyped-decorator]
def _store_master(p, weight, residual, at, inside, master: tl.constexpr):  # type: ignore[no-untyped-def]
    bits = tl.where(p == p, p.to(tl.int32, bitcast=True), 0x7FC00000)
    if weight.dtype.element_ty == tl.bfloat16:  # rounded half up, csrc/base/bits.hpp
        half = ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        tl.store(weight + at, half, mask=inside)
    else:
        tl.store(weight + at, p.to(weight.dtype.element_ty), mask=inside)
    if master == "split16":
        tl.store(residual + at, bits.to(tl.int16), mask=inside)
    elif master == "fp32":
        tl.store(residual + at, p, mask=inside)
    return bits


@triton.jit  # type: ignore[untyped-decorator]
def _apply(  # type: ignore[no-untyped-def]
    p,
    g,
    m,
    v,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    step_size,
    inverse_bc2_sqrt,
    eps,
    decay,
    l2,
    initial,
    rule: tl.constexpr,
    uses_m: tl.constexpr,
    nesterov: tl.constexpr,
):
    if rule == "adamw" or rule == "adam":
        if rule == "adam":
            g = g + p * l2
        m = m * beta1 + g * one_minus_beta1
        v = v * beta2 + (g * one_minus_beta2) * g
        p = p * decay - tl.div_rn(m * step_size, tl.sqrt_rn(v) * inverse_bc2_sqrt + eps)
    elif rule == "lion":
        update = m * beta1 + g * one_minus_beta1
        p = p * decay - tl.where(update > 0.0, step_size, tl.where(update < 0.0, -step_size, update))
        m = m * beta2 + g * one_minus_beta2
    elif rule == "adagrad":
        g = g + p * l2
        v = (v + initial) + g * g
        p = p - tl.div_rn(g * step_size, tl.sqrt_rn(v) + eps)
    else:
        tl.static_assert(rule == "sgd")
        g = g + p * l2
        if uses_m:
            m = m * beta1 + g * one_minus_beta1
            g = g + m * beta1 if nesterov else m
        p = p - g * step_size
    return p, m, v


@triton.jit  # type: ignore[untyped-decorator]
def _update(  # type: ignore[no-untyped-def]
    weight,
    residual,
    exp_avg,
    exp_avg_sq,
    grad,
    finite,
    begin,
    end,
    grad_scale,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    step_size,
    inverse_bc2_sqrt,
    eps,
    decay,
    l2,
    initial,
    rule: tl.constexpr,
    master: tl.constexpr,
    uses_m: tl.constexpr,
    uses_v: tl.constexpr,
    fresh: tl.constexpr,
    nesterov: tl.constexpr,
    count: tl.constexpr,
):
    at = begin + tl.program_id(0).to(tl.int64) * count + tl.arange(0, count)
    inside = at < end
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * grad_scale
    m = tl.zeros([count], tl.float32)
    v = tl.zeros([count], tl.float32)
    if uses_m and not fresh:
        m = tl.load(exp_avg + at, mask=inside, other=0.0)
    if uses_v and not fresh:
        v = tl.load(exp_avg_sq + at, mask=inside, other=0.0)
    p = _load_master(weight, residual, at, inside, master)
    p, m, v = _apply(
        p,
        g,
        m,
        v,
        beta1,
        one_minus_beta1,
        beta2,
        one_minus_beta2,
        step_size,
        inverse_bc2_sqrt,
        eps,
        decay,
        l2,
        initial,
        rule,
        uses_m,
        nesterov,
    )
    most = _store_master(p, weight, residual, at, inside, master) & 0x7FFFFFFF
    if uses_m:
        tl.store(exp_avg + at, m, mask=inside)
        most = tl.maximum(most, m.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    if uses_v:
        tl.store(exp_avg_sq + at, v, mask=inside)
        most = tl.maximum(most, v.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(finite, 0, mask=tl.max(tl.where(inside, most, 0)) >= 0x7F800000)


def update(states: DeviceStates, segments: list[tuple[int, int, _native.Constants]]) -> torch.Tensor:
    """Queue one kernel for each segment. Arguments and result are those of states.update_on_device.

    Args:
        states: the states.
        segments: begin, end and constants of each range of elements that is updated.

    Returns:
        bool [], on the device: whether all new masters and moments are finite.
    """
    finite = torch.ones((), dtype=torch.bool, device=states.weight.device)
    weight, unused = states.weight, states.weight
    for begin, end, c in segments:
        if begin < end:
            _update[triton.cdiv(end - begin, _COUNT),](
                weight,
                unused if states.residual is None else states.residual,
                states.exp_avg if c.uses_exp_avg else unused,
                states.exp_avg_sq if c.uses_exp_avg_sq else unused,
                states.grad,
                finite.view(torch.int8),
                begin,
                end,
                *(c.grad_scale, c.beta1, c.one_minus_beta1, c.beta2, c.one_minus_beta2, c.step_size),
                *(c.inverse_bc2_sqrt, c.eps, c.decay, c.l2, c.initial),
                rule=c.rule,
                master=states.master,
                uses_m=c.uses_exp_avg,
                uses_v=c.uses_exp_avg_sq,
                fresh=c.fresh,
                nesterov=c.nesterov,
                count=_COUNT,
                enable_fp_fusion=False,  # products and sums are rounded separately
            )
    return finite


@triton.jit  # type: ignore[untyped-decorator]
def _sums(  # type: ignore[no-untyped-def]
    grad, out, first, numel, partial_numel: tl.constexpr, width: tl.constexpr, unrolled: tl.constexpr
):
    cell = first // partial_numel + tl.program_id(0).to(tl.int64)
    at = tl.maximum(cell * partial_numel, first) - first
    end = tl.minimum((cell + 1) * partial_numel, first + numel) - first
    lane = tl.arange(0, width)
    lanes = tl.zeros([width], tl.float64)
    rows = (end - at) // width
    for _ in range(rows // unrolled):
        for each in tl.static_range(unrolled):
            value = tl.load(grad + at + each * width + lane).to(tl.float32).to(tl.float64)
            lanes += value * value
        at += unrolled * width
    for _ in range(rows % unrolled):
        value = tl.load(grad + at + lane).to(tl.float32).to(tl.float64)
        lanes += value * value
        at += width
    value = tl.load(grad + at + lane, mask=at + lane < end, other=0.0).to(tl.float32).to(tl.float64)
    lanes += value * value
    lanes = tl.sum(tl.reshape(lanes, [2, width // 2]), 0)
    lanes = tl.sum(tl.reshape(lanes, [2, width // 4]), 0)
    lanes = tl.sum(tl.reshape(lanes, [2, width // 8]), 0)
    lanes = tl.sum(tl.reshape(lanes, [2, width // 16]), 0)
    tl.store(out + tl.program_id(0), tl.sum(lanes, 0))


def sums_of_squares(gradient: torch.Tensor, first: int, out: torch.Tensor, partial_numel: int, width: int) -> None:
    """Queue one kernel that computes Σ g² of each partial of a gradient.

    Args:
        gradient: flat contiguous tensor in bf16, fp16 or fp32, with at least one element.
        first: index of the gradient's first element in a larger array, whose partials begin at multiples of
            `partial_numel`.
        out: fp64 [partials] on the gradient's device.
        partial_numel: elements per partial.
        width: number of lanes, 32.
    """
    _sums[len(out),](
        gradient, out, first, len(gradient), partial_numel=partial_numel, width=width, unrolled=_ROWS, num_warps=1
    )
