"""The gradients of a resident unit: they stay on the device until the unit is updated there.

They have the same dtype and are added in the same order and to the same bits as in host memory (gradients.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from infinity import _native
from infinity.device_update.arithmetic_check import check_of
from infinity.device_update.sum_squares import PARTIAL_NUMEL, sums_of_squares
from infinity.errors import PlanError
from infinity.sizes import format_bytes
from infinity.state.unit import FlatParameterGroup, ParameterSpec, Unit
from infinity.tiers.resident import ResidentMemory
from infinity.units.accumulated_gradients import AccumulatedGradients


class ResidentSums:
    """Sums of squares of the gradients of all resident units.

    The sums of all gradients are computed together, because the host waits for the device, and because without kernels
    one gradient takes as many dependent operations as all (sum_squares.py).

    Args:
        scratch: temporary memory on the device; None if no unit is resident.
    """

    def __init__(self, scratch: ResidentMemory | None) -> None:
        self._scratch = scratch
        self._groups: list[ResidentGradients] = []

    def add(self, group: ResidentGradients) -> None:
        self._groups.append(group)

    def compute(self) -> None:
        """Compute the sums of all present gradients whose sums are not known. The host waits for the device."""
        wanted = [(group, spec) for group in self._groups for spec in group.without_sums()]
        if not wanted:
            return
        if self._scratch is None:
            raise AssertionError("gradients of resident units without a device")
        with ExitStack() as uses:
            for group in self._groups:  # the operations read windows of the memory of all groups
                uses.enter_context(group.memory.uses.reading())
            uses.enter_context(self._scratch.uses.writing())
            values = [group.of(spec) for group, spec in wanted]
            memory = self._scratch.memory
            kernels = check_of(memory.device).kernels_of_sums({each.dtype for each in values})
            sums = sums_of_squares(values, [spec.offset for _, spec in wanted], memory, kernels).tolist()
        begin = 0
        for group, spec in wanted:
            end = begin + _partials(spec)
            group.know(spec, sums[begin:end])
            begin = end


class ResidentGradients(AccumulatedGradients):
    """The gradients of one trainable group of a resident unit; the interface is that of GroupGradients.

    Args:
        unit: the unit.
        group: the group.
        memory, sums: see below.

    Attributes:
        memory: device memory for the gradients.
        sums: the sums of all resident units.
    """

    spilled = False

    def __init__(self, unit: Unit, group: FlatParameterGroup, memory: ResidentMemory, sums: ResidentSums) -> None:
        super().__init__(unit, group)
        self.memory = memory
        self.sums = sums
        sums.add(self)

    @property
    def values(self) -> torch.Tensor:
        """All gradients, flat, in `dtype`."""
        return self.memory.view(self.dtype, self._group.numel)

    def of(self, spec: ParameterSpec) -> torch.Tensor:
        """Return the gradient of a parameter, flat, in `dtype`."""
        return self.values[spec.offset : spec.offset + spec.numel]

    def take(self, spec: ParameterSpec, gradient: torch.Tensor, *, add: bool, more: bool) -> None:
        self._sums.pop(spec.name, None)
        with self.memory.uses.writing():
            if add:
                self.of(spec).add_(gradient.reshape(-1))
            else:
                self.of(spec).copy_(gradient.reshape(-1))

    @property
    def first_room_bytes(self) -> int:
        return self.memory.nbytes

    def begin_as(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def widen(self) -> None:
        numel = self._group.numel
        if self.memory.nbytes < self._fp32_bytes:
            raise PlanError(
                f"a second backward pass before the step needs fp32 gradients for unit '{self._unit.name}' "
                f"({format_bytes(self._fp32_bytes)}), but with accumulation_steps=1 the plan keeps only "
                f"{format_bytes(self.memory.nbytes)} on the device. Leave accumulation_steps out, set optimizer: host "
                "or nvme, or step after every backward pass."
            )
        with self.memory.uses.writing():
            narrow, wide = self.values, self.memory.view(torch.float32, numel)
            first = narrow[:1].clone()  # the only new memory: if there is none, no gradient has changed
            # The fp32 values of the second half lie behind all narrow values. The first half follows in the same way.
            end = numel
            while end > 1:
                begin = (end + 1) // 2
                wide[begin:end].copy_(narrow[begin:end])
                end = begin
            wide[:1].copy_(first)
        self.dtype = torch.float32

    def without_sums(self) -> list[ParameterSpec]:
        """Return the parameters whose gradients are present and whose sums are not known."""
        return [spec for spec in self._group.specs if spec.name in self.present and spec.name not in self._sums]

    def know(self, spec: ParameterSpec, partials: Sequence[float]) -> None:
        """Record the partial sums of squares of a present gradient."""
        self._sums[spec.name] = partials

    def partials(self, spec: ParameterSpec) -> Sequence[float]:
        """Return the partial sums of squares of a gradient; see GroupGradients.partials."""
        if spec.name not in self._sums:
            self.sums.compute()
        return self._sums[spec.name]

    def value(self, spec: ParameterSpec) -> torch.Tensor:
        """Return a copy in RAM of a present gradient, in the parameter's shape and in `dtype`."""
        begin, nbytes = spec.offset * self.dtype.itemsize, spec.numel * self.dtype.itemsize
        return self.memory.read(begin, nbytes).view(self.dtype).view(spec.shape)

    def send(self) -> None:
        """Do nothing: the gradients stay on the device."""

    def landing_futures(self) -> list[_native.IOFuture]:
        """Return an empty list: no gradient is in flight."""
        return []

    def wait_landed(self) -> None:
        """Do nothing: no gradient is in flight."""

    def backward_begins(self) -> None:
        """Do nothing: the gradients are on the device."""

    def begin_spill(self) -> None:
        """Do nothing: the gradients stay on the device."""

    def replay(self) -> None:
        """Do nothing: no gradient is moved in a replay."""


def _partials(spec: ParameterSpec) -> int:
    """Return the number of partial sums of a parameter."""
    return (spec.offset + spec.numel - 1) // PARTIAL_NUMEL - spec.offset // PARTIAL_NUMEL + 1 if spec.numel else 0
