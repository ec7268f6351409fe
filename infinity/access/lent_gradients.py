"""Gradients as tensors between backward and step, for reading and for changing.

[Note: changed gradients]
Inside infinity.gathered(..., grads=True), `.grad` is a copy in the parameter's dtype instead of a handle. At the end of
the context, a changed copy replaces the gradient. The sum of squares is then computed again, and an update that began
with the old gradient is undone. If the copy is unchanged, the gradient keeps the fp32 precision in which it was
accumulated. A write through `.grad.data` does not change the tensor's version number. Therefore a copy with an
unchanged version number is compared with the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from infinity.base.interrupt import uninterruptible
from infinity.coordinator.coordinator import Coordinator
from infinity.coordinator.gradient_handle import GradientHandle
from infinity.errors import ModelError
from infinity.state.unit import ParameterPlace


@dataclass(frozen=True)
class _LentGradient:
    """A gradient and its copy.

    Attributes:
        parameter: the parameter.
        place: place of the parameter.
        handle: handle of the gradient.
        copy: copy of the gradient.
        version: version number of the copy when the copy was made.
    """

    parameter: nn.Parameter
    place: ParameterPlace
    handle: GradientHandle
    copy: torch.Tensor
    version: int


class GatheredGradients:
    """Copies of the gradients of some parameters, except gradients that an outer context has copied already.

    Args:
        coordinator: coordinator of the model.
        wanted: names of parameters, by the index of their unit.

    Raises:
        ModelError: no parameter of the model has a gradient.
    """

    def __init__(self, coordinator: Coordinator, wanted: Mapping[int, Sequence[str]]) -> None:
        self._coordinator = coordinator
        named = {name for names in wanted.values() for name in names}
        with torch._C.DisableTorchFunctionSubclass():  # otherwise a released parameter answers each .grad in Python
            every = [(each, place, each.grad) for each, place in coordinator.places()]
        if all(gradient is None for *_, gradient in every):
            raise ModelError(
                "infinity.gathered(..., grads=True): no parameter of the model has a gradient. Enter the context "
                "between backward() and zero_grad()."
            )
        every = [one for one in every if one[1].spec.name in named]
        self._wanted = [(each, place, handle) for each, place, handle in every if isinstance(handle, GradientHandle)]
        self._loans: list[_LentGradient] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(place.spec.numel * place.group.dtype.itemsize for _, place, _ in self._wanted)

    def lend(self) -> None:
        """Set `.grad` of each parameter to a copy of its gradient. Raises the errors of Coordinator.gradient_value."""
        for parameter, place, handle in self._wanted:
            if parameter.dtype == torch.float16 and handle.factors.inverse_scale != 1.0:
                raise ModelError(
                    f"the gradient of '{place.spec.name}' was unscaled, and float16 would lose its small values: enter "
                    "infinity.gathered(..., grads=True) before scaler.unscale_()"
                )
            with torch.inference_mode(False), torch.no_grad():
                copy = handle.value().to(parameter.dtype)
            self._loans.append(_LentGradient(parameter, place, handle, copy, copy._version))
            parameter.grad = copy

    @uninterruptible
    def write_back(self) -> None:
        """Set the gradient of each changed copy to the values of the copy. Raises the errors of
        Coordinator.set_gradient."""
        for loan in self._loans:
            now = loan.parameter.grad
            if now is None:
                self._coordinator.drop_gradient(loan.place)
            elif not isinstance(now, GradientHandle) and _changed(loan, now):
                inverse = loan.handle.factors.inverse_scale
                self._coordinator.set_gradient(
                    loan.place, now if inverse == 1.0 else now.float() / inverse, accumulate=False
                )
                loan.handle.forget_clip()
                loan.parameter.grad = loan.handle
            else:
                loan.parameter.grad = loan.handle
        self._loans.clear()

    def put_back(self) -> None:
        """Set `.grad` of each parameter to its handle again, if `write_back` has not done so.

        If a gradient was dropped inside the context (zero_grad), set `.grad` to None.
        """
        while self._loans:
            loan = self._loans.pop()
            loan.parameter.grad = loan.handle if self._coordinator.has_gradient(loan.place) else None


def _changed(loan: _LentGradient, now: torch.Tensor) -> bool:
    if now is not loan.copy or now._version != loan.version:
        return True
    was = loan.handle.value().to(now.dtype)
    return not torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (now, was)))
