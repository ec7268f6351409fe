"""What stands in `parameter.grad` for a gradient that is in host memory.

[Note: loss scaling]
Gradients of a scaled loss land as they are and stay so; the update multiplies them by the inverse scale, in fp32 and
along with the factor of clipping, so that unscaling costs no pass. torch.amp.GradScaler says its scale in one of two
ways:

    scaler.step(optim)       checks the gradients, then calls optim.step() with `optim.grad_scale` and `.found_inf` set
    scaler.unscale_(optim)   before it: checks them and multiplies them by the inverse; then `grad_scale` is None

Checking and multiplying are one operation in torch, which arrives at the handles: they answer the check from the sums
of squares taken when the gradients landed, and remember the factor (`inverse_scale`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from infinity.errors import ReleasedParameterError
from infinity.state.unit import ParameterSpec
from infinity.units.gradients import GroupGradients


class GradientHandle(torch.Tensor):
    """A gradient in host memory. Any operation on it raises, but for that of GradScaler.

    So `p.grad is None` means what it means in torch, and torch's own clipping cannot silently see nothing.

    Attributes:
        inverse_scale: what the gradient is still to be multiplied by, as GradScaler.unscale_ asked.

    Args:
        gradients: where it is; not kept alive.
    """

    inverse_scale: float
    _gradients: weakref.ref[GroupGradients]
    _spec: ParameterSpec

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, gradients: GroupGradients, spec: ParameterSpec) -> GradientHandle:
        handle: GradientHandle = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        handle.inverse_scale = 1.0
        handle._gradients = weakref.ref(gradients)
        handle._spec = spec
        return handle

    def renewed(self) -> GradientHandle:
        """The same handle, for another gradient of the parameter."""
        self.inverse_scale = 1.0
        return self

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """float32 for a float16 gradient: GradScaler.unscale_ refuses those, as what is small would be lost. Here it is
        not: it is multiplied in fp32."""
        stored = super().dtype
        return torch.float32 if stored == torch.float16 else stored

    @property
    def finite(self) -> bool:
        gradients = self._gradients()
        if gradients is None:
            raise ReleasedParameterError("this gradient is gone, with the offloaded model it was of")
        return gradients.is_finite(self._spec)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
            return _check_and_unscale(*args)
        raise ReleasedParameterError(
            f"{func} on the gradient of an offloaded parameter: it is in host memory, not in .grad. For clipping use "
            "infinity.AdamW(..., max_grad_norm=...) instead of torch.nn.utils.clip_grad_norm_; optim.last_grad_norm "
            "has the norm. torch.amp.GradScaler works as it is."
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GradientHandle({tuple(self.shape)}, {super().dtype})"


def _check_and_unscale(gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse: torch.Tensor) -> None:
    """As torch has it: `found_inf` becomes 1 where a gradient is not finite, and all are multiplied by `inverse`."""
    handles = [gradient for gradient in gradients if isinstance(gradient, GradientHandle)]
    by_hand = [gradient for gradient in gradients if not isinstance(gradient, GradientHandle)]
    if by_hand:
        torch._amp_foreach_non_finite_check_and_unscale_(by_hand, found_inf, inverse)
    if not all(handle.finite for handle in handles):
        found_inf.fill_(1.0)
    factor = inverse.item()  # once: on a GPU it waits for all that was queued
    for handle in handles:
        handle.inverse_scale *= factor
