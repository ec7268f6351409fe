"""The optimizer rules for elements on a device, as in csrc/cpu_adam/rules.inl.

[Note: one operation per rounding]
The native kernel rounds every product, sum, quotient and root to fp32. So each of them is one torch operation here, in
the order of rules.inl. An operation that computes two of them at once (lerp, addcmul, addcdiv, add with alpha) rounds
once, or in another order, and gives other bits. The only division is of one tensor by another: some devices multiply by
the reciprocal of a Python scalar instead of dividing by the scalar.

rules.inl sets gradients to zero whose term in exp_avg_sq rounds to zero, because such products are slow on processors.
The rules here compute these products: the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from infinity import _native
from infinity.device_update.kernels import Kernels

CHUNK_NUMEL = 1 << 22
"""Elements that are updated at a time."""


SCRATCH_ITEMSIZE = 24
"""Bytes of temporary memory per element that is updated at a time."""


class Scratch:
    """Temporary memory for the update of up to `numel` elements, which later updates reuse.

    Args:
        device: device of the states.
        numel: number of elements; updates of more elements run in chunks of `numel` elements.
        wide_root: compute square roots in double and round them to fp32, for a device whose fp32 roots are not
            correctly rounded.
        kernels: kernels that update elements in one pass, without temporary memory; None: torch operations.
        memory: memory to use, uint8 [SCRATCH_ITEMSIZE × numel] on the device; None: new memory.

    Attributes:
        numel, kernels: see above.
        memory: the memory.
    """

    def __init__(
        self,
        device: torch.device,
        numel: int = CHUNK_NUMEL,
        *,
        wide_root: bool = False,
        kernels: Kernels | None = None,
        memory: torch.Tensor | None = None,
    ) -> None:
        self.numel = numel
        self.kernels = kernels
        if memory is None:
            memory = torch.empty(SCRATCH_ITEMSIZE * numel, dtype=torch.uint8, device=device)
        self.memory = memory
        self.p, self.g, self.t, self.u = memory[: 16 * numel].view(torch.float32).view(4, numel)
        self._wide = memory[16 * numel :].view(torch.float64) if wide_root else None

    def root(self, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Compute the square roots of fp32 values. Return `out`."""
        if self._wide is None:
            return torch.sqrt(values, out=out)
        return out.copy_(self._wide[: len(values)].copy_(values).sqrt_())


class Elements(NamedTuple):
    """The fp32 values of some elements, and memory for as many temporary values; all tensors are flat.

    Attributes:
        p: the master, updated in place.
        g: the gradient times its scale, overwritten.
        m: exp_avg, updated in place; empty if the rule does not use it.
        v: exp_avg_sq, updated in place; empty if the rule does not use it.
        t, u: temporary values.
    """

    p: torch.Tensor
    g: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    t: torch.Tensor
    u: torch.Tensor


Rule = Callable[[Elements, _native.Constants, Scratch], None]


def adamw(e: Elements, c: _native.Constants, scratch: Scratch) -> None:
    """Update elements as `AdamW` in rules.inl. It moves 132 bytes per element, 164 with a wide root."""
    p, g, m, v, t, _ = e
    m.mul_(c.beta1).add_(torch.mul(g, c.one_minus_beta1, out=t))
    v.mul_(c.beta2).add_(torch.mul(g, c.one_minus_beta2, out=t).mul_(g))
    quotient = torch.mul(m, c.step_size, out=g)
    quotient.div_(scratch.root(v, out=t).mul_(c.inverse_bc2_sqrt).add_(c.eps))
    p.mul_(c.decay).sub_(quotient)


def adam(e: Elements, c: _native.Constants, scratch: Scratch) -> None:
    """Update elements as `Adam` in rules.inl."""
    _add_l2(e, c)
    adamw(e, c, scratch)


def lion(e: Elements, c: _native.Constants, scratch: Scratch) -> None:
    """Update elements as `Lion` in rules.inl."""
    p, g, m, _, t, u = e
    step = torch.mul(m, c.beta1, out=u).add_(torch.mul(g, c.one_minus_beta1, out=t))
    mask = t.view(torch.bool)[: len(u)]
    # Steps that are 0 or NaN stay what they are.
    step.masked_fill_(torch.gt(step, 0.0, out=mask), c.step_size)
    step.masked_fill_(torch.lt(step, 0.0, out=mask), -c.step_size)
    p.mul_(c.decay).sub_(step)
    m.mul_(c.beta2).add_(g.mul_(c.one_minus_beta2))


def adagrad(e: Elements, c: _native.Constants, scratch: Scratch) -> None:
    """Update elements as `Adagrad` in rules.inl."""
    _add_l2(e, c)
    e.v.add_(c.initial).add_(torch.mul(e.g, e.g, out=e.t))
    quotient = e.g.mul_(c.step_size)
    quotient.div_(scratch.root(e.v, out=e.t).add_(c.eps))
    e.p.sub_(quotient)


def sgd(e: Elements, c: _native.Constants, scratch: Scratch) -> None:
    """Update elements as `Sgd` in rules.inl."""
    _add_l2(e, c)
    p, g, m, _, t, _ = e
    m.mul_(c.beta1).add_(torch.mul(g, c.one_minus_beta1, out=t))
    direction = g.add_(torch.mul(m, c.beta1, out=t)) if c.nesterov else m
    p.sub_(torch.mul(direction, c.step_size, out=t))


def sgd_without_momentum(e: Elements, c: _native.Constants, scratch: Scratch) -> None:
    """Update elements as `SgdWithoutMomentum` in rules.inl."""
    _add_l2(e, c)
    e.p.sub_(e.g.mul_(c.step_size))


def _add_l2(e: Elements, c: _native.Constants) -> None:
    # Also with a factor of 0, because then −0 becomes 0.
    e.g.add_(torch.mul(e.p, c.l2, out=e.t))


_RULES: dict[_native.RuleName, Rule] = {"adamw": adamw, "adam": adam, "lion": lion, "adagrad": adagrad, "sgd": sgd}


def rule_of(constants: _native.Constants) -> Rule:
    """Return the function of a segment's rule."""
    if constants.rule == "sgd" and not constants.uses_exp_avg:
        return sgd_without_momentum
    return _RULES[constants.rule]
