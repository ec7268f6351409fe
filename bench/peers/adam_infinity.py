"""Worker of adam_vs_peers that runs infinity's optimizer pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from infinity import _native
from peers.adam_protocol import BETAS, EPS, LOSS_SCALE, LR, MAX_GRAD_NORM, WEIGHT_DECAY, fill, huge_tensor, serve


class _States:
    """Memory for the widest format; narrower formats use its beginning."""

    def __init__(self, numel: int, threads: int) -> None:
        self.numel = numel
        self.pool = _native.ThreadPool(threads)
        self.weight, self.master, self.exp_avg, self.exp_avg_sq, self.grad = (
            huge_tensor(numel, torch.float32) for _ in range(5)
        )
        self.grad16 = huge_tensor(numel, torch.bfloat16)
        fill(self.grad, 1e-2)
        fill(self.grad16, 1e-2 * LOSS_SCALE)
        self._steps: dict[str, int] = {}
        self.last = self.weight

    def update(self, row: str, weight: str, master: str, moments: str, *, whole: bool) -> None:
        """Run one step; with `whole`, the gradients are in bf16, and are unscaled and clipped by their norm."""
        if self._steps.setdefault(row, 0) == 0:
            for state in (self.weight, self.master, self.exp_avg, self.exp_avg_sq):
                state.zero_()
        for other in self._steps:  # the rows share memory, so the next row starts again with step 1
            self._steps[other] = self._steps[row] + 1 if other == row else 0
        scale = 1.0
        if whole:
            squares = math.fsum(_native.sums_of_squares(_bytes(self.grad16), "bf16", self.pool))
            norm = squares**0.5 / LOSS_SCALE
            scale = min(1.0, MAX_GRAD_NORM / (norm + 1e-6)) / LOSS_SCALE
        beta1, beta2 = BETAS
        segment = _native.Segment(
            0,
            self.numel,
            lr=LR,
            beta1=beta1,
            beta2=beta2,
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            step=self._steps[row],
            grad_scale=scale,
        )
        rest = {"weight": None, "split16": _bytes(self.master)[: self.numel * 2], "fp32": _bytes(self.master)}[master]
        moment_bytes = _native.moment_bytes(moments, self.numel)
        _native.optimizer_update(
            _bytes(self.weight)[: self.numel * (4 if weight == "fp32" else 2)],
            rest,
            _bytes(self.exp_avg)[:moment_bytes],
            _bytes(self.exp_avg_sq)[:moment_bytes],
            _bytes(self.grad16 if whole else self.grad),
            weight_dtype=weight,
            master=master,
            moments=moments,
            grad_dtype="bf16" if whole else "fp32",
            segments=[segment],
            pool=self.pool,
        )
        dtype = torch.float32 if weight == "fp32" else torch.bfloat16
        self.last = self.weight.view(torch.uint8).view(dtype)[: self.numel]

    def bound(self) -> None:
        a, b, c, d = (_bytes(state) for state in (self.weight, self.exp_avg, self.exp_avg_sq, self.grad))
        _native.read_modify_write(a, b, c, d, self.pool)
        self._steps = dict.fromkeys(self._steps, 0)
        self.last = self.grad


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.view(torch.uint8).numpy()


_states: list[_States] = []


def _make(numel: int, threads: int) -> dict[str, Callable[[], None]]:
    states = _States(numel, threads)
    _states.append(states)
    rows: dict[str, Callable[[], None]] = {"bound": states.bound}

    def add(row: str, *formats: str, whole: bool) -> None:
        rows[row] = lambda: states.update(row, *formats, whole=whole)

    add("step", "fp32", "weight", "fp32", whole=False)
    add("step, int8", "fp32", "weight", "int8", whole=False)
    add("pass", "bf16", "split16", "fp32", whole=True)
    add("pass, fp32 master", "bf16", "fp32", "fp32", whole=True)
    add("pass, bf16", "bf16", "split16", "bf16", whole=True)
    add("pass, int8", "bf16", "split16", "int8", whole=True)
    return rows


if __name__ == "__main__":
    serve(_make, lambda: _states[0].last)
