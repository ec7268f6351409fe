"""The part of a group's gradients that does not depend on the memory in which they are kept.

A group's gradients have the dtype of the group's weights until a second gradient arrives for a parameter. When the
second gradient arrives, the gradients are converted to fp32 in place. So one micro-batch costs 2 bytes per bf16
parameter, and accumulation is in fp32. A group that accumulated gradients in one step begins the next step in fp32.
With vertical micro-batches, a group begins every step in fp32.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import chain

import torch

from infinity.state.unit import FlatParameterGroup, ParameterSpec, Unit


class AccumulatedGradients(ABC):
    """The gradients of one trainable group, in host memory (gradients.py) or on the device (resident_gradients.py).

    Invariant: the elements of a parameter that is not in `present`, or that is in `zeros`, are undefined and never
    read. `_sums` has partial sums of squares (Σ g²) of parameters in `present` only.

    Attributes:
        present: names of the parameters that have a gradient.
        zeros: names of the parameters in `present` whose gradient is zero without having any memory. The gradient of an
            expert without tokens arrives so: as a sparse tensor without elements.
        dtype: dtype in which all gradients are kept.
    """

    mean = 1.0
    keeps_zeros = False

    def __init__(self, unit: Unit, group: FlatParameterGroup) -> None:
        self._unit = unit
        self._group = group
        self.dtype = group.dtype
        self.present: set[str] = set()
        self.zeros: set[str] = set()
        self._sums: dict[str, Sequence[float]] = {}
        self._accumulates = False

    @property
    def finite(self) -> bool:
        """Whether all present gradients whose sum of squares is known are finite.

        For a gradient that goes from a device to host memory, the sum is known after `wait_landed`. For a gradient that
        stays on the device, the sum is known after `partials`.
        """
        return all(map(math.isfinite, chain.from_iterable(self._sums.values())))

    def land(self, spec: ParameterSpec, gradient: torch.Tensor, *, accumulate: bool, more: bool = False) -> None:
        """Take one gradient.

        Args:
            spec: parameter of the gradient.
            gradient: gradient of the parameter's shape, on the parameter's device.
            accumulate: whether the gradient is added to the present gradient; False: it replaces the present gradient.
            more: whether further gradients of the group's parameters will be added soon.

        Raises:
            PlanError: a second gradient arrived before a step, and there is no room to accumulate gradients in fp32.
            SwapIOError: a transfer of gradients to or from the store failed.
        """
        if gradient.is_sparse:
            if self.keeps_zeros and not gradient._nnz():
                self._land_zero(spec, accumulate=accumulate)
                return
            gradient = gradient.to_dense()
        adds = accumulate and spec.name in self.present and spec.name not in self.zeros
        if adds:
            if self.dtype != torch.float32:
                self.widen()
            self._accumulates = True
        elif len(self.present) == len(self.zeros):
            wide = (self._accumulates or more) and self.first_room_bytes >= self._fp32_bytes
            self.begin_as(torch.float32 if wide else self._group.dtype)
            self._accumulates = False
        self.present.add(spec.name)
        self.zeros.discard(spec.name)
        self.take(spec, gradient.detach(), add=adds, more=more)

    def _land_zero(self, spec: ParameterSpec, *, accumulate: bool) -> None:
        if not (accumulate and spec.name in self.present):
            self.present.add(spec.name)
            self.zeros.add(spec.name)
            self._sums[spec.name] = ()

    @property
    def _fp32_bytes(self) -> int:
        return self._group.numel * 4

    @property
    @abstractmethod
    def first_room_bytes(self) -> int:
        """Memory that decides whether the first gradient of a step is kept in fp32."""

    @abstractmethod
    def begin_as(self, dtype: torch.dtype) -> None:
        """Keep gradients in `dtype` from now on. No gradient is present."""

    @abstractmethod
    def widen(self) -> None:
        """Convert the present gradients to fp32. If there is no room for that, they stay unchanged.

        Raises:
            PlanError: there is no room in fp32.
        """

    @abstractmethod
    def take(self, spec: ParameterSpec, gradient: torch.Tensor, *, add: bool, more: bool) -> None:
        """Write a gradient to its place, or add it to the present gradient; see `land`."""

    @abstractmethod
    def partials(self, spec: ParameterSpec) -> Sequence[float]:
        """Return the partial sums of squares (Σ g²) of a gradient in double, one for each cell of the group's grid.

        The partial sums are the same for any number of threads. If an element of the gradient is not finite, the
        partial sum with this element is not finite.

        Raises:
            DeviceError: the gradient was lost on the way from the device to host memory.
        """

    def sum_squares(self, spec: ParameterSpec) -> float:
        """Return Σ g² of a gradient in double. It is not finite if an element of the gradient is not finite.

        Raises the errors of `partials`.
        """
        return total_of(self.partials(spec))

    def drop(self, name: str) -> None:
        """Forget the gradient of a parameter."""
        self.present.discard(name)
        self.zeros.discard(name)
        self._sums.pop(name, None)

    def forget(self) -> None:
        """Forget all gradients."""
        self.present.clear()
        self.zeros.clear()
        self._sums.clear()


def total_of(partials: Iterable[float]) -> float:
    """Return the sum of `partials`, rounded once.

    The result does not depend on the order of the partial sums. Each rank has some of the partial sums, so the norm is
    the same for any number of ranks.
    """
    return math.fsum(partials)
