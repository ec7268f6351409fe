"""Optimizers with exactly the arithmetic that infinity promises, in torch's own operations on ordinary tensors.

All arithmetic is fp32 on an fp32 master, with one rounding after each operation. Micro-batches are summed in fp32. bf16
weights are the master rounded half up. The norm is computed in double. tests/fuzz/test_reference.py compares a step
with torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from infinity import _native
from infinity.errors import NonFiniteGradientError

USES = {"AdamW": "mv", "Adam": "mv", "Lion": "m", "Adagrad": "v", "SGD": "m"}


class Reference(torch.optim.Optimizer):
    """Optimizer in plain torch.

    Attributes:
        steps: number of requested steps, including skipped steps.
        last_grad_norm, skipped_steps: same as in infinity's optimizers.
        distorted: index of a param group whose learning rate is wrong on purpose, and the factor of this learning rate.
        moved: param groups in which at least one weight has changed.
        gradients: fp32 gradients of the parameters that have a gradient.

    Args:
        exact: parameters whose moments are fp32 regardless of `moments`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        rule: str,
        *,
        max_grad_norm: float | None,
        moments: str = "fp32",
        exact: set[nn.Parameter] | None = None,
        **defaults: Any,
    ) -> None:
        super().__init__(params, defaults)
        self.rule, self.moments, self.exact = rule, moments, exact or set()
        self.max_grad_norm = max_grad_norm
        self.steps = 0
        self.last_grad_norm = 0.0
        self.skipped_steps = 0
        self._skips_in_a_row = 0
        self.distorted: tuple[int, float] | None = None
        self.moved: set[int] = set()
        self.gradients: dict[nn.Parameter, torch.Tensor] = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.requires_grad:
                parameter.register_hook(lambda _, of=parameter: self._expect(of))
                parameter.register_post_accumulate_grad_hook(self._take)

    def everything(self) -> Any:
        """Return the complete state that a run needs to continue."""
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        states = [dict(self.state[parameter]) for group in self.param_groups for parameter in group["params"]]
        return groups, states, self.steps, self.skipped_steps, self._skips_in_a_row, self.last_grad_norm

    def take(self, everything: Any) -> None:
        """Continue from a state that `everything` returned. Gradients are lost."""
        groups, states, self.steps, self.skipped_steps, self._skips_in_a_row, self.last_grad_norm = everything
        for group, values in zip(self.param_groups, groups, strict=True):
            group.update(values)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter, state in zip(parameters, states, strict=True):
            self.state[parameter] = state

    def _expect(self, parameter: nn.Parameter) -> None:
        """Prepare for a gradient: if .grad was set to None, discard the earlier gradients."""
        if parameter.grad is None:
            self.gradients.pop(parameter, None)

    def _take(self, parameter: nn.Parameter) -> None:
        """Keep a gradient in fp32, and leave a zero in .grad."""
        assert parameter.grad is not None
        gradient, parameter.grad = parameter.grad.float(), torch.zeros_like(parameter)
        before = self.gradients.get(parameter)
        self.gradients[parameter] = gradient.clone() if before is None else before + gradient

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.steps += 1
        active = [
            (parameter, index)
            for index, group in enumerate(self.param_groups)
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        total = sum(self.gradients[parameter].double().square().sum().item() for parameter, _ in active)
        if not total < math.inf:
            self.last_grad_norm = math.nan
            self.skipped_steps += 1
            self._skips_in_a_row += 1
            if self._skips_in_a_row == 5:
                raise NonFiniteGradientError("as infinity promises")
            return loss
        self._skips_in_a_row = 0
        self.last_grad_norm = math.sqrt(total)
        scale = 1.0 if self.max_grad_norm is None else min(1.0, self.max_grad_norm / (self.last_grad_norm + 1e-6))
        for parameter, index in active:
            group = dict(self.param_groups[index])
            if self.distorted is not None and self.distorted[0] == index:
                group["lr"] = float(group["lr"]) * self.distorted[1]
            gradient = self.gradients[parameter] * (-scale if group["maximize"] else scale)
            if self._update(parameter, gradient, group):
                self.moved.add(index)
        return loss

    def _update(self, parameter: nn.Parameter, g: torch.Tensor, group: dict[str, Any]) -> bool:
        """Update a parameter, and return whether the parameter's master has changed."""
        state = self.state[parameter]
        state["step"] = step = state.get("step", 0) + 1
        if "master" not in state:
            state["master"] = parameter.detach().float().clone()
            state |= {"m": torch.zeros_like(state["master"]), "v": torch.zeros_like(state["master"])}
        p, m, v = RULES[self.rule](state["master"], g, state["m"], state["v"], step, group)
        before, state["master"] = state["master"], p
        int8 = self.moments == "int8" and parameter not in self.exact
        state["m"] = _as_int8(m, signed=True) if int8 and "m" in USES[self.rule] else m
        state["v"] = _as_int8(v, signed=False) if int8 and "v" in USES[self.rule] else v
        parameter.copy_(_half_up(p) if parameter.dtype == torch.bfloat16 else p)
        return not torch.equal(before, p)


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _adam(p: Any, g: Any, m: Any, v: Any, step: int, group: dict[str, Any], *, decoupled: bool) -> Tensors:
    lr, (beta1, beta2), decay = float(group["lr"]), map(float, group["betas"]), group["weight_decay"]
    if not decoupled:
        g = g + p * decay
    m = m * beta1 + g * (1 - beta1)
    counted = _zero_below(g, 1 - beta2)
    v = v * beta2 + (counted * (1 - beta2)) * counted
    p = p * (1 - lr * decay if decoupled else 1.0)
    return p - (m * (lr / (1 - beta1**step))) / (_root(v) * (1 / math.sqrt(1 - beta2**step)) + group["eps"]), m, v


def _lion(p: Any, g: Any, m: Any, v: Any, step: int, group: dict[str, Any]) -> Tensors:
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    sign = (m * beta1 + g * (1 - beta1)).sign() * lr
    return p * (1 - lr * group["weight_decay"]) - sign, m * beta2 + g * (1 - beta2), v


def _adagrad(p: Any, g: Any, m: Any, v: Any, step: int, group: dict[str, Any]) -> Tensors:
    g = g + p * group["weight_decay"]
    counted = _zero_below(g, 1.0)
    v = (v + (group["initial_accumulator_value"] if step == 1 else 0.0)) + counted * counted
    return p - (g * (group["lr"] / (1 + (step - 1) * group["lr_decay"]))) / (_root(v) + group["eps"]), m, v


def _sgd(p: Any, g: Any, m: Any, v: Any, step: int, group: dict[str, Any]) -> Tensors:
    g = g + p * group["weight_decay"]
    if group["momentum"] == 0:
        return p - g * group["lr"], m, v
    m = m * group["momentum"] + g * (1.0 if step == 1 else 1 - group["dampening"])
    return p - (g + m * group["momentum"] if group["nesterov"] else m) * group["lr"], m, v


RULES: dict[str, Callable[..., Tensors]] = {
    "AdamW": lambda *given: _adam(*given, decoupled=True),
    "Adam": lambda *given: _adam(*given, decoupled=False),
    "Lion": _lion,
    "Adagrad": _adagrad,
    "SGD": _sgd,
}


def _root(v: torch.Tensor) -> torch.Tensor:
    """Return the square root, rounded once. torch's fp32 square root differs by an ulp for some values."""
    return v.double().sqrt().float()


def _zero_below(g: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the gradient, in which values are set to 0 if their squares would not change a sum of squares."""
    vanishing = math.sqrt(2.0**-150 / factor) * (1 - 2.0**-20)
    return torch.where(g.abs() < vanishing, torch.zeros_like(g), g)


def _half_up(p: torch.Tensor) -> torch.Tensor:
    return ((p.view(torch.int32) + 0x8000) & ~0xFFFF).view(torch.float32).bfloat16()


def _as_int8(values: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """Return a moment after encoding to int8 and decoding."""
    data = torch.zeros(_native.moment_bytes("int8", values.numel()), dtype=torch.uint8)
    flat = values.reshape(-1).contiguous()
    _native.encode_moments(flat.numpy(), "int8", is_signed=signed, data=data.numpy())
    kept = torch.empty_like(flat)
    _native.decode_moments(data.numpy(), "int8", is_signed=signed, values=kept.numpy())
    return kept.view(values.shape)
