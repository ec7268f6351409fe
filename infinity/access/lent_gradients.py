"""Gradients as tensors for whoever asks, between backward and step, and what is changed of them.

[Note: changed gradients]
In this context `.grad` is a copy in the parameter's dtype instead of a handle. At its end a copy that was changed takes
the place of the gradient, as one that is set by hand does: its sum of squares is taken anew, and an update that had
begun with what was there is undone. What was not changed stays as it is, and keeps the fp32 of its accumulation. A
write through `.grad.data` has no version, so a copy whose version stands still is compared with the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from infinity.base.interrupt import whole
from infinity.coordinator.coordinator import Coordinator
from infinity.coordinator.gradient_handle import GradientHandle
from infinity.errors import ModelError
from infinity.state.unit import Place


@dataclass(frozen=True)
class _Loan:
    """A gradient and its copy. Attributes: version: of the copy, when it was made."""

    parameter: nn.Parameter
    place: Place
    handle: GradientHandle
    copy: torch.Tensor
    version: int


class LentGradients:
    """The gradients of some parameters. What an outer context gave is left to it.

    Args:
        wanted: for each unit, by index, names of parameters of it.

    Raises:
        ModelError: no parameter of the model has a gradient.
    """

    def __init__(self, coordinator: Coordinator, wanted: Mapping[int, Sequence[str]]) -> None:
        self._coordinator = coordinator
        named = {name for names in wanted.values() for name in names}
        with torch._C.DisableTorchFunctionSubclass():  # a released parameter would answer each .grad in Python
            every = [(each, place, each.grad) for each, place in coordinator.places()]
        if all(gradient is None for *_, gradient in every):
            raise ModelError(
                "infinity.gathered(..., grads=True): no parameter of the model has a gradient. Enter it between "
                "backward() and zero_grad()."
            )
        every = [one for one in every if one[1].spec.name in named]
        self._wanted = [(each, place, handle) for each, place, handle in every if isinstance(handle, GradientHandle)]
        self._loans: list[_Loan] = []

    @property
    def nbytes(self) -> int:
        """Of the copies."""
        return sum(place.spec.numel * place.group.dtype.itemsize for _, place, _ in self._wanted)

    def lend(self) -> None:
        """Give each parameter a copy of its gradient. Raises as Coordinator.gradient_value."""
        for parameter, place, handle in self._wanted:
            if parameter.dtype == torch.float16 and handle.factors.inverse_scale != 1.0:
                raise ModelError(
                    f"the gradient of '{place.spec.name}' was unscaled, and float16 would lose its small values: enter "
                    "infinity.gathered(..., grads=True) before scaler.unscale_()"
                )
            with torch.inference_mode(False), torch.no_grad():
                copy = handle.value().to(parameter.dtype)
            self._loans.append(_Loan(parameter, place, handle, copy, copy._version))
            parameter.grad = copy

    @whole
    def take_back(self) -> None:
        """Take what was changed as the gradients of the step. Raises as Coordinator.land."""
        for loan in self._loans:
            now = loan.parameter.grad
            if now is None:
                self._coordinator.drop_gradient(loan.place)
            elif not isinstance(now, GradientHandle) and _changed(loan, now):
                inverse = loan.handle.factors.inverse_scale
                self._coordinator.land(loan.place, now if inverse == 1.0 else now.float() / inverse, accumulate=False)
                loan.handle.forget_clip()
                loan.parameter.grad = loan.handle
            else:
                loan.parameter.grad = loan.handle
        self._loans.clear()

    def put_back(self) -> None:
        """The handles of what was not taken back: these gradients are as they were, or were dropped (zero_grad)."""
        while self._loans:
            loan = self._loans.pop()
            loan.parameter.grad = loan.handle if self._coordinator.has_gradient(loan.place) else None


def _changed(loan: _Loan, now: torch.Tensor) -> bool:
    if now is not loan.copy or now._version != loan.version:
        return True
    was = loan.handle.value().to(now.dtype)
    return not torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (now, was)))
