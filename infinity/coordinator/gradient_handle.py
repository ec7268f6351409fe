"""The object in `parameter.grad` for a gradient that is in host memory.

[Note: loss scaling]
Gradients of a scaled loss land scaled, and are not unscaled in host memory. The update multiplies the gradients by the
inverse scale in fp32, together with the clip factor. So unscaling needs no separate pass over the gradients.
torch.amp.GradScaler passes its scale to the optimizer in one of two ways:

    scaler.step(optim)       checks the gradients, then calls optim.step() with `optim.grad_scale` and `.found_inf` set
    scaler.unscale_(optim)   before step(): checks the gradients, multiplies them by the inverse; `grad_scale` is None

The check and the multiplication are one operation in torch, which is dispatched to the handles. The handles answer the
check from the sums of squares that were computed when the gradients landed, and store the factor
(`GradientFactors.inverse_scale`).

[Note: torch's clipping]
torch.nn.utils.clip_grad_norm_ requests the norm of each gradient and multiplies each gradient by one factor. The
handles compute the norm from the same sums of squares, and store the factor (`GradientFactors.clip`) separately from
the loss scale. The loss scale is the same for all gradients of a step, and a speculative update expects the loss scale
not to change. A clip factor belongs to one parameter, and a step with a factor other than 1 makes speculative updates
wrong.

[Note: reductions]
Values that code logs about gradients (`p.grad.abs().max()`, `isfinite().all()`, norms of any order) are computed from a
copy of one gradient, which is freed with the expression. Only infinity.gathered(..., grads=True) makes copies that are
kept and may be changed. infinity.gathered first checks that there is enough memory. It writes changed copies back to
the gradients.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch.utils._pytree import tree_map_only

from infinity.errors import ReleasedParameterError
from infinity.state.unit import ParameterPlace
from infinity.units.gradients import GroupGradientsView, ModelGradients


class GradientOwner(Protocol):
    """Owner of the gradients of a model."""

    gradients: ModelGradients

    def locked(self) -> AbstractContextManager[None]: ...

    def gradient_value(self, place: ParameterPlace) -> torch.Tensor: ...


@dataclass
class GradientFactors:
    """Factors by which a gradient is still to be multiplied.

    Attributes:
        inverse_scale: factor from GradScaler.unscale_.
        clip: factor from clip_grad_norm_, or from a multiplication by hand.
    """

    inverse_scale: float = 1.0
    clip: float = 1.0


class GradientHandle(torch.Tensor):
    """A gradient in host memory.

    Operations on a handle raise an error, except reductions and the operations of GradScaler and clip_grad_norm_. So
    `p.grad is None` has the same meaning as in torch, and no code computes with a gradient that has no values.

    Attributes:
        factors: factors of the gradient. The handles that `.data` and `.detach()` return share the factors, so that a
            multiplication of one handle applies to all.

    Args:
        like: tensor of the gradient's shape, on the gradient's device.
        holder: owner of the gradient; the handle does not keep the owner alive.
        place: place of the parameter.
        factors: factors to share with other handles; None: new factors.
    """

    factors: GradientFactors
    _holder: weakref.ref[GradientOwner]
    _place: ParameterPlace

    @staticmethod
    def __new__(
        cls,
        like: torch.Tensor,
        holder: weakref.ref[GradientOwner],
        place: ParameterPlace,
        factors: GradientFactors | None = None,
    ) -> GradientHandle:
        handle: GradientHandle = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=place.group.dtype, device=like.device
        )
        handle.factors = factors or GradientFactors()
        handle._holder, handle._place = holder, place
        return handle

    def renewed(self) -> GradientHandle:
        """Reset the factors for another gradient of the parameter, and return the same handle."""
        self.factors.inverse_scale = self.factors.clip = 1.0
        return self

    def forget_clip(self) -> None:
        """Reset the clip factor, since the gradient has a new value that was not clipped."""
        self.factors.clip = 1.0

    def alias(self) -> GradientHandle:
        """Return another handle of the same gradient."""
        return GradientHandle(self, self._holder, self._place, self.factors)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Dtype of the gradient; float32 for a gradient that is stored in float16.

        GradScaler.unscale_ refuses float16, because small values would be lost. infinity loses no values, because it
        multiplies the gradient in fp32.
        """
        stored = super().dtype
        return torch.float32 if stored == torch.float16 else stored

    @property
    def finite(self) -> bool:
        return math.isfinite(self._sum_squares()[0])

    @property
    def l2_norm(self) -> float:
        """Norm of the gradient with all factors applied, averaged over the ranks.

        The norm is not finite if an element of the gradient is not finite.
        """
        total, mean = self._sum_squares()
        return math.sqrt(total) * abs(self.factors.inverse_scale * self.factors.clip) * mean

    def value(self) -> torch.Tensor:
        """Return a copy of the gradient on the parameter's device, with all factors applied.

        Raises the errors of `_landed` and GradientOwner.gradient_value.
        """
        self._landed()
        value, factor = self._held().gradient_value(self._place), self.factors.inverse_scale * self.factors.clip
        value = value if factor == 1.0 else value.float() * factor
        return value.to(self.device, self.dtype)

    def _sum_squares(self) -> tuple[float, float]:
        """Return Σ g² without the factors, and the factor that averages a gradient over the ranks.

        The lock is held, because another thread may be in a backward pass, and may pack and land this gradient.
        """
        with self._held().locked():
            landed = self._landed()
            return landed.sum_squares(self._place.spec), landed.mean

    def _landed(self) -> GroupGradientsView:
        """Return the gradients of the parameter's group, which include this gradient.

        Raises:
            ReleasedParameterError: the gradient was dropped, or its model no longer exists.
        """
        landed = self._held().gradients.of(self._place)
        if self._place.spec.name not in landed.present:
            raise ReleasedParameterError(
                f"the gradient of '{self._place.spec.name}' is gone: zero_grad(), or an assignment to .grad, dropped "
                "it. To keep its values, copy them in `with infinity.gathered(model, module, grads=True):` before it "
                "is dropped"
            )
        return landed

    def _held(self) -> GradientOwner:
        holder = self._holder()
        if holder is None:
            raise ReleasedParameterError("this gradient is gone: its offloaded model no longer exists")
        return holder

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        answer = _ANSWERS.get(func)
        if answer is None and func.overloadpacket in _READING:
            answer = functools.partial(_with_values, func)
        if answer is None:
            raise _refusal(func)
        return answer(*args, **(kwargs or {}))

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Raise an error that says what to do, unlike torch's own error."""
        raise _refusal(".numpy()")

    def tolist(self) -> NoReturn:
        """Raise an error that says what to do, like `numpy`."""
        raise _refusal(".tolist()")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GradientHandle({tuple(self.shape)}, {super().dtype})"


def _check_and_unscale(gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse: torch.Tensor) -> None:
    """Set `found_inf` to 1 if a gradient is not finite, and multiply all gradients by `inverse`, as torch does."""
    handles = [gradient for gradient in gradients if isinstance(gradient, GradientHandle)]
    by_hand = [gradient for gradient in gradients if not isinstance(gradient, GradientHandle)]
    if by_hand:
        torch._amp_foreach_non_finite_check_and_unscale_(by_hand, found_inf, inverse)
    if not all(handle.finite for handle in handles):
        found_inf.fill_(1.0)
    factor = inverse.item()  # read only once: on a GPU, the read waits for all queued work
    for handle in handles:
        handle.factors.inverse_scale *= factor


def _refusal(what: object) -> ReleasedParameterError:
    converts = what in _CONVERSIONS
    said = "a conversion (.float(), .double(), .to(), .cpu())" if converts else str(what)
    instead = " For its norm leave the conversion out: p.grad.norm()." if converts else ""
    return ReleasedParameterError(
        f"{said} on the gradient of an offloaded parameter: the gradient is in host memory, not in .grad. Between "
        "backward and step, read or change its values in `with infinity.gathered(model, module, grads=True):`; to "
        "change weights in the same context, as FGM does, give write=True, grads=True. Outside that context only these "
        "work: p.grad.norm() and other reductions, torch.nn.utils.clip_grad_norm_, a multiplication by a number, and "
        "torch.amp.GradScaler. To clip use clip_grad_norm_ or max_grad_norm= of the optimizer, whose last_grad_norm "
        f"has the norm.{instead}"
    )


def _with_values(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute with copies of the gradients, which are freed on return."""
    value = functools.cache(GradientHandle.value)  # isfinite() compares a gradient with itself
    args, kwargs = tree_map_only(GradientHandle, value, (args, kwargs))
    return func(*args, **kwargs)


def _norm(handle: GradientHandle, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Compute torch.linalg.vector_norm of a gradient.

    For a full gradient and order 2, return a float32 scalar on the parameter's device.
    """
    if order != 2 or dim is not None or keepdim:
        return _with_values(_aten.linalg_vector_norm.default, handle, order, dim, keepdim, dtype=dtype)
    return torch.tensor(handle.l2_norm, dtype=dtype or torch.float32, device=handle.device)


def _norms(gradients: Sequence[torch.Tensor], order: Any = 2, dtype: Any = None) -> list[Any]:
    return [torch.linalg.vector_norm(gradient, order, dtype=dtype) for gradient in gradients]


def _multiply(handle: torch.Tensor, factor: Any) -> torch.Tensor:
    """Multiply a gradient by a number, or by a tensor with one element."""
    if not isinstance(handle, GradientHandle):
        raise _refusal("a multiplication of a tensor by it")
    handle.factors.clip *= _number(factor)
    return handle


def _divide(handle: torch.Tensor, divisor: Any) -> torch.Tensor:
    if not isinstance(handle, GradientHandle):
        raise _refusal("a division of a tensor by it")
    handle.factors.clip /= _number(divisor)
    return handle


def _multiply_each(gradients: Sequence[torch.Tensor], factor: Any) -> None:
    for gradient in gradients:
        gradient.mul_(factor)


class _LastValueCache:
    """Cache of one number: the value of the tensor that was read last.

    torch multiplies every gradient by the same tensor, and reading this tensor from a GPU waits for all queued work.
    """

    def __init__(self) -> None:
        # one tuple, so that every thread reads matching values
        self._last: tuple[weakref.ref[torch.Tensor], int, float] | None = None

    def of(self, tensor: torch.Tensor) -> float:
        last, version = self._last, tensor._version
        if last is not None and last[0]() is tensor and last[1] == version:
            return last[2]
        value = float(tensor.item())
        self._last = weakref.ref(tensor), version, value
        return value


_last_number = _LastValueCache()


def _number(value: Any) -> float:
    if isinstance(value, GradientHandle) or (isinstance(value, torch.Tensor) and value.numel() != 1):
        raise _refusal("a multiplication by more than one number")
    return _last_number.of(value) if isinstance(value, torch.Tensor) else float(value)


_aten = torch.ops.aten
_CONVERSIONS = (_aten._to_copy.default,)
_READING = {
    *(_aten.abs, _aten.pow, _aten.isnan, _aten.isinf, _aten.eq, _aten.ne, _aten.lt, _aten.le, _aten.gt, _aten.ge),
    *(
        _aten.any,
        _aten.all,
        _aten.count_nonzero,
        _aten.sum,
        _aten.nansum,
        _aten.mean,
        _aten.std,
        _aten.var,
        _aten.median,
    ),
    *(_aten.max, _aten.min, _aten.amax, _aten.amin, _aten.aminmax, _aten.std_mean, _aten.var_mean, _aten.histc),
}
"""Reductions, and element-wise operations used inside them ([Note: reductions])."""
_ANSWERS: dict[Any, Callable[..., Any]] = {
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _check_and_unscale,
    _aten.detach.default: GradientHandle.alias,
    _aten.linalg_vector_norm.default: _norm,
    _aten._foreach_norm.Scalar: _norms,
    _aten.mul_.Tensor: _multiply,
    _aten.div_.Tensor: _divide,
    _aten._foreach_mul_.Tensor: _multiply_each,
    _aten._foreach_mul_.Scalar: _multiply_each,
}
"""Operations that the handles answer without the values of the gradients."""
