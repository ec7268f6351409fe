"""Gradients before the update: how they land, how they are accumulated over micro-batches, and the exact global norm.

A gradient passes ParameterHooks (runtime/hooks.py) → Coordinator.land_gradient → GroupGradients.land, which chooses
the dtype of the gradients (accumulated_gradients.py). GroupGradients.take calls _native.land_gradient for a gradient
that is on the CPU. A gradient from a device goes through a queue (tiers/downloads.py). With several ranks, gradients go
through the outbox (sharded/outbox.py).

If RAM has no room for gradients, or no room for their conversion to fp32, they land in a window of RAM and are kept in
the store until the update (tiers/landing_window.py). These spilled gradients are written to the store when the backward
of another unit begins.

The sum of squares of a gradient is computed while the gradient lands, so the norm needs no separate pass over the
gradients. Gradients from a device with its own memory land in the background. An update that reads such gradients waits
until they have landed. All other code calls `wait_landed` before it reads gradients.
"""

from __future__ import annotations

import functools
import math
import mmap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import nn

from infinity import _native
from infinity.errors import PlanError
from infinity.io.arena import Lease
from infinity.io.store import Extent
from infinity.sizes import format_bytes
from infinity.state.dtypes import native_name
from infinity.state.unit import FlatParameterGroup, ParameterPlace, ParameterSpec, Unit
from infinity.tiers.downloads import GradientQueue, GroupGradientDownload
from infinity.tiers.landing_window import LandingWindow, SpilledGradients
from infinity.tiers.resources import ModelResources
from infinity.units.accumulated_gradients import AccumulatedGradients, total_of
from infinity.units.arrivals import GradientArrivals
from infinity.units.resident_gradients import ResidentGradients, ResidentSums


class GroupGradients(AccumulatedGradients):
    """The gradients of one trainable group in host memory.

    Invariant: `_sums` has the sums of all parameters in `present`, except for gradients in `_down`, which may not have
    landed yet.

    Args:
        home: RAM in which the gradients are kept until the update; None: the gradients spill to the store.
        extent: range of the store for spilled gradients; None: the gradients always have room in RAM.
        window: window of RAM in which spilled gradients land; None: the gradients always have room in RAM.
        queue: queue from a device; None when gradients arrive in host memory.
    """

    keeps_zeros = True

    def __init__(
        self,
        unit: Unit,
        group: FlatParameterGroup,
        home: Lease | None,
        extent: Extent | None,
        window: LandingWindow | None,
        queue: GradientQueue | None,
        pool: _native.ThreadPool,
    ) -> None:
        super().__init__(unit, group)
        self._home = home
        self._down = None if queue is None else GroupGradientDownload(queue, group)
        self._spill = None if extent is None or window is None else SpilledGradients(extent, window, self._down)
        self._spilled = home is None
        self._pool = pool
        self._keep_as(group.dtype)

    def stream(self) -> _native.StateStream:
        """Return the description of the group's gradients that the native update needs: flat, in `dtype`.

        Raises:
            SwapIOError: a write of the gradients to the store failed.
        """
        if self.zeros and len(self.zeros) == len(self.present):
            return _native.StateStream(memory=_zeros(self._fp32_bytes))
        self._write_zeros()
        if self._spilled and self._spill is not None:
            return self._spill.stream()
        return _native.StateStream(memory=self._view())

    def in_ram(self) -> memoryview:
        """Return the memory of all gradients, which must have landed: flat, in `dtype`."""
        self._write_zeros()
        self.wait_landed()
        return self._view()[: self._group.numel * self.dtype.itemsize]

    def _write_zeros(self) -> None:
        """Write the gradients in `zeros` to their places."""
        if self.zeros:
            self.wait_landed()  # an earlier gradient of the same parameter may be in flight
        for spec in self._group.specs:
            if spec.name in self.zeros:
                self.zeros.discard(spec.name)
                place = self._range(spec)
                place[:] = bytes(len(place))

    @property
    def spilled(self) -> bool:
        """Whether the gradients are in the store, or on their way to the store."""
        return self._spilled

    def _view(self) -> memoryview:
        """Return the memory of the gradients. Gradients that are in the store are read into memory first."""
        if self._spilled and self._spill is not None:
            return self._spill.load()
        if self._home is None:
            raise AssertionError(f"gradients of '{self._unit.name}' have no place")
        return self._home.view()

    def _range(self, spec: ParameterSpec) -> memoryview:
        begin, end = spec.offset * self.dtype.itemsize, (spec.offset + spec.numel) * self.dtype.itemsize
        return self._view()[begin:end]

    def take(self, spec: ParameterSpec, gradient: torch.Tensor, *, add: bool, more: bool) -> None:
        if self._down is not None:
            self._pack(self._down, spec, gradient, add=add, more=more)
            return
        flat = gradient.reshape(-1).contiguous()
        if self.dtype not in (torch.float32, flat.dtype):
            flat = flat.to(self.dtype)
        self._sums[spec.name] = _native.land_gradient(
            self._range(spec),
            native_name(self.dtype),
            flat.view(torch.uint8).numpy(),
            native_name(flat.dtype),
            add=add,
            pool=self._pool,
            first=spec.offset,
        )

    def begin_as(self, dtype: torch.dtype) -> None:
        self._keep_as(dtype)
        self._spilled = self._home is None or self._home_bytes < self._group.numel * dtype.itemsize

    def _keep_as(self, dtype: torch.dtype) -> None:
        """Set the dtype of the gradients from now on."""
        self.dtype = dtype
        if self._spill is not None:
            self._spill.use(self._group.state_bytes(dtype.itemsize))

    def _pack(
        self, down: GroupGradientDownload, spec: ParameterSpec, gradient: torch.Tensor, *, add: bool, more: bool
    ) -> None:
        if not spec.numel:
            self._sums.pop(spec.name, None)
            return
        if down.packed is not None and not down.packed.takes(spec, add=add):
            down.send()
        if not add and down.sent(spec.name):
            self.wait_landed()  # the native thread may still read the gradient that is to be replaced
        self._sums.pop(spec.name, None)
        adds_up = more and not add and self.dtype == torch.float32
        packed = down.packed or down.begin(self._view(), self.dtype, adds_up=adds_up)
        down.queue.pack(packed, spec, gradient, add=add)

    def send(self) -> None:
        """Send packed gradients from the device to host memory."""
        if self._down is not None:
            self._down.send()

    def landing_futures(self) -> list[_native.IOFuture]:
        """Return a future for each landing in flight. An update that reads the gradients must wait for these
        futures."""
        return [] if self._down is None else self._down.landing_futures()

    def wait_landed(self) -> None:
        """Wait until all gradients in flight have landed.

        Raises:
            DeviceError: a gradient was lost on the way from the device.
        """
        for sums in () if self._down is None else self._down.wait_landed():
            self._sums.update({name: parts for name, parts in sums.items() if name in self.present - self.zeros})

    @property
    def first_room_bytes(self) -> int:
        # In the dtype in which they arrive, spilled gradients from a device move fewer bytes than in fp32.
        return self._room_bytes if self._down is None else self._home_bytes

    @property
    def _home_bytes(self) -> int:
        return 0 if self._home is None else self._home.nbytes

    @property
    def _room_bytes(self) -> int:
        return self._home_bytes if self._spill is None else max(self._home_bytes, self._spill.nbytes)

    def widen(self) -> None:
        if self._room_bytes < self._fp32_bytes:
            raise PlanError(
                f"a second backward pass before the step needs fp32 gradients for unit '{self._unit.name}' "
                f"({format_bytes(self._fp32_bytes)}), but memory.host has room for only "
                f"{format_bytes(self._room_bytes)}. Raise memory.host until the plan says 'any number of "
                "micro-batches', set gradients: nvme, or step after every backward pass."
            )
        self.wait_landed()
        if not self._spilled and self._home is not None and self._home.nbytes < self._fp32_bytes:
            nbytes = self._group.numel * self.dtype.itemsize
            there = self._home.view(0, nbytes)
            self._spilled = True
            torch.frombuffer(self._view(), dtype=torch.uint8)[:nbytes].copy_(torch.frombuffer(there, dtype=torch.uint8))
        _native.widen_in_place(self._view(), native_name(self.dtype), self._group.numel)
        self._keep_as(torch.float32)

    def backward_begins(self) -> None:
        """Prepare for the unit's backward. If the gradients are in the store, start to read them, because further
        gradients will be added to them."""
        if self._spilled and self._spill is not None:
            self._spill.announce()

    def replay(self) -> None:
        """Load spilled gradients into the window, in the same way as `land`. This is for a replay of a step's
        transfers, in which values do not matter."""
        if self._spilled and self._spill is not None:
            self._spill.load()

    def forget(self) -> None:
        super().forget()
        self._forget()

    def _forget(self) -> None:
        if self._down is not None:
            self._down.forget()
        if self._spill is not None:
            self._spill.forget()

    def begin_spill(self) -> None:
        """Start to write spilled gradients to the store, because no further gradient is expected soon.

        Raises:
            SwapIOError: a write of the gradients to the store failed.
        """
        if self._spill is not None:
            self._spill.begin_spill()

    def partials(self, spec: ParameterSpec) -> Sequence[float]:
        """Return the partial sums of squares (Σ g²) of a gradient in double, one for each cell of the group's grid.

        The call waits until the gradient has landed. The partial sums are the same for any number of threads. If an
        element of the gradient is not finite, the partial sum with this element is not finite.

        Raises:
            DeviceError: the gradient was lost on the way from the device.
        """
        if spec.name not in self._sums:
            self.wait_landed()
        if spec.name not in self._sums:
            name = native_name(self.dtype)
            self._sums[spec.name] = _native.sums_of_squares(self._range(spec), name, self._pool, first=spec.offset)
        return self._sums[spec.name]

    def value(self, spec: ParameterSpec) -> torch.Tensor:
        """Return a copy of a present gradient, in the parameter's shape and in `dtype`.

        Wait until the gradient has landed.

        Raises:
            DeviceError: the gradient was lost on the way from the device.
            SwapIOError: the gradient was lost on the way to or from the store.
        """
        self.wait_landed()
        if not spec.numel or spec.name in self.zeros:
            return torch.zeros(spec.shape, dtype=self.dtype)
        return torch.frombuffer(self._range(spec), dtype=self.dtype).clone().view(spec.shape)

    def drop(self, name: str) -> None:
        super().drop(name)
        if not self.present:
            self._forget()


@functools.cache
def _zeros(nbytes: int) -> mmap.mmap:
    """Return memory with zeros, which nobody writes to. Therefore all its pages are one page of the system."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


AnyGradients: TypeAlias = GroupGradients | ResidentGradients
"""Gradients of a group, in host memory or on the device."""


def groups_of(
    unit: Unit, resources: ModelResources, sums: ResidentSums, queue: GradientQueue | None
) -> dict[int, AnyGradients]:
    """Return the gradients of a unit's trainable groups, by group index.

    Args:
        unit: the unit.
        resources: resources of the model.
        sums: sums of squares of the gradients of all resident units.
        queue: queue by which gradients land from the device; None if they land from host memory.
    """
    return {
        index: ResidentGradients(unit, unit.groups[index], states.resident, sums)
        if states.resident is not None
        else GroupGradients(
            unit,
            unit.groups[index],
            states.gradient,
            states.spilled,
            resources.landing_window,
            queue,
            resources.pool,
        )
        for index, states in resources.units[unit.index].states.items()
    }


class UnitGradients:
    """The gradients of one unit.

    Attributes:
        groups: gradients of the trainable groups, by group index.
        arrivals: counts of the gradients that have arrived in the current backward pass.
    """

    def __init__(self, unit: Unit, groups: Mapping[int, AnyGradients]) -> None:
        self.groups = groups
        self.arrivals = GradientArrivals([spec.name for group in unit.trainable_groups for spec in group.specs])

    def in_host_memory(self, group: int) -> GroupGradients:
        """Return the gradients of a group of a unit that is not resident."""
        gradients = self.groups[group]
        if not isinstance(gradients, GroupGradients):
            raise AssertionError("gradients of a resident unit")
        return gradients

    @property
    def finite(self) -> bool:
        """Whether all gradients whose sum of squares is known are finite."""
        return all(group.finite for group in self.groups.values())

    def send(self) -> None:
        """Send packed gradients of all groups from the device to host memory."""
        for group in self.groups.values():
            group.send()

    @property
    def in_ram(self) -> bool:
        """Whether all gradients are in RAM, so that an update need not read them from the store."""
        return not any(group.spilled for group in self.groups.values())

    def begin_spill(self) -> None:
        """Send spilled gradients to the store (GroupGradients.begin_spill)."""
        for group in self.groups.values():
            group.begin_spill()

    def backward_begins(self) -> None:
        """Prepare for the unit's backward (GroupGradients.backward_begins)."""
        for group in self.groups.values():
            group.backward_begins()


class GroupGradientsView(Protocol):
    """The interface of a group's gradients for optimizers and gradient handles.

    Attributes:
        mean: factor by which the sum of the ranks' gradients is multiplied to get the mean.
    """

    mean: float

    @property
    def present(self) -> Set[str]: ...

    @property
    def zeros(self) -> Set[str]: ...

    def land(self, spec: ParameterSpec, gradient: torch.Tensor, *, accumulate: bool, more: bool = False) -> None: ...

    def partials(self, spec: ParameterSpec) -> Sequence[float]: ...

    def sum_squares(self, spec: ParameterSpec) -> float: ...

    def drop(self, name: str) -> None: ...


@dataclass(frozen=True)
class StepAgreement:
    """Result of the ranks' agreement before a step.

    Attributes:
        skip: reason why the step must change nothing, from any of the ranks; "" when the step is made.
        payloads: the numbers about its generations that each rank has reported, in rank order.
    """

    skip: str
    payloads: Sequence[Sequence[int]]


Named = Callable[[], Iterable[tuple[nn.Parameter, ParameterPlace]]]
"""Function that yields each parameter of the model with its place."""


class ModelGradients(Protocol):
    """The gradients of every trainable parameter, from the backward passes to the step.

    `SingleProcessGradients` has the gradients of one process, and sharded/multi_rank_gradients.py the gradients of all
    ranks. All ranks must make the same calls.
    """

    @property
    def elsewhere(self) -> Set[str]:
        """Names of the parameters that have a gradient on any rank; always empty for a single process."""

    def of(self, place: ParameterPlace) -> GroupGradientsView: ...

    def has(self, place: ParameterPlace) -> bool: ...

    def value(self, place: ParameterPlace) -> torch.Tensor:
        """Return a copy of a gradient; see GroupGradients.value.

        Raises:
            NotAvailableError: this process has only a slice of the gradient.
        """

    def require_settable(self, place: ParameterPlace) -> None:
        """Check that a script can set the gradient.

        Raises:
            NotAvailableError: a script cannot set the gradient.
        """

    def begin_pass(self) -> None:
        """Begin an outermost backward pass."""

    def backward_begins(self, units: Collection[int], staying: Collection[int]) -> None:
        """Begin the backward of the units in `units`.

        Send the spilled gradients of the remaining units to the store, except the gradients of the units in `staying`.
        """

    def backward_left(self, units: Iterable[int]) -> None:
        """End the backward of these units.

        Raises:
            PeerError: another rank failed.
        """

    def before_landing(self, index: int, /) -> None:
        """Prepare for a gradient of a unit, which the backward will compute next."""

    def complete(self, index: int) -> Iterable[int]:
        """Send the gradients of a unit from the device to host memory, because this process expects no further
        gradients of the unit.

        Yields:
            Each unit as soon as its gradients are complete on all ranks.
        """

    def micro_batch_passed(self, indices: Iterable[int], complete: Collection[int]) -> Iterable[int]:
        """End the backward of a micro-batch through these units.

        Args:
            indices: units whose backward for the micro-batch has ended.
            complete: units among `indices` that now have the gradients of all micro-batches.

        Yields:
            Each unit as soon as its gradients are complete on all ranks.

        Raises:
            PeerError: another rank failed.
        """

    def take_completed(self) -> Sequence[int]:
        """Return the units whose gradients of this pass have landed from all ranks since the last call."""

    def pass_ended(self) -> None:
        """End the outermost backward pass.

        Raises:
            PeerError: another rank failed.
        """

    def send(self) -> None:
        """Send all packed gradients from the device to host memory, because the backward has ended."""

    def synchronize(self) -> None:
        """Wait for the gradients in flight from the device, from other ranks and to the store.

        Raises:
            DeviceError: gradients were lost on the way from the device.
            SwapIOError: gradients were lost on the way to the store.
            PeerError: gradients of another rank were lost.
        """

    def drop_cleared(self, named: Named) -> None:
        """Drop the gradients of parameters whose `.grad` a script has set to None."""

    def decide(self, facts: Mapping[str, object], skip: str, told: Sequence[int]) -> StepAgreement:
        """Agree with the other ranks on a step. The caller has waited until all gradients have landed.

        Args:
            facts: JSON values that must be the same on all ranks; the keys are names for messages.
            skip: reason of this process why the step must change nothing; "" when it has none.
            told: numbers about this process's generations, for the other ranks.

        Raises:
            PeerError: the ranks have different facts, or have gradients for different parameters; or a rank failed.
        """

    def sum_squares(self, places: Iterable[ParameterPlace]) -> tuple[float, str]:
        """Return Σ g² over `places`, and the name of the first parameter whose gradient is not finite ("" when all
        gradients are finite)."""


class SingleProcessGradients:
    """The gradients of one process (ModelGradients).

    Args:
        units: gradients of each unit, in the order of unit indices.
        window: window that spilled gradients land in; None when no gradients spill.
        before_landing: function that is called with the index of a unit before gradients of the unit land. The function
            makes sure that nothing reads the present gradients of the unit any more.
    """

    elsewhere: Set[str] = frozenset()

    def __init__(
        self, units: Sequence[UnitGradients], window: LandingWindow | None, before_landing: Callable[[int], None]
    ) -> None:
        self._units = units
        self._window = window
        self.before_landing = before_landing

    def of(self, place: ParameterPlace) -> AnyGradients:
        return self._units[place.unit.index].groups[place.group_index]

    def has(self, place: ParameterPlace) -> bool:
        return place.spec.name in self.of(place).present

    def value(self, place: ParameterPlace) -> torch.Tensor:
        return self.of(place).value(place.spec)

    def require_settable(self, place: ParameterPlace) -> None:
        return

    def begin_pass(self) -> None:
        return

    def backward_begins(self, units: Collection[int], staying: Collection[int]) -> None:
        if self._window is None:
            return
        for index, unit in enumerate(self._units):
            if index not in units and index not in staying:
                unit.begin_spill()
        for index in units:
            self._units[index].backward_begins()

    def backward_left(self, units: Iterable[int]) -> None:
        return

    def complete(self, index: int) -> Iterable[int]:
        self._units[index].send()
        return (index,)

    def micro_batch_passed(self, indices: Iterable[int], complete: Collection[int]) -> Iterator[int]:
        for index in complete:
            yield from self.complete(index)

    def take_completed(self) -> Sequence[int]:
        return ()

    def pass_ended(self) -> None:
        return

    def send(self) -> None:
        for unit in self._units:
            unit.send()

    def synchronize(self) -> None:
        for unit in self._units:
            for group in unit.groups.values():
                group.wait_landed()
        if self._window is not None:
            self._window.clear()

    def drop_cleared(self, named: Named) -> None:
        return

    def decide(self, facts: Mapping[str, object], skip: str, told: Sequence[int]) -> StepAgreement:
        return StepAgreement(skip, [told])

    def sum_squares(self, places: Iterable[ParameterPlace]) -> tuple[float, str]:
        return sum_of(self.of, places)


def sum_of(of: Callable[[ParameterPlace], GroupGradientsView], places: Iterable[ParameterPlace]) -> tuple[float, str]:
    """Return Σ g² over `places`; see ModelGradients.sum_squares.

    Args:
        of: function that returns the gradients of the group at a place.
        places: places of the parameters.
    """
    every: list[float] = []
    for place in places:
        found = of(place).partials(place.spec)
        if not all(map(math.isfinite, found)):
            return float("nan"), place.spec.name
        every += found
    return total_of(every), ""
