"""Gradients in host memory: landing, adding up over micro-batches, and the exact global norm.

A group's buffer holds the dtype of its weights until a second gradient arrives for a parameter; then it is widened,
in place, to fp32, so that one micro-batch costs 2 bytes per bf16 parameter and accumulation is in fp32. A group that
accumulated in one step begins the next in fp32.

The pass that takes a gradient in also takes its sum of squares, so that the norm costs no pass of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from infinity import _native
from infinity.errors import PlanError, ReleasedParameterError
from infinity.io.arena import Lease
from infinity.schedule.device import Device
from infinity.sizes import format_bytes
from infinity.state.dtypes import native_name
from infinity.state.unit import Group, ParameterSpec, Unit


@dataclass(frozen=True)
class Place:
    """Where a parameter is: its unit, its group there, and its elements in the group."""

    unit: Unit
    group_index: int
    spec: ParameterSpec

    @property
    def group(self) -> Group:
        return self.unit.groups[self.group_index]


class GroupGradients:
    """The gradients of one trainable group.

    Invariant: an element of a parameter that is not in `present` is garbage and never read. `_sums` has Σ g² of what is
    in `present`, but for what came from a GPU and may not have landed.
    """

    def __init__(self, unit: Unit, group: Group, lease: Lease, device: Device, pool: _native.ThreadPool) -> None:
        self._unit = unit
        self._group = group
        self._lease = lease
        self._device = device
        self._pool = pool
        self.dtype = group.dtype
        self.present: set[str] = set()
        self._sums: dict[str, float] = {}
        self._accumulates = False

    def view(self) -> memoryview:
        """The flat gradients, `dtype`, of the whole group."""
        return self._lease.view()

    def stream(self) -> _native.StateStream:
        """The same as the update takes it."""
        return _native.StateStream(memory=self.view())

    @property
    def finite(self) -> bool:
        """Whether what is present and was summed up is: a GPU's first pieces are not, before the step."""
        return all(part < float("inf") for part in self._sums.values())

    def _range(self, spec: ParameterSpec) -> memoryview:
        return self._lease.view(spec.offset * self.dtype.itemsize, spec.numel * self.dtype.itemsize)

    def land(self, spec: ParameterSpec, gradient: torch.Tensor, *, accumulate: bool) -> None:
        """Take one gradient.

        Args:
            gradient: of the parameter's shape, on its device.
            accumulate: add it to the one that is there.

        Raises:
            PlanError: a second gradient before a step, with no room for fp32 accumulation.
        """
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        adds = accumulate and spec.name in self.present
        if adds:
            self._widen()
            self._accumulates = True
        elif not self.present:
            wide = self._accumulates and self._device.shares_memory and self._has_fp32_room
            self.dtype = torch.float32 if wide else self._group.dtype
            self._accumulates = False
        self.present.add(spec.name)
        if not adds and not self._device.shares_memory:
            self._sums.pop(spec.name, None)
            if spec.numel:
                self._device.download(gradient.detach(), torch.frombuffer(self._range(spec), dtype=self.dtype))
            return
        flat = self._device.download_now(gradient).detach()
        if self.dtype not in (torch.float32, flat.dtype):
            flat = flat.to(self.dtype)
        self._sums[spec.name] = _native.land_gradient(
            self._range(spec),
            native_name(self.dtype),
            flat.view(torch.uint8).numpy(),
            native_name(flat.dtype),
            add=adds,
            pool=self._pool,
        )

    @property
    def _has_fp32_room(self) -> bool:
        return self._group.numel * 4 <= self._lease.nbytes

    def _widen(self) -> None:
        if self.dtype == torch.float32:
            return
        if not self._has_fp32_room:
            needed = self._group.numel * 4
            raise PlanError(
                f"a second backward pass before the step needs fp32 gradients for unit '{self._unit.name}' "
                f"({format_bytes(needed)}), and memory.host has room for {format_bytes(self._lease.nbytes)} only. "
                f"Raise "
                "memory.host until the plan says 'any number of micro-batches', or step after every backward pass."
            )
        self._device.synchronize_downloads()
        _native.widen_in_place(self.view(), native_name(self.dtype), self._group.numel)
        self.dtype = torch.float32

    def sum_squares(self, spec: ParameterSpec) -> float:
        """Σ g² in double, the same for any number of threads; not finite when any element is not.

        Copies from the device must have landed.
        """
        if spec.name not in self._sums:
            self._sums[spec.name] = _native.sum_squares(self._range(spec), native_name(self.dtype), self._pool)
        return self._sums[spec.name]

    def drop(self, name: str) -> None:
        self.present.discard(name)
        self._sums.pop(name, None)


class Gradients:
    """The gradients of every trainable parameter."""

    def __init__(self, groups: dict[tuple[int, int], GroupGradients], device: Device) -> None:
        self._groups = groups
        self._device = device

    def of(self, place: Place) -> GroupGradients:
        return self.of_group(place.unit.index, place.group_index)

    def of_group(self, unit_index: int, group_index: int) -> GroupGradients:
        return self._groups[unit_index, group_index]

    def finite(self, unit_index: int) -> bool:
        """Whether all of a unit's gradients that were summed up are."""
        return all(group.finite for (index, _), group in self._groups.items() if index == unit_index)

    def has(self, place: Place) -> bool:
        return place.spec.name in self.of(place).present

    def synchronize(self) -> None:
        """Wait for copies from the device."""
        self._device.synchronize_downloads()

    def sum_squares(self, places: Iterable[Place]) -> tuple[float, str]:
        """The sum over `places`, in their order, and the first name whose part is not finite ('' when all are)."""
        total, bad = 0.0, ""
        for place in places:
            part = self.of(place).sum_squares(place.spec)
            if not bad and not part < float("inf"):
                bad = place.spec.name
            total += part
        return total, bad


class GradientHandle(torch.Tensor):
    """Stands in `parameter.grad` for a gradient that is in host memory. Any operation on it raises.

    So `p.grad is None` means what it means in torch, and torch's own clipping or GradScaler cannot silently see
    nothing.
    """

    @staticmethod
    def __new__(cls, parameter: torch.Tensor) -> GradientHandle:
        return torch.Tensor._make_wrapper_subclass(cls, parameter.shape, dtype=parameter.dtype, device=parameter.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise ReleasedParameterError(
            f"{func} on the gradient of an offloaded parameter: it is in host memory, not in .grad. For clipping use "
            "infinity.AdamW(..., max_grad_norm=...) instead of torch.nn.utils.clip_grad_norm_; with bf16 weights no "
            "GradScaler is needed: call loss.backward() and optim.step() directly. optim.last_grad_norm has the norm."
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GradientHandle({tuple(self.shape)}, {self.dtype})"
