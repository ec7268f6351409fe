"""Gradients until the update: landing, adding up over micro-batches, and the exact global norm.

The way of a gradient: ParameterHooks (runtime/hooks.py) → Coordinator.arrive → GroupGradients.land → in one process on
the CPU _native.land_gradient; from a device the queue below; of several ranks the outbox (sharded/outbox.py).

A group's buffer holds the dtype of its weights until a second gradient arrives for a parameter; then it is widened,
in place, to fp32, so that one micro-batch costs 2 bytes per bf16 parameter and accumulation is in fp32. A group that
accumulated in one step begins the next in fp32, and so does one whose micro-batches come one right after the other.

Gradients without room in RAM, or without room there to be widened, land in a window of RAM and wait in the store
(tiers/window.py). They are written when the backward of another unit begins.

The pass that takes a gradient in also takes its sum of squares, so that the norm costs no pass of its own. From
a device with memory of its own gradients come through a queue (tiers/downloads.py), and land while the host goes on:
what reads them is chained to that, or asks `settle`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch
from torch import nn

from infinity import _native
from infinity.errors import PlanError
from infinity.io.arena import Lease
from infinity.io.store import Extent
from infinity.sizes import format_bytes
from infinity.state.dtypes import native_name
from infinity.state.unit import Group, ParameterSpec, Place, Unit
from infinity.tiers.downloads import GradientQueue, GroupDownload
from infinity.tiers.resources import Resources
from infinity.tiers.window import LandingWindow, Spill
from infinity.units.arrivals import Arrivals


class GroupGradients:
    """The gradients of one trainable group.

    Invariant: an element of a parameter that is not in `present` is garbage and never read. `_sums` has Σ g² of what is
    in `present`, in partials, but for what is in `_down`, which may not have landed.

    Args:
        home: RAM they wait in; None: they spill.
        extent, window: their place in the store and the way there; None: they always have room in RAM.
        queue: the way from a device; None: they are in host memory when they come.
    """

    def __init__(
        self,
        unit: Unit,
        group: Group,
        home: Lease | None,
        extent: Extent | None,
        window: LandingWindow | None,
        queue: GradientQueue | None,
        pool: _native.ThreadPool,
    ) -> None:
        self._unit = unit
        self._group = group
        self._home = home
        self._down = None if queue is None else GroupDownload(queue, group)
        self._spill = None if extent is None or window is None else Spill(extent, window, self._down)
        self._spilled = home is None
        self._pool = pool
        self.mean = 1.0
        self._keep_as(group.dtype)
        self.present: set[str] = set()
        self._sums: dict[str, Sequence[float]] = {}
        self._accumulates = False

    def stream(self) -> _native.StateStream:
        """The flat gradients, `dtype`, of the whole group, as the update takes them.

        Raises:
            SwapIOError: they were lost on their way to the store.
        """
        if self._spilled and self._spill is not None:
            return self._spill.stream()
        return _native.StateStream(memory=self._view())

    @property
    def spilled(self) -> bool:
        """They are in the store, or on their way there."""
        return self._spilled

    def _view(self) -> memoryview:
        """The memory they are in now; brings them there."""
        if self._spilled and self._spill is not None:
            return self._spill.bring()
        if self._home is None:
            raise AssertionError(f"gradients of '{self._unit.name}' have no place")
        return self._home.view()

    @property
    def finite(self) -> bool:
        """Whether what is present and was summed up is: what comes from a device is, once it has landed and was asked
        for."""
        return all(map(math.isfinite, chain.from_iterable(self._sums.values())))

    def _range(self, spec: ParameterSpec) -> memoryview:
        begin, end = spec.offset * self.dtype.itemsize, (spec.offset + spec.numel) * self.dtype.itemsize
        return self._view()[begin:end]

    def land(self, spec: ParameterSpec, gradient: torch.Tensor, *, accumulate: bool, more: bool = False) -> None:
        """Take one gradient.

        Args:
            gradient: of the parameter's shape, on its device.
            accumulate: add it to the one that is there.
            more: further gradients of the group's parameters are about to be added.

        Raises:
            PlanError: a second gradient before a step, with no room for fp32 accumulation.
            SwapIOError: gradients on their way to the store, or back, were lost.
        """
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        adds = accumulate and spec.name in self.present
        if adds:
            self._widen()
            self._accumulates = True
        elif not self.present:
            # What comes from a device and spills moves fewer bytes in the dtype it comes in.
            room = self._room_bytes if self._down is None else self._home_bytes
            wide = (self._accumulates or more) and room >= self._fp32_bytes
            self._keep_as(torch.float32 if wide else self._group.dtype)
            self._spilled = self._home is None or self._home.nbytes < self._group.numel * self.dtype.itemsize
            self._accumulates = False
        self.present.add(spec.name)
        if self._down is not None:
            self._pack(self._down, spec, gradient.detach(), add=adds, more=more)
            return
        flat = gradient.detach().reshape(-1).contiguous()
        if self.dtype not in (torch.float32, flat.dtype):
            flat = flat.to(self.dtype)
        self._sums[spec.name] = _native.land_gradient(
            self._range(spec),
            native_name(self.dtype),
            flat.view(torch.uint8).numpy(),
            native_name(flat.dtype),
            add=adds,
            pool=self._pool,
            first=spec.offset,
        )

    def _keep_as(self, dtype: torch.dtype) -> None:
        """What is in their memory from now on has this dtype."""
        self.dtype = dtype
        if self._spill is not None:
            self._spill.use(self._group.state_bytes(dtype.itemsize))

    def _pack(self, down: GroupDownload, spec: ParameterSpec, gradient: torch.Tensor, *, add: bool, more: bool) -> None:
        if not spec.numel:
            self._sums.pop(spec.name, None)
            return
        if down.packed is not None and not down.packed.takes(spec, add=add):
            down.send()
        if not add and down.sent(spec.name):
            self.settle()  # the native thread may still read the one that this one takes the place of
        self._sums.pop(spec.name, None)
        adds_up = more and not add and self.dtype == torch.float32
        packed = down.packed or down.begin(self._view(), self.dtype, adds_up=adds_up)
        down.queue.pack(packed, spec, gradient, add=add)

    def send(self) -> None:
        """Start the way of what came from the device."""
        if self._down is not None:
            self._down.send()

    def on_their_way(self) -> list[_native.IOFuture]:
        """What an update that reads them has to wait for."""
        return [] if self._down is None else self._down.on_their_way()

    def settle(self) -> None:
        """Wait until everything has landed.

        Raises:
            DeviceError: it was lost on its way.
        """
        for sums in () if self._down is None else self._down.land():
            self._sums.update({name: parts for name, parts in sums.items() if name in self.present})

    @property
    def _fp32_bytes(self) -> int:
        return self._group.numel * 4

    @property
    def _home_bytes(self) -> int:
        return 0 if self._home is None else self._home.nbytes

    @property
    def _room_bytes(self) -> int:
        return self._home_bytes if self._spill is None else max(self._home_bytes, self._spill.nbytes)

    def _widen(self) -> None:
        if self.dtype == torch.float32:
            return
        if self._room_bytes < self._fp32_bytes:
            raise PlanError(
                f"a second backward pass before the step needs fp32 gradients for unit '{self._unit.name}' "
                f"({format_bytes(self._fp32_bytes)}), and memory.host has room for {format_bytes(self._room_bytes)} "
                "only. Raise memory.host until the plan says 'any number of micro-batches', set gradients: nvme, or "
                "step after every backward pass."
            )
        self.settle()
        if not self._spilled and self._home is not None and self._home.nbytes < self._fp32_bytes:
            nbytes = self._group.numel * self.dtype.itemsize
            there = self._home.view(0, nbytes)
            self._spilled = True
            torch.frombuffer(self._view(), dtype=torch.uint8)[:nbytes].copy_(torch.frombuffer(there, dtype=torch.uint8))
        _native.widen_in_place(self._view(), native_name(self.dtype), self._group.numel)
        self._keep_as(torch.float32)

    def backward_begins(self) -> None:
        """The unit's backward is next: if some are in the store, they will be added to."""
        if self._spilled and self._spill is not None:
            self._spill.announce()

    def replay(self) -> None:
        """Have what spills take the way of a gradient that landed; what is in it does not matter."""
        if self._spilled and self._spill is not None:
            self._spill.bring()

    def forget(self) -> None:
        """None of them is needed any more."""
        self.present.clear()
        self._sums.clear()
        self._forget()

    def _forget(self) -> None:
        if self._down is not None:
            self._down.forget()
        if self._spill is not None:
            self._spill.forget()

    def leave(self) -> None:
        """None of them is expected soon: what spills leaves for the store. Raises SwapIOError as `stream`."""
        if self._spill is not None:
            self._spill.leave()

    def partials(self, spec: ParameterSpec) -> Sequence[float]:
        """Σ g² in double of each part that the group's grid cuts, the same for any number of threads; not finite where
        an element is not. Waits until the gradient has landed, and raises as `settle`."""
        if spec.name not in self._sums:
            self.settle()
        if spec.name not in self._sums:
            name = native_name(self.dtype)
            self._sums[spec.name] = _native.sums_of_squares(self._range(spec), name, self._pool, first=spec.offset)
        return self._sums[spec.name]

    def sum_squares(self, spec: ParameterSpec) -> float:
        """Σ g² in double; not finite when any element is not. Waits and raises as `partials`."""
        return total_of(self.partials(spec))

    def value(self, spec: ParameterSpec) -> torch.Tensor:
        """A copy of a gradient that is present, of the parameter's shape, `dtype`. Waits until it has landed.

        Raises:
            DeviceError, SwapIOError: it was lost on its way.
        """
        self.settle()
        if not spec.numel:
            return torch.empty(spec.shape, dtype=self.dtype)
        return torch.frombuffer(self._range(spec), dtype=self.dtype).clone().view(spec.shape)

    def drop(self, name: str) -> None:
        self.present.discard(name)
        self._sums.pop(name, None)
        if not self.present:
            self._forget()


def groups_of(unit: Unit, resources: Resources) -> dict[int, GroupGradients]:
    """The gradients of a unit's trainable groups, by index."""
    return {
        index: GroupGradients(
            unit,
            unit.groups[index],
            states.gradient,
            states.spilled,
            resources.landing,
            None if resources.device is None else resources.device.gradients,
            resources.pool,
        )
        for index, states in resources.units[unit.index].states.items()
    }


def total_of(partials: Iterable[float]) -> float:
    """The sum of partials, rounded once: the same in whatever order they come, so that any number of ranks which have
    a share of them finds the same norm."""
    return math.fsum(partials)


class UnitGradients:
    """The gradients of one unit.

    Attributes:
        groups: of the trainable groups, by index.
        arrivals: what the backward pass under way has brought.
    """

    def __init__(self, unit: Unit, groups: Mapping[int, GroupGradients]) -> None:
        self.groups = groups
        self.arrivals = Arrivals([spec.name for group in unit.trainable_groups for spec in group.specs])

    @property
    def finite(self) -> bool:
        """Whether all that were summed up are."""
        return all(group.finite for group in self.groups.values())

    def send(self) -> None:
        """Start the way of what came from the device."""
        for group in self.groups.values():
            group.send()

    @property
    def in_ram(self) -> bool:
        """Whether an update can read them at once."""
        return not any(group.spilled for group in self.groups.values())

    def leave(self) -> None:
        """None of them is expected soon (GroupGradients.leave)."""
        for group in self.groups.values():
            group.leave()

    def backward_begins(self) -> None:
        """The unit's backward is next."""
        for group in self.groups.values():
            group.backward_begins()


class Landed(Protocol):
    """The gradients of one group, as optimizers and handles see them.

    Attributes:
        mean: what a gradient is to be multiplied by, where those of several ranks were added.
    """

    mean: float

    @property
    def present(self) -> Set[str]: ...

    def land(self, spec: ParameterSpec, gradient: torch.Tensor, *, accumulate: bool, more: bool = False) -> None: ...

    def partials(self, spec: ParameterSpec) -> Sequence[float]: ...

    def sum_squares(self, spec: ParameterSpec) -> float: ...

    def drop(self, name: str) -> None: ...


@dataclass(frozen=True)
class Decision:
    """What is known before a step.

    Attributes:
        skip: why the step is to change nothing, by this process or another rank; "" where none wants that.
        told: what each rank told of its generations, in the order of the ranks.
    """

    skip: str
    told: Sequence[Sequence[int]]


Named = Callable[[], Iterable[tuple[nn.Parameter, Place]]]
"""Gives the parameters of the model, and their places."""


class Gradients(Protocol):
    """The gradients of every trainable parameter, from the backward passes to the step: those of this process
    (`LocalGradients`), or of all ranks (sharded/gradients.py). All ranks make the same calls."""

    @property
    def elsewhere(self) -> Set[str]:
        """Names of the parameters that have a gradient on any rank, where others may have some that this one lacks."""

    def of(self, place: Place) -> Landed: ...

    def has(self, place: Place) -> bool: ...

    def value(self, place: Place) -> torch.Tensor:
        """As GroupGradients.value. Raises NotAvailableError: this process has a slice of it."""

    def require_settable(self, place: Place) -> None:
        """Raises NotAvailableError: the gradient cannot be set by hand."""

    def begin_pass(self) -> None:
        """An outermost backward pass begins."""

    def backward_begins(self, units: Collection[int], staying: Collection[int]) -> None:
        """The backward of `units` begins: the gradients of others leave for the store, but for those of `staying`."""

    def left(self, units: Iterable[int]) -> None:
        """The backward of these units is over. Raises PeerError."""

    def about_to_land(self, index: int, /) -> None:
        """Backward brings a gradient of a unit."""

    def complete(self, index: int) -> Iterable[int]:
        """A unit has all its gradients, as far as can be told: they leave the device. Yields the units whose gradients
        are complete everywhere, as they become so."""

    def passed(self, indices: Iterable[int], complete: Collection[int]) -> Iterable[int]:
        """The backward of a micro-batch has passed these units, of which `complete` have the gradients of all
        micro-batches now. Yields as `complete`. Raises PeerError."""

    def take_completed(self) -> Sequence[int]:
        """The units of which all gradients of a pass have landed from everywhere. Each is told once."""

    def pass_ended(self) -> None:
        """The outermost backward pass is over. Raises PeerError."""

    def send(self) -> None:
        """The backward is over: start the way of everything that came from the device."""

    def synchronize(self) -> None:
        """Wait for what is on its way from the device, from other ranks, and to the store.

        Raises:
            DeviceError, SwapIOError, PeerError: gradients were lost.
        """

    def drop_cleared(self, named: Named) -> None:
        """Parameters whose `.grad` was set to None by hand: their gradients are not wanted any more."""

    def decide(self, facts: Mapping[str, object], skip: str, told: Sequence[int]) -> Decision:
        """Before a step, when all gradients have landed.

        Args:
            facts: what must be the same on all ranks, by what to call it; JSON.
            skip: why this process wants the step to change nothing; "" where it does not.
            told: of this process's generations.

        Raises:
            PeerError: facts differ, or which parameters have a gradient; a rank failed.
        """

    def sum_squares(self, places: Iterable[Place]) -> tuple[float, str]:
        """The sum over `places`, and the first name whose part is not finite ('' when all are)."""


class LocalGradients:
    """Of one process (Gradients).

    Args:
        units: in the order of their indices.
        window: that some land in, where some spill.
        before: called with the index of a unit before gradients of it land: from then on nothing may read those that
            are there.
    """

    elsewhere: Set[str] = frozenset()

    def __init__(
        self, units: Sequence[UnitGradients], window: LandingWindow | None, before: Callable[[int], None]
    ) -> None:
        self._units = units
        self._window = window
        self.about_to_land = before

    def of(self, place: Place) -> GroupGradients:
        return self._units[place.unit.index].groups[place.group_index]

    def has(self, place: Place) -> bool:
        return place.spec.name in self.of(place).present

    def value(self, place: Place) -> torch.Tensor:
        return self.of(place).value(place.spec)

    def require_settable(self, place: Place) -> None:
        return

    def begin_pass(self) -> None:
        return

    def backward_begins(self, units: Collection[int], staying: Collection[int]) -> None:
        if self._window is None:
            return
        for index, unit in enumerate(self._units):
            if index not in units and index not in staying:
                unit.leave()
        for index in units:
            self._units[index].backward_begins()

    def left(self, units: Iterable[int]) -> None:
        return

    def complete(self, index: int) -> Iterable[int]:
        self._units[index].send()
        return (index,)

    def passed(self, indices: Iterable[int], complete: Collection[int]) -> Iterator[int]:
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
                group.settle()
        if self._window is not None:
            self._window.clear()

    def drop_cleared(self, named: Named) -> None:
        return

    def decide(self, facts: Mapping[str, object], skip: str, told: Sequence[int]) -> Decision:
        return Decision(skip, [told])

    def sum_squares(self, places: Iterable[Place]) -> tuple[float, str]:
        return sum_of(self.of, places)


def sum_of(of: Callable[[Place], Landed], places: Iterable[Place]) -> tuple[float, str]:
    """As Gradients.sum_squares. Args: of: gives the gradients that the one at a place is among."""
    every: list[float] = []
    for place in places:
        found = of(place).partials(place.spec)
        if not all(map(math.isfinite, found)):
            return float("nan"), place.spec.name
        every += found
    return total_of(every), ""
