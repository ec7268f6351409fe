"""Loss scale of the step in progress, from torch.amp.GradScaler; see [Note: loss scaling] in gradient_handle.py."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from infinity.coordinator.gradient_handle import GradientHandle
from infinity.errors import ModelError


@dataclass(frozen=True)
class LossScale:
    """The loss scale of one step.

    Attributes:
        inverse: factor by which the gradients must be multiplied.
        overflowed: whether the scaler found a gradient that is not finite.
    """

    inverse: float
    overflowed: bool

    @property
    def at_fault(self) -> bool:
        """Whether a gradient overflowed and might not overflow with a lower scale.

        A scale below 1 makes gradients smaller, so such a scale cannot be the cause of the overflow.
        """
        return self.overflowed and self.inverse <= 1.0


def loss_scale(optimizer: torch.optim.Optimizer, gradients: Iterable[tuple[str, GradientHandle]]) -> LossScale:
    """Return the loss scale of the named gradients of a step.

    Raises:
        ModelError: some gradients were unscaled, and other gradients were set by hand later.
    """
    inverse = inverse_of(getattr(optimizer, "grad_scale", None))
    factors = {handle.factors.inverse_scale: name for name, handle in gradients}
    if len(factors) > 1:
        one, other = list(factors.values())[:2]
        raise ModelError(
            f"the gradients of '{one}' and '{other}' have different loss scales: one was unscaled, the other was not. "
            "Multiply gradients that you set by hand by scaler.get_scale(), and do not call scaler.unscale_(): "
            "scaler.step() unscales all gradients, and max_grad_norm= of the optimizer clips them."
        )
    return LossScale(inverse * next(iter(factors), 1.0), bool(getattr(optimizer, "found_inf", False)))


def inverse_of(scale: Any) -> float:
    """Return the inverse of a scale, computed as in GradScaler.unscale_, so that both ways give the same bits."""
    return 1.0 if scale is None else torch.as_tensor(scale, dtype=torch.float64).reciprocal().float().item()


def forget_scale(optimizer: torch.optim.Optimizer) -> None:
    """Forget what the scaler recorded about a step that an exception ended: the record is wrong for the next step."""
    for name in ("grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)
